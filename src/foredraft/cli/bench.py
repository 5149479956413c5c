"""``foredraft bench``: plain and speculative arms side by side, with a peer on the same weights."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli import bench_load as load
from foredraft.cli import options as shared
from foredraft.cli import output
from foredraft.config import POLICIES

if TYPE_CHECKING:
    from foredraft.measure.bench import BenchResult


def bench(
    ctx: typer.Context,
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
    speculative_config: Annotated[
        str | None,
        typer.Option(
            help="More options as JSON, of the arms with a draft model or head (under load of the arm auto), such as "
            '\'{"tree_width": 3, "tree_beam": 1}\'.'
        ),
    ] = None,
    policy: Annotated[str, typer.Option(help=f"How draft lengths are chosen: {', '.join(POLICIES)}.")] = "fixed",
    max_tokens: Annotated[
        int | None,
        typer.Option(help="New tokens of every run.  [default: 192; 128 with a dataset; under load 96 on average]"),
    ] = None,
    temperatures: Annotated[
        str | None, typer.Option(help="0 is greedy.  [default: 0,1; under load one, 0]", show_default=False)
    ] = None,
    repeats: Annotated[int, typer.Option(help="Rounds over all arms; medians are shown.")] = 3,
    time_limit: Annotated[
        float | None,
        typer.Option(
            help="Begin no repeat that would end later, in seconds; the first always runs.  [default: 240; under load "
            "540]"
        ),
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="Also decode so many sequences together, as in 1,8.")] = "1",
    seed: Annotated[int, typer.Option(help="Above temperature 0, repeat i uses seed + i.")] = 0,
    dtype: shared.Dtype = "auto",
    threads: shared.Threads = None,
    numerics: shared.Numerics = "invariant",
    report: Annotated[Path | None, typer.Option(help="Also write a page (.html) with tables and pictures.")] = None,
    concurrency: load.Concurrency = None,
    arrivals: load.ArrivalsOption = None,
    rate: load.Rate = None,
    method: load.Method = "ngram",
    draft_lens: load.DraftLens = "1,3,5,7",
    routes: load.Routes = "code,summary,story",
    requests: load.Requests = None,
    plot: load.Plot = None,
) -> None:
    """Measure plain and speculative decoding. The last line of stdout is one JSON document.

    Every run makes exactly --max-tokens tokens: end tokens are ignored. Ctrl-C shows what was measured.

    With --concurrency or --rate it is a load test instead: many requests of several kinds at once.
    """
    from foredraft.measure.report import check_report_path

    if report is not None:
        check_report_path(report)
    is_load = concurrency is not None or rate is not None or arrivals is not None
    load.refuse_options(ctx, is_load=is_load)
    if is_load:
        from foredraft.measure.load_options import LoadOptions

        wanted = LoadOptions(
            model=model,
            method=method,
            draft_model=draft_model,
            num_speculative_tokens=num_speculative_tokens,
            speculative_config=shared.json_options(speculative_config),
            draft_lens=shared.whole_numbers("draft_lens", draft_lens),
            arrivals=arrivals or ("closed" if rate is None else "poisson"),
            concurrency=shared.whole_numbers("concurrency", concurrency or ""),
            rates=shared.numbers("rate", rate or ""),
            routes=shared.words(routes),
            dataset=dataset,
            per_category=per_category,
            num_requests=requests,
            max_tokens=96 if max_tokens is None else max_tokens,
            time_limit_s=540 if time_limit is None else time_limit,
            temperature=load.one_temperature(temperatures),
            repeats=repeats,
            seed=seed,
            dtype=dtype,
            threads=threads,
            numerics=numerics,
        )
        load.bench_load(wanted, report, plot)
        return
    from foredraft.measure.options import BenchOptions

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
        speculative_config=shared.json_options(speculative_config),
        policy=policy,
        max_tokens=(128 if dataset else 192) if max_tokens is None else max_tokens,
        temperatures=shared.numbers("temperatures", temperatures or "0,1"),
        repeats=repeats,
        time_limit_s=240 if time_limit is None else time_limit,
        batch_sizes=shared.whole_numbers("batch_sizes", batch_sizes),
        seed=seed,
        dtype=dtype,
        threads=threads,
        numerics=numerics,
    )
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
