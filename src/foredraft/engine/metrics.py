"""What an engine has done since it was made: counts by route, draft lengths, and whether speculation pays.

Counts of tokens are those of the requests, ended and running, so they are of delivered tokens only and cost a step
nothing. What steps add are the lengths that were planned and the policy's forecasts. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from foredraft.policy import Forecast, StepOutcome
from foredraft.types import RequestMetrics

_LISTS = ("accepted_per_position", "drafted_per_position")


def add_metrics(total: RequestMetrics, part: RequestMetrics) -> None:
    """Add a request's counts and seconds to a total; the time of its first token stays its own."""
    for entry in fields(RequestMetrics):
        if entry.name in _LISTS:
            held, more = getattr(total, entry.name), getattr(part, entry.name)
            held += [0] * (len(more) - len(held))
            for position, count in enumerate(more):
                held[position] += count
        elif entry.name != "first_token_s":
            setattr(total, entry.name, getattr(total, entry.name) + getattr(part, entry.name))


@dataclass(slots=True)
class Goodput:
    """Emitted tokens per second of steps that planned for some row, with the plans that were made and without any.

    Attributes:
        num_emitted, seconds: of the steps as they were.
        num_rows, plain_s: what the same steps would have emitted and taken without drafts, as the policy forecast it.
        checked_s, checked_forecast_s: of steps that had no drafts: seconds, and what was forecast.
    """

    num_emitted: int = 0
    seconds: float = 0.0
    num_rows: int = 0
    plain_s: float = 0.0
    checked_s: float = 0.0
    checked_forecast_s: float = 0.0

    @property
    def actual(self) -> float | None:
        return self.num_emitted / self.seconds if self.seconds else None

    @property
    def without_speculation(self) -> float | None:
        """The policy's estimate; None from a policy that makes none."""
        return self.num_rows / self.plain_s if self.plain_s else None

    @property
    def forecast_error(self) -> float | None:
        """By how much steps without drafts took longer than forecast, as a share; None if there were none."""
        return self.checked_s / self.checked_forecast_s - 1.0 if self.checked_forecast_s else None

    def add(self, step: StepOutcome, forecast: Forecast | None) -> None:
        if not step.rows or forecast is None:
            return
        seconds = step.draft_s + step.target_s + step.verify_s + step.host_s
        self.num_emitted += len(step.rows) + sum(row.num_accepted for row in step.rows)
        self.seconds += seconds
        self.num_rows += len(step.rows)
        self.plain_s += forecast.plain_s
        if not any(row.planned for row in step.rows):
            self.checked_s += seconds
            self.checked_forecast_s += forecast.plain_s


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """The metrics of an engine at one moment.

    Attributes:
        total: over all requests; tokens per target pass, acceptance by position and the split of time are on it.
        routes: the same by route.
        num_requests: that have ended or are running.
        num_steps: passes that planned for some row.
        planned_lengths: how often each number of draft tokens was planned for a row.
        goodput: with and without speculation.
    """

    total: RequestMetrics
    routes: Mapping[str, RequestMetrics]
    num_requests: int
    num_steps: int
    planned_lengths: Mapping[int, int]
    goodput: Goodput

    @property
    def num_wasted_draft_tokens(self) -> int:
        """Draft tokens that were verified and not accepted."""
        return self.total.num_draft_tokens - self.total.num_accepted_tokens


@dataclass(slots=True)
class EngineMetrics:
    """Collects the metrics of an engine."""

    _ended: dict[str, RequestMetrics] = field(default_factory=dict)
    _num_ended: int = 0
    _num_steps: int = 0
    _lengths: Counter[int] = field(default_factory=Counter)
    _goodput: Goodput = field(default_factory=Goodput)

    def observe(self, step: StepOutcome, forecast: Forecast | None) -> None:
        """A step ended."""
        if step.rows:
            self._num_steps += 1
            self._lengths.update([row.planned for row in step.rows])
            self._goodput.add(step, forecast)

    def end(self, route: str, metrics: RequestMetrics) -> None:
        """A request ended."""
        add_metrics(self._ended.setdefault(route, RequestMetrics()), metrics)
        self._num_ended += 1

    def snapshot(self, running: Iterable[tuple[str, RequestMetrics]]) -> MetricsSnapshot:
        """All so far, with the routes and metrics of the requests that are running."""
        parts: Sequence[tuple[str, RequestMetrics]] = list(running)
        total = RequestMetrics()
        routes: dict[str, RequestMetrics] = {}
        for route, metrics in (*self._ended.items(), *parts):
            add_metrics(routes.setdefault(route, RequestMetrics()), metrics)
            add_metrics(total, metrics)
        goodput = Goodput(*(getattr(self._goodput, entry.name) for entry in fields(Goodput)))
        num_requests = self._num_ended + len(parts)
        lengths = dict(sorted(self._lengths.items()))
        return MetricsSnapshot(total, routes, num_requests, self._num_steps, lengths, goodput)
