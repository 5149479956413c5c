"""Tables for people: from the results of the other modules to rich tables, without a computation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from foredraft.lab.acceptance import ContextAcceptance, DraftLenAcceptance
    from foredraft.lab.distribution import SamplerFit, Uniformity
    from foredraft.lab.roofline import Roofline
    from foredraft.lab.rules import RuleReport
    from foredraft.lab.speedups import SpeedupRow

_PROMISE_STYLE = {"exact": "green", "lossy": "yellow", "wrong": "red"}


def _table(title: str, text_columns: Sequence[str], number_columns: Sequence[str], caption: str = "") -> Table:
    table = Table(title=title, caption=caption or None, title_justify="left", caption_justify="left")
    for column in text_columns:
        table.add_column(column)
    for column in number_columns:
        table.add_column(column, justify="right")
    return table


def _styled(promise: str) -> str:
    return f"[{_PROMISE_STYLE[promise]}]{promise}[/]"


def distribution_table(rows: Iterable[SamplerFit], *, sampled: bool) -> Table:
    """Samplers against the exact law; ``sampled`` adds the columns of the vectorised run."""
    more = ["tokens / target pass", "unlike plain"] if sampled else []
    table = _table("Counts against the exact law of 256 sequences", ["sampler"], ["N", "TV", "chi2 p", *more])
    for row in rows:
        cells = [row.sampler, f"{row.num_samples:,}", f"{row.total_variation:.4f}", f"{row.chi_square_p:.4f}"]
        if sampled:
            unlike = "" if row.num_unlike_plain is None else f"{row.num_unlike_plain:,}"
            cells += [f"{row.tokens_per_target_pass:.3f}", unlike]
        table.add_row(*cells, end_section=not sampled and row.sampler == "wrong fallback")
    return table


def exact_table(distances: Mapping[str, float], promises: Mapping[str, str]) -> Table:
    """Exact total variation by sampler."""
    table = _table("The same without sampling: exact total variation", ["sampler", "promise"], ["TV"])
    for name, distance in distances.items():
        table.add_row(name, _styled(promises[name]), f"{distance:.12f}")
    return table


def uniformity_table(rows: Sequence[Uniformity], num_samples: int) -> Table:
    """p-values over seeds."""
    num_seeds = len(rows[0].p_values)
    table = _table(
        f"Chi-square p-values over {num_seeds} seeds, N = {num_samples:,}",
        ["sampler", "promise"],
        ["smallest p", "median p", "largest p", "KS p (uniform?)"],
        "A correct sampler's p-values are uniform; its KS p is itself uniform, so 1 in 100 falls below 0.01.",
    )
    for row in rows:
        ordered = sorted(row.p_values)
        middle = 0.5 * (ordered[(num_seeds - 1) // 2] + ordered[num_seeds // 2])
        table.add_row(
            row.sampler,
            _styled(row.promise),
            f"{ordered[0]:.4f}",
            f"{middle:.4f}",
            f"{ordered[-1]:.4f}",
            f"{row.kolmogorov_smirnov_p:.4f}",
        )
    return table


def acceptance_table(rows: Iterable[DraftLenAcceptance]) -> Table:
    """Acceptance by draft length."""
    table = _table("Acceptance and tokens per target pass", [], ["k", "alpha", "tokens / target pass", "equation 1"])
    for row in rows:
        table.add_row(
            str(row.num_draft_tokens),
            f"{row.acceptance_rate:.3f}",
            f"{row.tokens_per_target_pass:.3f}",
            f"{row.formula_tokens:.3f}",
        )
    return table


def context_table(rows: Iterable[ContextAcceptance]) -> Table:
    """Acceptance by context and rule."""
    table = _table(
        "Exact acceptance of one draft token, by the token before it",
        [],
        ["token before", "rejection", "coupled", "coupled, bounds from TV", "match"],
    )
    for row in rows:
        table.add_row(
            str(row.token),
            f"{row.rejection:.3f}",
            f"{row.coupled:.3f}",
            f"{row.coupled_at_least:.3f} to {row.coupled_at_most:.3f}",
            f"{row.match:.3f}",
        )
    return table


def speedup_table(rows: Sequence[SpeedupRow]) -> Table:
    """Speedups of one draft cost; the best integer length is on the right."""
    lengths = list(rows[0].speedups)
    columns = ["alpha", *(f"k={k}" for k in lengths), "best k", "best over real k", "at most tokens / pass"]
    table = _table(f"Expected speedup, draft cost c = {rows[0].draft_cost:g}", [], columns)
    for row in rows:
        cells = [f"[bold]{v:.2f}[/]" if k == row.best_num_draft_tokens else f"{v:.2f}" for k, v in row.speedups.items()]
        table.add_row(
            f"{row.acceptance_rate:g}",
            *cells,
            f"{row.best_num_draft_tokens} ({row.best_speedup:.2f}x)",
            _number(row.continuous_best, ".2f"),
            _number(row.saturation, ".2f"),
        )
    return table


def _number(value: float, form: str) -> str:
    return "none" if math.isinf(value) else format(value, form)


def roofline_table(result: Roofline) -> Table:
    """One model on one device."""
    device, model = result.device, result.model
    table = _table(
        f"{model.name} at {result.bytes_per_param:g} bytes per parameter on {device.name}",
        ["quantity"],
        ["value"],
    )
    active = "" if model.num_active_params == model.num_params else f" ({model.num_active_params / 1e9:.3f} active)"
    rows = {
        "parameters, 10^9": f"{model.num_params / 1e9:.3f}{active}",
        "memory bandwidth, GB/s": f"{device.bandwidth_bytes_per_s / 1e9:,.1f}",
        "dense bf16 rate, TFLOPS": f"{device.flops_per_s / 1e12:,.2f}",
        "reading the weights once, ms": f"{result.weight_read_s * 1e3:.3f}",
        "ceiling of plain decoding, tokens/s": f"{result.ceiling_tokens_per_s:.1f}",
        "arithmetic of one token, us": f"{result.arithmetic_s * 1e6:.1f}",
        "arithmetic busy at batch 1": f"{result.arithmetic_s / result.weight_read_s:.2%}",
        "compute-bound from batch": f"{result.compute_bound_batch:.0f}",
        f"the same with {result.num_draft_tokens} draft tokens": f"{result.compute_bound_batch_drafting:.0f}",
        "KV cache per token, KB": f"{model.kv_bytes_per_token / 1e3:.1f}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    table.caption = f"Figures of the device: {device.source}."
    return table


def context_cost_table(result: Roofline) -> Table:
    """The same model and device by context length."""
    table = _table(
        "With a KV cache",
        [],
        [
            "context",
            "KV per sequence, GB",
            "share of traffic, batch 1",
            "ceiling, tokens/s",
            "compute-bound from batch",
            f"with {result.num_draft_tokens} drafts",
        ],
        "none: reading the cache outweighs the arithmetic at any batch; draft tokens stay free (MagicDec).",
    )
    for cost in result.contexts:
        table.add_row(
            f"{cost.context_len:,}",
            f"{cost.kv_bytes / 1e9:.3f}",
            f"{cost.kv_share:.1%}",
            f"{cost.ceiling_tokens_per_s:.1f}",
            _number(cost.compute_bound_batch, ",.0f"),
            _number(cost.compute_bound_batch_drafting, ",.0f"),
        )
    return table


def devices_table(results: Sequence[Roofline]) -> Table:
    """Known devices side by side for one model."""
    model = results[0].model
    table = _table(
        f"{model.name} at {results[0].bytes_per_param:g} bytes per parameter, by device",
        ["--device", "name", "figures from"],
        ["GB/s", "TFLOPS", "weights, ms", "tokens/s", "batch"],
        "Whether the model fits is not asked. batch: compute-bound from that many sequences on.",
    )
    for result in results:
        device = result.device
        table.add_row(
            device.key,
            device.name,
            device.source,
            f"{device.bandwidth_bytes_per_s / 1e9:,.0f}",
            f"{device.flops_per_s / 1e12:,.1f}",
            f"{result.weight_read_s * 1e3:.2f}",
            f"{result.ceiling_tokens_per_s:.1f}",
            f"{result.compute_bound_batch:,.0f}",
        )
    return table


def rules_table(reports: Sequence[RuleReport], num_instances: int, vocab_size: int, caption: str) -> Table:
    """Enumerated rules."""
    table = _table(
        f"Distance to the target's law on {num_instances} random instances, vocabulary {vocab_size}",
        ["rule", "draft", "promise", "enumerated with"],
        ["largest TV", "mean TV", "tokens / pass", "seen"],
        caption,
    )
    for report in reports:
        rule = report.rule
        seen = "exact" if rule.promise == "exact" else "off, as expected"
        table.add_row(
            rule.name,
            rule.shape,
            _styled(rule.promise),
            rule.shown_by,
            f"{report.max_distance:.1e}",
            f"{report.mean_distance:.1e}",
            f"{report.mean_tokens_per_target_pass:.3f}",
            f"[green]{seen}[/]" if report.passed else "[red]NOT as promised[/]",
        )
    return table
