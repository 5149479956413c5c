"""Notes which draft lengths a policy chooses, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.policy import Forecast, PlanRow, Policy, StepOutcome


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The routes of a step's rows, and the draft tokens that were chosen for each."""

    routes: tuple[str, ...]
    lengths: tuple[int, ...]

    @property
    def mean_len(self) -> float:
        return sum(self.lengths) / len(self.lengths) if self.lengths else 0.0


class PlanRecorder:
    """A policy that does what another one does, and keeps what it chose.

    Attributes:
        steps: the steps with at least one row to plan for, since the beginning.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self.steps: list[PlannedStep] = []
        self.forecast: Forecast | None = None

    def rests(self, num_rows: int) -> bool:
        return self.policy.rests(num_rows)

    def plan(self, rows: Sequence[PlanRow], num_other_tokens: int) -> list[int]:
        lengths = self.policy.plan(rows, num_other_tokens)
        self.forecast = self.policy.forecast
        if rows:
            self.steps.append(PlannedStep(tuple(row.route for row in rows), tuple(lengths)))
        return lengths

    def observe(self, step: StepOutcome) -> None:
        self.policy.observe(step)

    def forget(self, sequence_id: int) -> None:
        self.policy.forget(sequence_id)


def mean_draft_len(steps: Sequence[PlannedStep], route: str | None = None) -> float | None:
    """Draft tokens chosen for a row on average, of one route or of all; None if there was no such row."""
    chosen = [
        length
        for step in steps
        for name, length in zip(step.routes, step.lengths, strict=True)
        if route is None or name == route
    ]
    return sum(chosen) / len(chosen) if chosen else None
