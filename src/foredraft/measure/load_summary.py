"""From runs under load to figures: rates, ratios of runs of the same round, latencies.

A ratio is taken within each round and the median of the rounds is shown, so a slow minute changes no ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from foredraft.measure import metrics
from foredraft.measure.load_options import AUTO, PLAIN
from foredraft.measure.load_record import mean_draft_len
from foredraft.measure.load_run import LoadRun, Timeline

Round = Mapping[str, LoadRun]
"""Runs of all arms over the same requests, by the arms' names."""

EVEN = 0.03
"""Arms whose rates differ by no more are called even."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles in seconds; None if nothing was timed."""

    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(*(metrics.percentile(values, percent) for percent in (50, 90, 99)))


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadResult:
    """Figures of one arm at one level.

    Attributes:
        level: clients, or requests per second.
        tokens_per_s: median over the rounds, in the window.
        against_plain, against_best: medians of the ratios of a round, to plain and to the level's best arm but auto.
        ttft: from arrival to the first token: of requests that arrived in the window.
        tpot: per token behind the first delivery: of the finished requests.
        itl: between two deliveries to a request within the window; a delivery may hold several tokens.
        tokens_per_pass: tokens of a delivery, that is per pass of the target over a sequence.
        mean_draft_len: chosen draft tokens of a row, and by route.
        acceptance_rate: accepted per draft token; None if nothing was drafted.
        num_identical: of the ``num_compared`` finished requests, those with the tokens of the plain arm.
    """

    arm: str
    level: float
    num_rounds: int
    tokens_per_s: float
    against_plain: float
    against_best: float
    is_best: bool
    ttft: Spread
    tpot: Spread
    itl: Spread
    tokens_per_pass: float
    step_s: float
    mean_draft_len: float
    mean_draft_len_by_route: dict[str, float]
    acceptance_rate: float | None
    num_identical: int
    num_compared: int

    @property
    def outcome(self) -> str:
        """Against plain, in a word."""
        if self.against_plain < 1.0 - EVEN:
            return "loses"
        return "wins" if self.against_plain > 1.0 + EVEN else "even"


def summarise_level(level: float, rounds: Sequence[Round]) -> list[LoadResult]:
    """Figures of all arms at a level, from at least one round."""
    rates = {arm: [_rate(each[arm]) for each in rounds] for arm in rounds[0]}
    medians = {arm: metrics.median_of(found) for arm, found in rates.items()}
    best = max((arm for arm in medians if arm != AUTO), key=medians.__getitem__)
    return [
        _summarise(
            arm,
            level,
            [each[arm] for each in rounds],
            [each[PLAIN] for each in rounds],
            tokens_per_s=medians[arm],
            against_plain=_paired(rates[arm], rates[PLAIN]),
            against_best=_paired(rates[arm], rates[best]),
            is_best=arm == best,
        )
        for arm in rounds[0]
    ]


def _summarise(
    arm: str, level: float, runs: Sequence[LoadRun], plain: Sequence[LoadRun], *, tokens_per_s: float,
    against_plain: float, against_best: float, is_best: bool,
) -> LoadResult:  # fmt: skip
    sent = [(run, line) for run in runs for line in run.timelines]
    finished = [line for _, line in sent if line.is_finished]
    deliveries = [delivery for run in runs for delivery in run.deliveries]
    steps = [step for run in runs for step in run.steps]
    routes = dict.fromkeys(line.request.route for _, line in sent)
    by_route = {route: mean_draft_len(steps, route) for route in routes}
    num_draft_tokens = sum(line.num_draft_tokens for _, line in sent)
    same = [
        line.token_ids == other.token_ids
        for run, reference in zip(runs, plain, strict=True)
        for line, other in zip(_counted(run), _counted(reference), strict=True)
    ]
    return LoadResult(
        arm=arm,
        level=level,
        num_rounds=len(runs),
        tokens_per_s=tokens_per_s,
        against_plain=against_plain,
        against_best=against_best,
        is_best=is_best,
        ttft=Spread.of([_ttft(line) for run, line in sent if line.arrived_s >= run.begin_s and line.deliveries]),
        tpot=Spread.of([each for each in map(_tpot, finished) if each is not None]),
        itl=Spread.of([gap for run, line in sent for gap in _gaps(line, run.begin_s)]),
        tokens_per_pass=sum(each.num_tokens for each in deliveries) / max(1, len(deliveries)),
        step_s=sum(run.window_s for run in runs) / max(1, sum(run.num_steps for run in runs)),
        mean_draft_len=mean_draft_len(steps) or 0.0,
        mean_draft_len_by_route={route: length for route, length in by_route.items() if length is not None},
        acceptance_rate=metrics.ratio(sum(line.num_accepted_tokens for _, line in sent), num_draft_tokens),
        num_identical=sum(same),
        num_compared=len(same),
    )


def _rate(run: LoadRun) -> float:
    return metrics.token_rate(run.num_tokens, run.window_s)


def _paired(rates: Sequence[float], base: Sequence[float]) -> float:
    return metrics.median_of([metrics.ratio(one, other) or 0.0 for one, other in zip(rates, base, strict=True)])


def _counted(run: LoadRun) -> Sequence[Timeline]:
    """The requests that every arm finishes."""
    return run.timelines[: run.num_requests]


def _ttft(line: Timeline) -> float:
    return line.deliveries[0].at_s - line.arrived_s


def _tpot(line: Timeline) -> float | None:
    first, last = line.deliveries[0], line.deliveries[-1]
    return metrics.time_per_output_token(
        len(line.token_ids), first.at_s - line.arrived_s, last.at_s - line.arrived_s, first.num_tokens
    )


def _gaps(line: Timeline, begin_s: float) -> list[float]:
    times = [delivery.at_s for delivery in line.deliveries if delivery.at_s >= begin_s]
    return [after - before for before, after in pairwise(times)]
