"""``foredraft bench``: plain and speculative arms side by side, with a peer on the same weights."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli import options as shared
from foredraft.cli import output

if TYPE_CHECKING:
    from foredraft.measure.bench import BenchResult


def bench(
    model: shared.Model = shared.DEFAULT_MODEL,
    peer: Annotated[str | None, typer.Option(help="Also run: transformers.")] = None,
    prompts: Annotated[str, typer.Option(help="Of code, story and long.")] = "code,story",
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompt long.")] = 1024,
    dataset: Annotated[
        Path | None,
        typer.Option(help="JSONL instead of prompts: turns (Spec-Bench, the first is taken), prompt or messages."),
    ] = None,
    per_category: Annotated[int | None, typer.Option(help="Prompts of each category of the dataset.")] = None,
    methods: Annotated[
        str, typer.Option(help="As for generate --method, separated by commas; none is always run.")
    ] = "none,ngram,draft_model",
    draft_model: Annotated[
        str | None, typer.Option(help="Folder, hub id or short name.  [default: the target itself]")
    ] = None,
    num_speculative_tokens: shared.NumSpeculativeTokens = None,
    policy: Annotated[str, typer.Option(help="fixed, or goodput (from measured times and acceptance).")] = "fixed",
    max_tokens: Annotated[
        int | None, typer.Option(help="New tokens of every run.  [default: 192; 128 with a dataset]")
    ] = None,
    temperatures: Annotated[str, typer.Option(help="0 is greedy.")] = "0,1",
    repeats: Annotated[int, typer.Option(help="Rounds over all arms; medians are shown.")] = 3,
    time_limit: Annotated[
        float, typer.Option(help="Begin no repeat that would end later, in seconds; the first always runs.")
    ] = 240,
    batch_sizes: Annotated[str, typer.Option(help="Also decode so many sequences together, as in 1,8.")] = "1",
    seed: Annotated[int, typer.Option(help="Above temperature 0, repeat i uses seed + i.")] = 0,
    dtype: shared.Dtype = "auto",
    threads: shared.Threads = None,
    numerics: shared.Numerics = "invariant",
    report: Annotated[Path | None, typer.Option(help="Also write a page (.html) with tables and pictures.")] = None,
) -> None:
    """Measure plain and speculative decoding. The last line of stdout is one JSON document.

    Every run makes exactly --max-tokens tokens: end tokens are ignored. Ctrl-C shows what was measured.
    """
    from foredraft.measure.options import BenchOptions
    from foredraft.measure.report import check_report_path

    chosen = BenchOptions(
        model=model,
        peer=peer,
        prompts=shared.words(prompts),
        num_prompt_tokens=prompt_tokens,
        dataset=dataset,
        per_category=per_category,
        methods=shared.words(methods),
        draft_model=draft_model,
        num_speculative_tokens=num_speculative_tokens,
        policy=policy,
        max_tokens=(128 if dataset else 192) if max_tokens is None else max_tokens,
        temperatures=shared.numbers("temperatures", temperatures),
        repeats=repeats,
        time_limit_s=time_limit,
        batch_sizes=shared.whole_numbers("batch_sizes", batch_sizes),
        seed=seed,
        dtype=dtype,
        threads=threads,
        numerics=numerics,
    )
    if report is not None:
        check_report_path(report)
    from foredraft.measure.bench import run_bench

    with output.progress() as tell:
        result = run_bench(chosen, tell)
    _show(result, report)
    if result.interrupted:
        raise KeyboardInterrupt


def _show(result: BenchResult, report: Path | None) -> None:
    """Tables, then the page if one is wanted, then the JSON document as the last line."""
    from foredraft.measure.document import document
    from foredraft.measure.report import write_report
    from foredraft.measure.tables import grids, headline, rich_table

    found = document(result, shlex.join(["foredraft", *sys.argv[1:]]))
    console = output.wide_console()
    console.print(headline(result, found["hardware"]["cpu"]), end="\n\n")
    for grid in grids(result):
        console.print(rich_table(grid), end="\n\n")
    if report is not None:
        write_report(report, result, found)
        typer.echo(f"wrote {report}", err=True)
    output.echo_document(found)
