"""The same number of draft tokens in every step."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.policy.base import Forecast, PlanRow, StepOutcome


class FixedPolicy:
    """Plans as many draft tokens for every sequence as its limit allows, at most ``num_draft_tokens``."""

    forecast: Forecast | None = None

    def __init__(self, num_draft_tokens: int):
        self.num_draft_tokens = num_draft_tokens

    def rests(self, num_rows: int) -> bool:
        return False

    def plan(self, rows: Sequence[PlanRow], num_other_tokens: int) -> list[int]:
        return [min(self.num_draft_tokens, row.limit) for row in rows]

    def observe(self, step: StepOutcome) -> None:
        """Nothing that happens changes the plan."""

    def forget(self, sequence_id: int) -> None:
        """Nothing is kept."""
