"""transformers' rule, ``num_assistant_tokens_schedule="heuristic"``: two more after a draft that was accepted as a
whole, one less after any other. For comparison; each sequence for itself, as there."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.policy.base import Forecast, PlanRow, StepOutcome


class HeuristicPolicy:
    """Begins with ``num_draft_tokens``, which is also the most; the least is 1."""

    forecast: Forecast | None = None

    def __init__(self, num_draft_tokens: int):
        self.num_draft_tokens = num_draft_tokens
        self._lengths: dict[int, int] = {}

    def rests(self, num_rows: int) -> bool:
        return False

    def plan(self, rows: Sequence[PlanRow], num_other_tokens: int) -> list[int]:
        return [min(self._lengths.get(row.sequence_id, self.num_draft_tokens), row.limit) for row in rows]

    def observe(self, step: StepOutcome) -> None:
        for row in step.rows:
            if row.num_draft_tokens:
                length = self._lengths.get(row.sequence_id, self.num_draft_tokens)
                change = 2 if row.num_accepted == row.num_draft_tokens else -1
                self._lengths[row.sequence_id] = min(self.num_draft_tokens, max(1, length + change))

    def forget(self, sequence_id: int) -> None:
        self._lengths.pop(sequence_id, None)
