"""A result as one page that needs nothing else: tables, pictures and the JSON document in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from foredraft.errors import InvalidOptionError
from foredraft.measure.bench import BenchResult
from foredraft.measure.load_bench import LoadBenchResult
from foredraft.measure.load_tables import load_grids, load_headline
from foredraft.measure.tables import Grid, grids, headline

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #1f2937 }
table { border-collapse: collapse; margin: .5rem 0 } caption { caption-side: bottom; text-align: left; color: #6b7280 }
th, td { padding: .15rem .8rem; text-align: left } th { border-bottom: 2px solid #d1d5db }
.number { text-align: right; font-variant-numeric: tabular-nums } .heading td { font-weight: 600; padding-top: .6rem }
svg { max-width: 100%; height: auto } pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12px }
"""


def check_report_path(path: Path) -> None:
    """Raise :class:`InvalidOptionError` if no page can be written there, before anything is measured."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise InvalidOptionError(f"the report {path.name!r} is an HTML page; end its name in .html")
    if not path.absolute().parent.is_dir():
        raise InvalidOptionError(f"cannot write {path}; the folder {path.parent} does not exist")


def write_report(path: Path, result: BenchResult, document: dict[str, Any]) -> None:
    """Write the page. ``document`` is the JSON document, which is shown at its end."""
    from foredraft.measure.charts import rate_chart, time_chart

    pictures = []
    if result.arms:
        pictures = [("Decode rate", rate_chart(result.arms)), ("Time per token", time_chart(result.arms))]
    lead = headline(result, document["hardware"]["cpu"])
    write_page(path, f"foredraft bench: {result.options.model}", lead, pictures, grids(result), document)


def write_load_report(path: Path, result: LoadBenchResult, document: dict[str, Any]) -> None:
    """Write the page of a benchmark under load."""
    from foredraft.measure.load_charts import load_svgs

    lead = load_headline(result, document["hardware"]["cpu"])
    pictures = load_svgs(result) if result.results else []
    write_page(path, f"foredraft bench: {result.options.model}", lead, pictures, load_grids(result), document)


def write_page(
    path: Path,
    title: str,
    lead: str,
    pictures: Sequence[tuple[str, str]],
    tables: Sequence[Grid],
    document: dict[str, Any],
) -> None:
    """Write a page that needs nothing else.

    Args:
        lead: one paragraph.
        pictures: headings and SVG texts.
        document: plain data; its ``command`` and ``versions`` are shown at the top, all of it at the end.
    """
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f"<p>{escape(lead)}</p>\n<p>{escape(versions)}</p>\n<pre>{escape(document['command'])}</pre>\n"
        + "".join(f"<h2>{escape(heading)}</h2>\n{picture}\n" for heading, picture in pictures)
        + "\n".join(map(_table, tables))
        + f"\n<h2>Document</h2>\n<pre>{escape(json.dumps(document))}</pre>\n</body></html>\n"
    )
    path.write_text(page, encoding="utf-8")


def _table(grid: Grid) -> str:
    def row(cells: list[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=number' if index >= grid.first_number else ''}>{escape(cell)}</{tag}>"
            for index, cell in enumerate(cells)
        )

    lines = [f"<h2>{escape(grid.title)}</h2>\n<table><caption>{escape(grid.caption)}</caption>"]
    lines.append(f"<tr>{row(grid.columns, 'th')}</tr>")
    for section in grid.sections:
        if section.heading:
            lines.append(f'<tr class="heading"><td colspan={len(grid.columns)}>{escape(section.heading)}</td></tr>')
        lines += [f"<tr>{row(cells, 'td')}</tr>" for cells in section.rows]
    return "\n".join([*lines, "</table>"])
