"""The figures of a benchmark under load as tables; an arm that is slower than plain is called a loser."""

from __future__ import annotations

from collections.abc import Callable

from foredraft.measure.load_bench import LoadBenchResult
from foredraft.measure.load_options import AUTO, PLAIN
from foredraft.measure.load_summary import EVEN, LoadResult, Spread
from foredraft.measure.tables import Grid, Section


def load_grids(result: LoadBenchResult) -> list[Grid]:
    """The tables: throughput, ratios to plain, auto against the best, details and latency level by level."""
    if not result.results:
        return []
    return [throughput_grid(result), plain_grid(result), auto_grid(result), detail_grid(result), latency_grid(result)]


def throughput_grid(result: LoadBenchResult) -> Grid:
    """Tokens per second by level."""

    def cell(each: LoadResult) -> str:
        return f"{each.tokens_per_s:.0f}"

    return _by_level(
        result, f"Throughput, new tokens per second, by {result.level_name}", _window_caption(result), cell
    )


def plain_grid(result: LoadBenchResult) -> Grid:
    """Ratios to plain by level."""

    def cell(each: LoadResult) -> str:
        return f"{each.against_plain:.2f} x" + (" loses" if each.outcome == "loses" else "")

    caption = f"Of the same round; medians. loses: more than {EVEN:.0%} below plain decoding."
    return _by_level(result, f"Against plain, by {result.level_name}", caption, cell, skip=(PLAIN,))


def auto_grid(result: LoadBenchResult) -> Grid:
    """The arm auto against the best of the others."""
    rows = []
    for level in _levels(result):
        best = next(each for each in result.at(level) if each.is_best)
        auto = next(each for each in result.at(level) if each.arm == AUTO)
        rows.append(
            [
                f"{level:g}",
                best.arm,
                f"{auto.against_best:.2f} x",
                f"{auto.against_plain:.2f} x",
                f"{auto.mean_draft_len:.2f}",
                ", ".join(f"{route} {length:.1f}" for route, length in auto.mean_draft_len_by_route.items()),
            ]
        )
    columns = ["", "best arm", "auto / best", "auto / plain", "draft tokens", "by route"]
    caption = "draft tokens: chosen for a row of a step. Of the same round; medians."
    return Grid(
        f"auto against the best of the others, by {result.level_name}", columns, 2, caption, [Section("", rows)]
    )


def detail_grid(result: LoadBenchResult) -> Grid:
    """Rates, draft lengths, acceptance, and whether the tokens are those of plain."""

    def row(each: LoadResult) -> list[str]:
        return [
            each.arm,
            f"{each.tokens_per_s:.0f}",
            f"{each.tokens_per_pass:.2f}",
            f"{each.mean_draft_len:.1f}",
            "" if each.acceptance_rate is None else f"{each.acceptance_rate:.0%}",
            f"{1e3 * each.step_s:.0f}",
            f"{each.num_identical}/{each.num_compared}",
        ]

    return Grid(
        f"In detail, by {result.level_name}",
        ["", "tok/s", "tok/pass", "drafted", "accepted", "ms/step", "same"],
        1,
        "drafted: chosen for a row of a step. same: requests with the tokens of plain.",
        [Section(f"{level:g}", list(map(row, result.at(level)))) for level in _levels(result)],
    )


def latency_grid(result: LoadBenchResult) -> Grid:
    """What a reader waits for."""

    def row(each: LoadResult) -> list[str]:
        return [each.arm, _milliseconds(each.ttft), _milliseconds(each.tpot), _milliseconds(each.itl)]

    return Grid(
        f"Latency in ms, p50/p90/p99, by {result.level_name}",
        ["", "TTFT", "TPOT", "ITL"],
        1,
        "TTFT: from arrival to the first token. TPOT: per token behind the first delivery. ITL: between two "
        "deliveries, each of one token or more.",
        [Section(f"{level:g}", list(map(row, result.at(level)))) for level in _levels(result)],
    )


def load_headline(result: LoadBenchResult, cpu_name: str) -> str:
    """What ran, and where."""
    options = result.options
    kinds = ", ".join(options.routes) if options.dataset is None else options.dataset.name
    return (
        f"{options.model}, {result.dtype}, {result.device} ({cpu_name}), {result.threads} threads; drafts: "
        f"{options.method}; {options.arrivals} arrivals of {kinds}, {options.max_tokens} new tokens on average, "
        f"temperature {options.temperature:g}; numerics: {result.contract}; {result.total_s:.0f} s."
    )


def _by_level(
    result: LoadBenchResult, title: str, caption: str, cell: Callable[[LoadResult], str], skip: tuple[str, ...] = ()
) -> Grid:
    levels = _levels(result)
    rows = [
        [arm, *(cell(each) for level in levels for each in result.at(level) if each.arm == arm)]
        for arm in result.options.arms
        if arm not in skip
    ]
    return Grid(title, ["", *(f"{level:g}" for level in levels)], 1, caption, [Section("", rows)])


def _levels(result: LoadBenchResult) -> list[float]:
    """The levels that have been measured."""
    return list(dict.fromkeys(each.level for each in result.results))


def _milliseconds(spread: Spread) -> str:
    values = (spread.p50, spread.p90, spread.p99)
    return "/".join("-" if value is None else f"{1e3 * value:.0f}" for value in values)


def _window_caption(result: LoadBenchResult) -> str:
    counts = sorted({count for count in result.num_rounds.values() if count})
    rounds = f"{counts[0]} to {counts[-1]} rounds" if len(counts) > 1 else f"{counts[0]} round(s)"
    text = f"Medians of {rounds}, all arms over the same requests in each, while all clients are busy."
    if counts[0] < result.options.repeats and not result.interrupted:
        text += f" {result.options.repeats} rounds would have taken more than {result.options.time_limit_s:g} s."
    return text + (" Interrupted: what had been measured until then." if result.interrupted else "")
