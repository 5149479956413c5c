"""How commands show progress and results: a bar on stderr, tables, a page, and one JSON document as the last line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

WIDTH_OF_A_PIPE = 100


def wide_console() -> Console:
    """Stdout, wide enough for a table where it is no terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH_OF_A_PIPE)
    return console


def echo_document(document: dict[str, Any]) -> None:
    """One JSON document on one line."""
    typer.echo(json.dumps(finite(document)))


def finite(value: Any) -> Any:
    """JSON has no infinity: null stands for it."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """A bar on stderr, or one line for each label where stderr is no terminal."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda label, fraction: bar.update(task, description=label, completed=fraction)


class _Lines:
    """A line for each new label, but none for less than a hundredth of progress with the same one."""

    def __init__(self, console: Console):
        self._console, self._last = console, ("", -1.0)

    def __call__(self, label: str, fraction: float) -> None:
        known, shown = self._last
        if label != known or fraction - shown >= 0.1:
            self._console.print(f"{fraction:4.0%} {label}")
            self._last = (label, fraction)
