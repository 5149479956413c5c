"""The stopping rule of SpecDec++ (Huang et al., 2405.19715): a draft ends with the token behind which the chance that
at least one of its tokens is rejected exceeds a threshold. For comparison.

The paper predicts the chance from the draft model's state with a trained head; here it is predicted from what became
of earlier drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.policy.acceptance import AcceptanceBook
from foredraft.policy.base import Forecast, PlanRow, StepOutcome

THRESHOLD = 0.3
"""Highest chance of a rejection with which a draft goes on."""


class SpecDecPolicy:
    """Ends each draft as soon as a rejection in it has become likely; never drafts nothing.

    Of a tree each node must be likely to be accepted.
    """

    forecast: Forecast | None = None

    def __init__(self) -> None:
        self.acceptance = AcceptanceBook()

    def rests(self, num_rows: int) -> bool:
        return False

    def plan(self, rows: Sequence[PlanRow], num_other_tokens: int) -> list[int]:
        chances, _ = self.acceptance.expected(rows)
        going_on = [sum(1.0 - chance <= THRESHOLD for chance in each) for each in chances]
        return [min(row.limit, count + 1) for row, count in zip(rows, going_on, strict=True)]

    def observe(self, step: StepOutcome) -> None:
        self.acceptance.observe(step.rows)

    def forget(self, sequence_id: int) -> None:
        self.acceptance.forget(sequence_id)
