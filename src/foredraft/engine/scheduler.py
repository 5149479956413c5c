"""Which sequences run in a step, and how many of their pending tokens are fed. No torch, no cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Schedulable(Protocol):
    """What the scheduler reads of a sequence."""

    sequence_id: int
    token_ids: list[int]


S = TypeVar("S", bound=Schedulable)


@dataclass(frozen=True, slots=True)
class ScheduledRow(Generic[S]):
    """``num_tokens`` pending tokens of a sequence are fed; ``completes`` if none is left after that."""

    sequence: S
    num_tokens: int
    completes: bool


class Scheduler(Generic[S]):
    """First come, first served: running sequences first, then new ones while there is room.

    Args:
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens of a step; prompts are cut into chunks to fit.
        num_cached: tokens of a sequence that the target's cache holds.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, num_cached: Callable[[int], int]):
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._num_cached = num_cached
        self.waiting: deque[S] = deque()
        self.running: list[S] = []

    def add(self, sequence: S) -> None:
        self.waiting.append(sequence)

    def admit(self) -> Iterator[S]:
        """Move waiting sequences to the running ones while there is room, yielding each."""
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            yield sequence

    def schedule(self) -> list[ScheduledRow[S]]:
        """Rows of the next step: sequences that decode come first, prompts share what is left."""
        pending = [(s, len(s.token_ids) - self._num_cached(s.sequence_id)) for s in self.running]
        budget = self.max_num_batched_tokens
        rows = []
        for sequence, count in sorted(pending, key=lambda item: item[1] > 1):
            num_tokens = min(count, budget)
            if num_tokens > 0:
                rows.append(ScheduledRow(sequence, num_tokens, num_tokens == count))
                budget -= num_tokens
        return rows

    def remove(self, sequence: S) -> None:
        """Forget a sequence that ended, wherever it is."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)
