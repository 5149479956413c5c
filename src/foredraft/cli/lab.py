"""``foredraft lab``: the toy language, the formulas and the proofs at the command line.

Each command computes with :mod:`foredraft.lab`, then shows tables or one JSON document, and draws if asked.
Imports are inside the commands, so that ``--help`` and the formulas do not wait for torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from foredraft.cli.output import echo_document
from foredraft.errors import ForedraftError

app = typer.Typer(no_args_is_help=True, help="Proofs on a toy language; acceptance, speedup and roofline tables.")


@contextmanager
def _user_errors() -> Iterator[None]:
    """Show the package's errors as usage errors: a message and exit status 2, no traceback."""
    try:
        yield
    except ForedraftError as error:
        raise typer.BadParameter(str(error)) from error


def _acceptance_rates(values: list[float] | None) -> list[float] | None:
    for value in values or ():
        if not 0.0 <= value < 1.0:
            raise typer.BadParameter(f"{value:g} is outside [0, 1); at 1 no draft token would ever be rejected")
    return values


def _positive(value: float) -> float:
    if not 0.0 < value < math.inf:
        raise typer.BadParameter(f"{value:g} must be above 0 and finite")
    return value


def _draft_len(value: int) -> int:
    if value < 0:
        raise typer.BadParameter(f"{value} is below 0; 0 draft tokens is plain decoding")
    return value


def _draft_lens(values: list[int] | None) -> list[int] | None:
    return values and [_draft_len(value) for value in values]


def _plot_path(path: Path | None) -> Path | None:
    if path:
        from foredraft.lab import plots

        with _user_errors():
            plots.check_path(path)
    return path


_Json = Annotated[bool, typer.Option("--json", help="One JSON document as the last line of stdout, no tables.")]
_Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", callback=_plot_path, help="Also draw it (.png, .svg, .pdf)."),
]
_DraftLen = Annotated[
    int, typer.Option("--num-draft-tokens", "-k", callback=_draft_len, help="Draft tokens per target pass.")
]
_DraftLens = Annotated[
    list[int] | None,
    typer.Option("--num-draft-tokens", "-k", callback=_draft_lens, help="Draft tokens; may be repeated."),
]


@contextmanager
def _progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that goes away in the end; yields the function that advances it."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.advance(task, done)


def _show(as_json: bool, document: dict[str, Any], *tables: Table) -> None:
    if as_json:
        echo_document(document)
        return
    console = Console()
    for table in tables:
        console.print(table)


@app.command(epilog="Example: foredraft lab distribution --samples 10000000 --plot rules.png")
def distribution(
    size: Annotated[list[int] | None, typer.Option("--size", min=1, help="N; may be repeated.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Instead: every rule, vectorised, at this N.")] = None,
    num_draft_tokens: _DraftLen = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of the vectorised samplers.")] = 0,
    as_json: _Json = False,
    plot: _Plot = None,
) -> None:
    """Does speculation keep the target's distribution? Counted on 256 outcomes, and enumerated exactly."""
    from foredraft.lab import distribution as lab
    from foredraft.lab import tables
    from foredraft.lab.toy import exact_law, noise_total_variation, seed_language

    if size and samples:
        raise typer.BadParameter("--size replays the draw-by-draw program, --samples does not; give one of them")
    language, sizes = seed_language(), sorted(set(size or lab.SEED_SIZES))
    rows: list[lab.SamplerFit] = []
    with _user_errors():
        lab.check_draft_len(num_draft_tokens)
        with _progress("sampling", samples * len(lab.SAMPLERS) if samples else 3 * sum(sizes)) as advance:
            if samples:
                for sampler in lab.SAMPLERS:
                    rows.append(lab.sample(language, sampler, samples, num_draft_tokens, seed=seed, progress=advance))
            else:
                for num_samples in sizes:
                    rows += lab.replay_seed(language, num_samples, num_draft_tokens, progress=advance)
        exact = {s.name: lab.exact_total_variation(language, s, num_draft_tokens) for s in lab.SAMPLERS}
        promises = {s.name: s.promise for s in lab.SAMPLERS}
        noise = {n: noise_total_variation(exact_law(language), n) for n in ([samples] if samples else sizes)}
        if plot:
            from foredraft.lab import plots

            if samples:
                plots.plot_samplers(plot, rows, promises, noise[samples])
            else:
                plots.plot_distribution(plot, rows, noise, exact["wrong fallback"])
    document = {
        "num_draft_tokens": num_draft_tokens,
        "rows": [asdict(row) for row in rows],
        "exact_total_variation": exact,
        "total_variation_by_chance": noise,
    }
    counted = tables.distribution_table(rows, sampled=bool(samples))
    _show(as_json, document, counted, tables.exact_table(exact, promises))


@app.command(epilog="Example: foredraft lab uniformity --num-seeds 30 --plot p-values.png")
def uniformity(
    num_seeds: Annotated[int, typer.Option(min=2, help="Seeds 0, 1, ...")] = 30,
    samples: Annotated[int, typer.Option(min=1000, help="Sequences per seed.")] = 30_000,
    num_draft_tokens: _DraftLen = 3,
    as_json: _Json = False,
    plot: _Plot = None,
) -> None:
    """Are the p-values of the correct samplers uniform over seeds, and those of the wrong one 0?"""
    from foredraft.lab import distribution as lab
    from foredraft.lab import tables
    from foredraft.lab.toy import seed_language

    language, seeds, rows = seed_language(), range(num_seeds), []
    with _user_errors():
        lab.check_draft_len(num_draft_tokens)
        with _progress("seeds", num_seeds * len(lab.SAMPLERS)) as advance:
            for sampler in lab.SAMPLERS:
                rows.append(lab.uniformity(language, sampler, seeds, samples, num_draft_tokens, progress=advance))
        if plot:
            from foredraft.lab import plots

            plots.plot_uniformity(plot, rows)
    document = {"num_samples": samples, "rows": [asdict(row) for row in rows]}
    _show(as_json, document, tables.uniformity_table(rows, samples))


@app.command(epilog="Example: foredraft lab acceptance -k 2 -k 4 --plot acceptance.svg")
def acceptance(
    num_draft_tokens: _DraftLens = None,
    rounds: Annotated[int, typer.Option(min=1, help="Target passes per draft length.")] = 50_000,
    as_json: _Json = False,
    plot: _Plot = None,
) -> None:
    """Acceptance rate and tokens per target pass by draft length; acceptance by context and rule."""
    from foredraft.lab import acceptance as lab
    from foredraft.lab import tables
    from foredraft.lab.toy import seed_language

    language, draft_lens = seed_language(), num_draft_tokens or lab.SEED_DRAFT_LENS
    with _user_errors():
        with _progress("draft lengths", len(draft_lens)) as advance:
            rows = list(lab.count_acceptance(language, draft_lens, rounds, progress=advance))
        contexts = lab.acceptance_by_context(language)
        if plot:
            from foredraft.lab import plots

            plots.plot_acceptance(plot, contexts)
    document = {"rows": [asdict(row) for row in rows], "contexts": [asdict(row) for row in contexts]}
    _show(as_json, document, tables.acceptance_table(rows), tables.context_table(contexts))


@app.command(epilog="Example: foredraft lab speedup --alpha 0.75 --draft-cost 0.1 -k 2 -k 4 -k 8")
def speedup(
    alpha: Annotated[
        list[float] | None,
        typer.Option(callback=_acceptance_rates, help="Acceptance rate in [0, 1); may be repeated."),
    ] = None,
    draft_cost: Annotated[
        list[float] | None,
        typer.Option("--draft-cost", "-c", min=0.0, help="Draft step / target step; may be repeated."),
    ] = None,
    num_draft_tokens: _DraftLens = None,
    limit: Annotated[int, typer.Option(min=1, help="Longest draft considered for the best k.")] = 20,
    as_json: _Json = False,
    plot: _Plot = None,
) -> None:
    """Expected speedup by acceptance rate, draft length and draft cost, with the best draft length."""
    from foredraft.lab import speedups as lab
    from foredraft.lab import tables

    draft_lens = num_draft_tokens or lab.SEED_DRAFT_LENS
    with _user_errors():
        by_cost = [
            [lab.speedup_row(rate, cost, draft_lens, limit=limit) for rate in alpha or lab.SEED_ACCEPTANCE_RATES]
            for cost in draft_cost or lab.SEED_DRAFT_COSTS
        ]
        rows = [row for group in by_cost for row in group]
        if plot:
            from foredraft.lab import plots

            plots.plot_speedup(plot, rows, limit=limit)
    _show(as_json, {"rows": [asdict(row) for row in rows]}, *map(tables.speedup_table, by_cost))


@app.command(epilog="Example: foredraft lab roofline --params 7e9 --bytes 2 --device h100-sxm")
def roofline(
    params: Annotated[float, typer.Option(callback=_positive, help="Parameters, without --model.")] = 7e9,
    model: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Model folder or config.json (Hugging Face).")
    ] = None,
    bytes_per_param: Annotated[float, typer.Option("--bytes", callback=_positive, help="Per parameter.")] = 2.0,
    kv_bytes: Annotated[float, typer.Option(callback=_positive, help="Per cached value.")] = 2.0,
    layers: Annotated[int, typer.Option(min=1, help="Without --model: layers.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="Without --model: key-value heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Without --model: head size.")] = 128,
    device: Annotated[str, typer.Option(help="A key of --devices; this: measure this machine.")] = "h100-sxm",
    devices: Annotated[bool, typer.Option("--devices", help="All known devices side by side.")] = False,
    context: Annotated[list[int] | None, typer.Option(min=1, help="Tokens; may be repeated.")] = None,
    num_draft_tokens: _DraftLen = 4,
    as_json: _Json = False,
    plot: _Plot = None,
) -> None:
    """What a decode step costs on a device, and from which batch on draft tokens are no longer free."""
    from foredraft.lab import roofline as lab
    from foredraft.lab import tables
    from foredraft.lab.devices import DEVICES, find_device
    from foredraft.lab.model_shape import given_shape, model_shape

    if devices and plot:
        raise typer.BadParameter("--plot draws one device; leave out --devices")
    with _user_errors():
        shape = (
            model_shape(model, kv_bytes_per_value=kv_bytes)
            if model
            else given_shape(params, layers, kv_heads, head_dim, kv_bytes_per_value=kv_bytes)
        )
        results = [
            lab.roofline(
                shape,
                each,
                bytes_per_param=bytes_per_param,
                context_lens=context or lab.CONTEXT_LENS,
                num_draft_tokens=num_draft_tokens,
            )
            for each in (DEVICES if devices else [find_device(device)])
        ]
        if plot:
            from foredraft.lab import plots

            plots.plot_roofline(plot, results[0])
    if devices:
        _show(as_json, {"devices": [lab.document(each) for each in results]}, tables.devices_table(results))
    else:
        shown = tables.roofline_table(results[0]), tables.context_cost_table(results[0])
        _show(as_json, lab.document(results[0]), *shown)


@app.command(epilog="Example: foredraft lab rules --instances 100")
def rules(
    instances: Annotated[int, typer.Option(min=4, help="Random instances.")] = 100,
    vocab_size: Annotated[int, typer.Option(min=3, max=4, help="Tokens of the vocabulary.")] = 3,
    num_draft_tokens: Annotated[int, typer.Option("--num-draft-tokens", "-k", min=2, max=3, help="Of chains.")] = 3,
    keyed_sequences: Annotated[int, typer.Option(min=0, help="Coupled runs compared with plain decoding.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Of the instances.")] = 0,
    as_json: _Json = False,
    plot: _Plot = None,
) -> None:
    """Enumerate every acceptance rule; exit status 1 if one does not do what it promises."""
    from foredraft.lab import rules as lab
    from foredraft.lab import tables

    cases = lab.random_instances(instances, vocab_size=vocab_size, num_draft_tokens=num_draft_tokens, seed=seed)
    reports = []
    with _user_errors():
        with _progress("rules", len(lab.RULES)) as advance:
            for rule in lab.RULES:
                reports.append(lab.report(rule, cases))
                advance(1)
        num_unlike = lab.count_keyed_differences(keyed_sequences)
        if plot:
            from foredraft.lab import plots

            plots.plot_rules(plot, reports, lab.EXACT_LIMIT)
    keyed = {"keyed_sequences": keyed_sequences, "keyed_sequences_unlike_plain": num_unlike}
    document = {"rows": [lab.document(report) for report in reports], **keyed}
    _show(as_json, document, tables.rules_table(reports, instances, vocab_size, lab.HOW_SHOWN))
    if not as_json:
        typer.echo(f"coupled, run with keyed noise: {num_unlike} of {keyed_sequences} sequences differ from plain")
    if num_unlike or not all(report.passed for report in reports):
        raise typer.Exit(1)
