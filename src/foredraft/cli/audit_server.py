"""``foredraft audit --url``: the options of an audit over HTTP, its progress and its output."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli import options as shared
from foredraft.cli import output
from foredraft.errors import ForedraftError, InvalidOptionError

if TYPE_CHECKING:
    from foredraft.lab.audit.remote.run import RemoteOptions, RemoteResult

_PANEL = "With --url"
SHARED_OPTIONS = frozenset(
    {"temperature", "tokens", "max_tokens", "prompts_file", "seed", "false_alarm_rate", "report", "help"}
)
REMOTE_OPTIONS = frozenset(
    {"url", "served_model", "against", "against_model", "body", "against_body", "chat", "concurrency"}
    | {"top_logprobs", "score_missing", "timeout", "max_retries", "api_key_env"}
)


def _option(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=_PANEL)


Url = Annotated[str | None, _option(help="Audit this OpenAI-compatible server instead, as in http://host:8000/v1.")]
ServedModel = Annotated[str | None, _option("--model", help="The name by which the server knows its model.")]
Against = Annotated[str | None, _option(help="URL of a second server that greedy answers are compared with.")]
AgainstModel = Annotated[str | None, _option(help="The model's name there.  [default: the same]")]
Body = Annotated[str | None, _option(help="JSON object with further fields of every request.")]
AgainstBody = Annotated[
    str | None, _option(help="Those of the second server; without --against, a second setting of the same one.")
]
Chat = Annotated[bool, _option("--chat", help="Ask /chat/completions instead of /completions.")]
Concurrency = Annotated[int, _option(help="Requests under way at a time.")]
TopLogprobs = Annotated[
    int | None, _option(help="Most likely tokens to ask for.  [default: as many as it gives, up to 20]")
]
ScoreMissing = Annotated[
    bool,
    _option("--score-missing", help="Ask again for the log-probabilities of tokens without them, a request each."),
]
Timeout = Annotated[float, _option(help="Seconds to wait for an answer before it is asked for again.")]
MaxRetries = Annotated[int, _option(help="How often a request is sent again that is refused for its rate or lost.")]
ApiKeyEnv = Annotated[
    str, _option(help="Environment variable with the API key of --url; --against is asked without one.")
]


class UnfinishedAuditError(ForedraftError):
    """No fault was found, but not all that was asked for could be tested."""


def check_options(ctx: typer.Context, url: str | None) -> None:
    """Refuse an option that has no effect with, or without, ``--url``.

    Raises:
        InvalidOptionError: the first such option.
    """
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(str(parameter.name))
        if source is None or source.name != "COMMANDLINE":
            continue
        if url is None and parameter.name in REMOTE_OPTIONS:
            raise InvalidOptionError(f"{parameter.opts[0]} has no effect without --url; name the server with it")
        if url is not None and parameter.name not in REMOTE_OPTIONS | SHARED_OPTIONS:
            raise InvalidOptionError(
                f"{parameter.opts[0]} has no effect with --url: the server decides it; leave it out, or send a field "
                "of its own with --body"
            )


def audit_url(
    *,
    url: str,
    served_model: str | None,
    against: str | None,
    against_model: str | None,
    body: str | None,
    against_body: str | None,
    chat: bool,
    concurrency: int,
    top_logprobs: int | None,
    score_missing: bool,
    timeout_s: float,
    max_retries: int,
    api_key_env: str,
    temperature: str,
    num_tokens: int,
    max_tokens: int,
    prompts_file: Path | None,
    seed: int | None,
    false_alarm_rate: float,
    report: Path | None,
) -> None:
    """Make the options an audit and run it."""
    from foredraft.lab.audit.remote.client import Endpoint
    from foredraft.lab.audit.remote.run import PROMPTS, RemoteOptions, read_prompts, second_endpoint

    if served_model is None:
        raise InvalidOptionError("--url needs --model, the name by which the server knows its model")
    endpoint = Endpoint(
        url=url,
        model=served_model,
        api_key=os.environ.get(api_key_env, ""),
        chat=chat,
        body=_json_object("body", body) or {},
        timeout_s=timeout_s,
        max_retries=max_retries,
    )
    options = RemoteOptions(
        endpoint=endpoint,
        against=second_endpoint(endpoint, against, against_model, _json_object("against_body", against_body)),
        temperatures=shared.numbers("temperature", temperature),
        max_tokens=max_tokens,
        num_tokens=num_tokens,
        top_logprobs=top_logprobs,
        score_missing=score_missing,
        prompts=PROMPTS if prompts_file is None else read_prompts(prompts_file),
        concurrency=concurrency,
        request_seed=seed,
        false_alarm_rate=false_alarm_rate,
    )
    audit_server(options, report)


def _json_object(name: str, text: str | None) -> dict[str, Any] | None:
    """A JSON object given as an option.

    Raises:
        InvalidOptionError: it is none.
    """
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidOptionError(f"{name}={text!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidOptionError(f'{name}={text!r} is not a JSON object such as {{"top_k": 0}}')
    return found


def audit_server(options: RemoteOptions, report: Path | None) -> None:
    """Run the audit and show it: tables, the page if one is wanted, one JSON document as the last line.

    Raises:
        typer.Exit: status 1 after a fault.
        KeyboardInterrupt: it was interrupted, and what it had found is shown.
        UnfinishedAuditError: without a fault, but not all was tested; status 2 at the command line.
    """
    from foredraft.lab.audit.remote.answers import INTERRUPTED
    from foredraft.lab.audit.remote.run import audit_server as run
    from foredraft.measure.report import check_report_path

    if report is not None:
        check_report_path(report)
    with output.progress() as tell:
        result = run(options, tell)
    _show(result, report)
    if result.convicted:
        raise typer.Exit(1)
    if result.trouble == INTERRUPTED:
        raise KeyboardInterrupt
    if result.trouble or not result.num_tested:
        raise UnfinishedAuditError(result.trouble or "; ".join(result.notes) or "nothing could be tested")


def _show(result: RemoteResult, report: Path | None) -> None:
    from foredraft.lab.audit.remote.show import document, grids, headline
    from foredraft.measure.tables import rich_table

    found = document(result, shlex.join(["foredraft", *sys.argv[1:]]))
    console = output.wide_console()
    for grid in grids(result):
        console.print(rich_table(grid), end="\n\n")
    for note in result.notes:
        console.print(f"note: {note}", markup=False)
    console.print(headline(result), markup=False, style="bold red" if result.convicted else "bold")
    if report is not None:
        from foredraft.lab.audit.remote.charts import pictures
        from foredraft.measure.report import write_page

        title = f"foredraft audit: {result.options.endpoint.model} at {result.options.endpoint.url}"
        write_page(report, title, headline(result), pictures(result.sampling), grids(result), found)
        typer.echo(f"wrote {report}", err=True)
    output.echo_document(found)
