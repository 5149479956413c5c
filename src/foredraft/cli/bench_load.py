"""``foredraft bench`` under load: its options, and how its result is shown."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli import options as shared
from foredraft.cli import output
from foredraft.errors import InvalidOptionError

if TYPE_CHECKING:
    from foredraft.measure.load_bench import LoadBenchResult
    from foredraft.measure.load_options import LoadOptions

_PANEL = "Under load (with --concurrency or --rate)"

Concurrency = Annotated[
    str | None,
    typer.Option(
        help="Serve so many clients at once, as in 1,2,4,8,16,32: plain, fixed draft lengths and auto in turn.",
        rich_help_panel=_PANEL,
    ),
]
ArrivalsOption = Annotated[
    str | None,
    typer.Option(
        "--arrivals",
        help="closed (--concurrency: a client sends its next request when the last one ended) or poisson (--rate).  "
        "[default: the one that fits]",
        rich_help_panel=_PANEL,
    ),
]
Rate = Annotated[
    str | None, typer.Option(help="Requests that arrive in a second, as in 1,2,4.", rich_help_panel=_PANEL)
]
Method = Annotated[str, typer.Option(help="The drafter of all arms but plain.", rich_help_panel=_PANEL)]
DraftLens = Annotated[str, typer.Option(help="The arms with a fixed draft length.", rich_help_panel=_PANEL)]
Routes = Annotated[str, typer.Option(help="Kinds of requests, in turn; not with --dataset.", rich_help_panel=_PANEL)]
Requests = Annotated[
    int | None,
    typer.Option(
        help="That each arm completes in a round.  [default: one a client, but one of each route; 16 with --rate]",
        rich_help_panel=_PANEL,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also draw throughput by load (.png, .svg, .pdf).", rich_help_panel=_PANEL),
]

ALONE_ONLY = ("peer", "prompts", "prompt_tokens", "methods", "policy", "batch_sizes")
LOAD_ONLY = ("method", "draft_lens", "routes", "requests", "plot")


def refuse_options(ctx: typer.Context, *, is_load: bool) -> None:
    """Raise :class:`InvalidOptionError` for an option that belongs to the other kind of benchmark."""
    for name in ALONE_ONLY if is_load else LOAD_ONLY:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            way = "with" if is_load else "without"
            raise InvalidOptionError(
                f"--{name.replace('_', '-')} has no effect {way} --concurrency or --rate; leave it out"
            )


def one_temperature(text: str | None) -> float:
    """The temperature of a benchmark under load.

    Raises:
        InvalidOptionError: there are several.
    """
    found = shared.numbers("temperatures", text or "0")
    if len(found) != 1:
        raise InvalidOptionError(f"temperatures={text!r}: under load give one, as in --temperatures 0.7")
    return found[0]


def bench_load(wanted: LoadOptions, report: Path | None, plot: Path | None) -> None:
    """Run it; tables, page and picture if they are wanted, then the JSON document as the last line."""
    from foredraft.lab.plots import check_path

    if plot is not None:
        check_path(plot)
    from foredraft.measure.load_bench import run_load_bench

    with output.progress() as tell:
        result = run_load_bench(wanted, tell)
    _show(result, report, plot)
    if result.interrupted:
        raise KeyboardInterrupt


def _show(result: LoadBenchResult, report: Path | None, plot: Path | None) -> None:
    from foredraft.measure.load_bench import load_document
    from foredraft.measure.load_charts import plot_load
    from foredraft.measure.load_tables import load_grids, load_headline
    from foredraft.measure.report import write_load_report
    from foredraft.measure.tables import rich_table

    found = load_document(result, shlex.join(["foredraft", *sys.argv[1:]]))
    console = output.wide_console()
    console.print(load_headline(result, found["hardware"]["cpu"]), end="\n\n")
    for grid in load_grids(result):
        console.print(rich_table(grid), end="\n\n")
    if plot is not None and result.results:
        plot_load(plot, result)
        typer.echo(f"wrote {plot}", err=True)
    if report is not None:
        write_load_report(report, result, found)
        typer.echo(f"wrote {report}", err=True)
    output.echo_document(found)
