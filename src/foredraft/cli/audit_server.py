"""``foredraft audit --url``: the options of an audit over HTTP, its progress and its output."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from foredraft.cli import output
from foredraft.errors import ForedraftError, InvalidOptionError

if TYPE_CHECKING:
    from foredraft.lab.audit.remote.run import RemoteOptions, RemoteResult


class UnfinishedAuditError(ForedraftError):
    """No fault was found, but not all that was asked for could be tested."""


def api_key(variable: str) -> str:
    """The key in an environment variable; empty without one."""
    return os.environ.get(variable, "")


def json_object(name: str, text: str | None) -> dict[str, Any] | None:
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
