"""What a policy is told and what it answers. It sees only the past, so it cannot bias what is emitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A sequence that will get a draft, or none.

    Attributes:
        limit: most draft tokens that make sense: its request's and the method's limits, and the room that is left for
            output less the token that verification always adds.
        context_len: tokens that its pass attends to.
        route: the caller's label for requests of one kind; they share what is known of acceptance.
    """

    sequence_id: int
    limit: int
    context_len: int
    route: str


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """What became of a row's draft: tokens planned, tokens drafted, and how many of them were accepted.

    For a tree ``num_draft_tokens`` is its depth.
    """

    sequence_id: int
    route: str
    planned: int
    num_draft_tokens: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One step as it was.

    Attributes:
        rows: of the sequences that were planned for.
        num_tokens: fed in the pass, prompts included.
        num_keys: sum of the context lengths of all rows.
        num_pairs: sum over rows of tokens fed times context length.
        draft_s, target_s, verify_s, host_s: seconds of the step's parts.
    """

    rows: Sequence[RowOutcome]
    num_tokens: int
    num_keys: int
    num_pairs: int
    draft_s: float
    target_s: float
    verify_s: float
    host_s: float


class Policy(Protocol):
    """Chooses draft lengths."""

    def plan(self, rows: Sequence[PlanRow], num_other_tokens: int) -> list[int]:
        """Draft tokens for each row, at most its limit; 0 is plain decoding.

        Args:
            num_other_tokens: prompt tokens that share the pass.
        """
        ...

    def observe(self, step: StepOutcome) -> None:
        """A step ended."""
        ...

    def forget(self, sequence_id: int) -> None:
        """A sequence ended, or was preempted."""
        ...
