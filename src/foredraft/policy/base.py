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
        match_len: of a copy that is known already, how many tokens before its place agree with the end of the text.
        source: what drafts for it, where several can.
        is_free: drafting takes no time worth planning for.
        branches: its draft may be a tree; draft tokens are then its nodes.
        num_unread: tokens of the text that the drafter's model reads first.
    """

    sequence_id: int
    limit: int
    context_len: int
    route: str
    match_len: int = 0
    source: str = ""
    is_free: bool = False
    branches: bool = False
    num_unread: int = 0


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """What became of a row's draft: tokens planned, tokens drafted (nodes of a tree), and which were accepted.

    ``path`` holds the indices of the accepted draft tokens; of a chain they are the first ones. The rest is as in the
    :class:`PlanRow`.
    """

    sequence_id: int
    route: str
    planned: int
    num_draft_tokens: int
    path: Sequence[int]
    match_len: int = 0
    source: str = ""
    is_free: bool = False
    branches: bool = False
    num_unread: int = 0

    @property
    def num_accepted(self) -> int:
        return len(self.path)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One step as it was.

    Attributes:
        rows: of the sequences that were planned for.
        num_rows: of the pass, those of prompts included.
        num_tokens: fed in the pass, prompts included.
        num_keys: sum of the context lengths of all rows.
        num_pairs: sum over rows of tokens fed times context length.
        draft_s, target_s, verify_s, host_s: seconds of the step's parts.
    """

    rows: Sequence[RowOutcome]
    num_rows: int
    num_tokens: int
    num_keys: int
    num_pairs: int
    draft_s: float
    target_s: float
    verify_s: float
    host_s: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a policy expects of the step that it has planned, and of the same step without drafts.

    Attributes:
        num_emitted: tokens that the planned step is expected to emit; the plain one emits one a row.
        step_s, plain_s: seconds of the two.
    """

    num_emitted: float
    step_s: float
    plain_s: float


class Policy(Protocol):
    """Chooses draft lengths.

    Attributes:
        forecast: of the last plan; None from a policy that makes none.
    """

    forecast: Forecast | None

    def rests(self, num_rows: int) -> bool:
        """Whether the next step is made without drafts, so that nobody need ask what could be drafted; asked once a
        step, before ``plan``, whose rows then have limit 0."""
        ...

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
