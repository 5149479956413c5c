"""Lengths in tiers by the mean accepted length, one for the whole batch, as SGLang's adaptive speculation does it. For
comparison: acceptance alone, so it drafts however full the batch is."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from foredraft.policy.base import Forecast, PlanRow, StepOutcome

TIERS = (1, 3, 7)
WEIGHT = 0.2
"""Of a step in the moving average."""
WARM_UP, INTERVAL = 10, 5
"""Steps with drafts before the first change of tier, and between two changes."""
LOWER = 0.25
"""The average must be so far below what a tier asks for before it is left downwards."""


class TiersPolicy:
    """Goes up a tier when about all of a draft is accepted on average, and down when that is no longer so.

    Args:
        num_draft_tokens: no tier above it is used, and it is the highest one itself if it is below the last.
    """

    forecast: Forecast | None = None

    def __init__(self, num_draft_tokens: int):
        last = min(TIERS[-1], num_draft_tokens)
        self.tiers = [*(tier for tier in TIERS if tier < last), last]
        self._at = len(self.tiers) // 2
        self._average, self._steps = float(self.tiers[self._at]), 0

    def rests(self, num_rows: int) -> bool:
        return False

    def plan(self, rows: Sequence[PlanRow], num_other_tokens: int) -> list[int]:
        return [min(self.tiers[self._at], row.limit) for row in rows]

    def observe(self, step: StepOutcome) -> None:
        accepted = [row.num_accepted for row in step.rows if row.num_draft_tokens]
        if not accepted:
            return
        self._average += WEIGHT * (mean(accepted) - self._average)
        self._steps += 1
        if self._steps > WARM_UP and self._steps % INTERVAL == 0:
            self._change_tier()

    def forget(self, sequence_id: int) -> None:
        """Nothing is kept of a sequence."""

    def _change_tier(self) -> None:
        """A tier is asked for by an average, one token ahead, that rounds to more than the tier below."""
        target = self._average + 1.0
        if self._at + 1 < len(self.tiers) and target >= self.tiers[self._at] + 0.5:
            self._at += 1
        elif self._at and target < self.tiers[self._at - 1] + 0.5 - LOWER:
            self._at -= 1
