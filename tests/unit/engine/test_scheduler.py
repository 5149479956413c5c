"""First come, first served; decoding before prompts; chunks that add up."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.engine.scheduler import Scheduler


@dataclass(eq=False)
class Fake:
    sequence_id: int
    token_ids: list[int] = field(default_factory=list)


class Cached:
    """A scheduler with a cache that is a dictionary."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int, lengths: list[int]):
        self.cached: dict[int, int] = {}
        self.scheduler: Scheduler[Fake] = Scheduler(
            max_num_seqs, max_num_batched_tokens, lambda i: self.cached.get(i, 0)
        )
        self.sequences = [Fake(i, [1] * n) for i, n in enumerate(lengths)]
        for sequence in self.sequences:
            self.scheduler.add(sequence)

    def step(self) -> list[tuple[int, int, bool]]:
        """Admit, schedule, feed; a sequence that completes gets one token more."""
        list(self.scheduler.admit())
        rows = self.scheduler.schedule()
        for row in rows:
            at = row.sequence.sequence_id
            self.cached[at] = self.cached.get(at, 0) + row.num_tokens
            if row.completes:
                row.sequence.token_ids.append(1)
        return [(row.sequence.sequence_id, row.num_tokens, row.completes) for row in rows]


def test_prompts_are_cut_into_chunks_that_fit():
    """A prompt of 25 with 10 tokens a step: 10, 10, 5; only the last completes."""
    fake = Cached(4, 10, [25])
    assert [fake.step() for _ in range(4)] == [[(0, 10, False)], [(0, 10, False)], [(0, 5, True)], [(0, 1, True)]]


def test_decoding_comes_before_prompts():
    """A long prompt that came first does not hold up those that decode."""
    fake = Cached(4, 8, [30, 3])
    assert fake.step() == [(0, 8, False)]
    fake.scheduler.remove(fake.sequences[0])
    fake.step()
    fake.scheduler.add(fake.sequences[0])
    fake.cached[0] = 0
    assert fake.step() == [(1, 1, True), (0, 7, False)]


def test_a_prompt_that_is_cut_leaves_nothing_to_the_next():
    """The budget is spent in the order of arrival."""
    fake = Cached(4, 10, [6, 6, 6])
    assert fake.step() == [(0, 6, True), (1, 4, False)]
    assert fake.step() == [(0, 1, True), (1, 2, True), (2, 6, True)]


def test_no_more_than_max_num_seqs_run():
    """The rest wait, in order, and come in as others leave."""
    fake = Cached(2, 100, [3, 3, 3, 3])
    assert [row[0] for row in fake.step()] == [0, 1]
    fake.scheduler.remove(fake.sequences[0])
    assert [row[0] for row in fake.step()] == [1, 2]
    assert [s.sequence_id for s in fake.scheduler.waiting] == [3]


def test_remove_finds_a_sequence_wherever_it_is():
    """Waiting or running; one that is neither is our own mistake."""
    fake = Cached(1, 100, [3, 3])
    fake.step()
    fake.scheduler.remove(fake.sequences[1])
    assert fake.scheduler.has_work
    fake.scheduler.remove(fake.sequences[0])
    assert not fake.scheduler.has_work
    with pytest.raises(ValueError, match="not in deque"):
        fake.scheduler.remove(fake.sequences[0])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(1, 20),
    st.lists(st.integers(1, 8), min_size=6, max_size=6),
)
def test_every_sequence_gets_its_tokens(lengths, max_num_seqs, budget, wanted):
    """No starvation, no step over its limits, each token fed once, whatever the sizes."""
    fake = Cached(max_num_seqs, budget, lengths)
    for _ in range(1000):
        if not fake.scheduler.has_work:
            break
        rows = fake.step()
        assert rows
        assert len(fake.scheduler.running) <= max_num_seqs
        assert sum(n for _, n, _ in rows) <= budget
        assert all(n > 0 for _, n, _ in rows)
        for sequence in list(fake.scheduler.running):
            at = sequence.sequence_id
            assert fake.cached.get(at, 0) <= len(sequence.token_ids)
            if len(sequence.token_ids) == lengths[at] + wanted[at]:
                fake.scheduler.remove(sequence)
    assert not fake.scheduler.has_work
