"""Which sequences run in a step, and how many of their pending tokens are fed. No torch, no cache.

    waiting   by priority, then arrival ----admit---->  running  ----schedule---->  rows of a step
                  ^                                        |
                  +---------------preempt------------------+   when the cache runs out of room; the last ones first

The order of priority and arrival is kept everywhere: none is overtaken in the waiting line, however big it is, and the
first of the running ones is never preempted, so all get done. A high priority goes before, it does not drive out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

SHORT = 16
"""A sequence that has begun its output and has no more pending tokens than this is not held up by prompts."""
DRAFT_SHARE = 4
"""Prompts leave one part in so many of a step's tokens to drafts, as far as the decoding rows may draft."""


class Schedulable(Protocol):
    """What the scheduler reads of a sequence; ``order`` sorts by priority, then by arrival, and is unique."""

    sequence_id: int
    token_ids: list[int]

    @property
    def order(self) -> tuple[int, int]: ...

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def draft_limit(self) -> int: ...


class Memory(Protocol):
    """What the scheduler asks of the cache."""

    def length(self, sequence_id: int) -> int:
        """Tokens of a running sequence that are cached."""
        ...

    def fits(self, num_sequences: int, text_len: int) -> bool:
        """Whether so many sequences have room, the longest of so many tokens; one always has."""
        ...


S = TypeVar("S", bound=Schedulable)


@dataclass(frozen=True, slots=True)
class ScheduledRow(Generic[S]):
    """``num_tokens`` pending tokens of a sequence are fed; ``completes`` if none is left after that."""

    sequence: S
    num_tokens: int
    completes: bool


@dataclass(frozen=True, slots=True)
class Schedule(Generic[S]):
    """The rows of a step, and how many tokens are left for the drafts of all of them together."""

    rows: list[ScheduledRow[S]]
    num_draft_tokens: int


class Scheduler(Generic[S]):
    """Continuous batching: sequences come and go with every step.

    Args:
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens of a step, drafts included; prompts are cut into chunks to fit.
        memory: where the running sequences are cached.

    Attributes:
        waiting, running: both in their order.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, memory: Memory):
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._memory = memory
        self.waiting: list[S] = []
        self.running: list[S] = []

    def add(self, sequence: S) -> None:
        insort(self.waiting, sequence, key=_order)

    def overflow(self) -> Iterator[S]:
        """Preempt the last of the running sequences until the others have room for the next step, yielding each."""
        while len(self.running) > 1 and not self._memory.fits(len(self.running), self.longest):
            sequence = self.running[-1]
            self.put_back(sequence)
            yield sequence

    def put_back(self, sequence: S) -> None:
        """Preempt a running sequence: it waits again, before those of its priority that came later."""
        _take(self.running, sequence)
        self.add(sequence)

    def admit(self) -> Iterator[S]:
        """Move waiting sequences to the running ones while there are places, tokens and room, yielding each.

        The caller opens its cache before it asks for the next one.
        """
        if not self.waiting:
            return
        left = self.max_num_batched_tokens - sum(map(self._num_pending, self.running))
        while self.waiting and len(self.running) < self.max_num_seqs and left > 0:
            sequence = self.waiting[0]
            longest = max(self.longest, len(sequence.token_ids))
            if self.running and not self._memory.fits(len(self.running) + 1, longest):
                return
            del self.waiting[0]
            insort(self.running, sequence, key=_order)
            yield sequence
            left -= self._num_pending(sequence)

    def schedule(self) -> Schedule[S]:
        """The next step: sequences that decode come first, prompts share what is left."""
        budget, wanted = self.max_num_batched_tokens, 0
        rows: list[ScheduledRow[S]] = []
        prompts = []
        for sequence in self.running:
            count = self._num_pending(sequence)
            if count > SHORT or not sequence.num_output_tokens:
                prompts.append((sequence, count))
            elif budget:
                num_tokens = min(count, budget)
                rows.append(ScheduledRow(sequence, num_tokens, num_tokens == count))
                budget -= num_tokens
                wanted += sequence.draft_limit
        for_drafts = min(wanted, self.max_num_batched_tokens // DRAFT_SHARE, max(0, budget - 1))
        for sequence, count in prompts:
            num_tokens = min(count, budget - for_drafts)
            if num_tokens <= 0:
                break
            rows.append(ScheduledRow(sequence, num_tokens, num_tokens == count))
            budget -= num_tokens
        return Schedule(rows, budget)

    def remove(self, sequence: S) -> None:
        """Forget a sequence that ended, wherever it is."""
        if not _take(self.running, sequence) and not _take(self.waiting, sequence):
            raise ValueError(f"sequence {sequence.sequence_id} is neither running nor waiting")

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def longest(self) -> int:
        """Tokens of the longest running text."""
        return max((len(sequence.token_ids) for sequence in self.running), default=0)

    def check_integrity(self) -> None:
        """Assert the invariants of the book-keeping (used by tests and the soak run)."""
        for line in (self.waiting, self.running):
            orders = [sequence.order for sequence in line]
            assert orders == sorted(set(orders)), "a line is out of order, or holds a sequence twice"
        assert not {s.order for s in self.waiting} & {s.order for s in self.running}
        assert len(self.running) <= self.max_num_seqs
        assert all(self._num_pending(sequence) > 0 for sequence in self.running)

    def _num_pending(self, sequence: S) -> int:
        return len(sequence.token_ids) - self._memory.length(sequence.sequence_id)


def trim(plan: Sequence[int], most: int) -> list[int]:
    """Draft lengths of at most ``most`` tokens together: the longest drafts are cut, to about the same length."""
    level, total = max(plan, default=0), sum(plan)
    if total <= most:
        return list(plan)
    while total > most:
        level -= 1
        total = sum(min(length, level) for length in plan)
    left, trimmed = most - total, []
    for length in plan:
        extra = length > level and left > 0
        left -= extra
        trimmed.append(min(length, level) + extra)
    return trimmed


def _order(sequence: Schedulable) -> tuple[int, int]:
    return sequence.order


def _take(line: list[S], sequence: S) -> bool:
    """Take a sequence out of a sorted line, if it is there."""
    at = bisect_left(line, sequence.order, key=_order)
    found = at < len(line) and line[at] is sequence
    if found:
        del line[at]
    return found
