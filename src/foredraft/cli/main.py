"""``foredraft``: the commands under one roof, with errors of the package as one line and exit status 2.

Nothing here imports torch, so that ``--help`` answers at once; each command imports what it needs.
"""

from __future__ import annotations

import warnings
from typing import Any

import typer
from typer.core import TyperGroup

from foredraft.cli.audit import audit
from foredraft.cli.bench import bench
from foredraft.cli.chat import chat
from foredraft.cli.env import env
from foredraft.cli.generate import generate
from foredraft.cli.lab import app as lab_app
from foredraft.cli.profile import profile
from foredraft.cli.train import train
from foredraft.errors import ForedraftError

INTERRUPTED = 130


class _Commands(TyperGroup):
    """Shows the package's errors and warnings as one line each, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except ForedraftError as error:
            typer.echo(f"foredraft: error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt:
            typer.echo("foredraft: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Speculative decoding that cannot be seen in the output: the same tokens, only sooner.",
)
app.command(epilog="Example: foredraft generate smollm2-135m-instruct --chat 'Tell me a story' --show-drafts")(generate)
app.command(epilog="Example: foredraft chat smollm2-135m-instruct --temperature 0.7")(chat)
app.command(epilog="Example: foredraft bench smollm2-135m-instruct --peer transformers --report bench.html")(bench)
app.command(epilog="Example: foredraft audit smollm2-135m-instruct --method ngram --rule block --report audit.html")(
    audit
)
app.command(epilog="Example: foredraft profile smollm2-135m-instruct --method ngram --plot profile.png")(profile)
app.command(epilog="Example: foredraft train eagle3 --target smollm2-135m-instruct --out head --minutes 30")(train)
app.command(epilog="Example: foredraft env --json")(env)
app.add_typer(lab_app, name="lab")


def main() -> None:
    """Entry point of the ``foredraft`` command."""
    app(prog_name="foredraft")


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    typer.echo(f"foredraft: note: {' '.join(str(message).split())}", err=True)
