"""By priority, then first come, first served; decoding before prompts; chunks that add up; none is left behind."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.engine.scheduler import DRAFT_SHARE, Scheduler, trim


@dataclass(eq=False)
class Fake:
    sequence_id: int
    token_ids: list[int]
    priority: int = 0
    num_prompt_tokens: int = 0
    draft_limit: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def order(self) -> tuple[int, int]:
        return self.priority, self.sequence_id

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass
class Slots:
    """A cache whose slots are all as large as the longest text, as those of ``target.slots`` are."""

    max_positions: int
    lengths: dict[int, int] = field(default_factory=dict)

    def length(self, sequence_id: int) -> int:
        return self.lengths[sequence_id]

    def fits(self, num_sequences: int, text_len: int) -> bool:
        return num_sequences * text_len <= self.max_positions


class Loop:
    """A scheduler with its cache, and steps that feed what it says; a sequence that completes gets a token more."""

    def __init__(self, max_num_seqs: int = 4, budget: int = 10, max_positions: int = 10**9):
        self.memory = Slots(max_positions)
        self.scheduler: Scheduler[Fake] = Scheduler(max_num_seqs, budget, self.memory)
        self.preempted: list[int] = []
        self.num_added = 0

    def add(self, *lengths: int, priority: int = 0, draft_limit: int = 0) -> list[Fake]:
        added = []
        for length in lengths:
            added.append(Fake(self.num_added, [1] * length, priority, draft_limit=draft_limit))
            self.scheduler.add(added[-1])
            self.num_added += 1
        return added

    def step(self) -> list[tuple[int, int, bool]]:
        for sequence in self.scheduler.overflow():
            del self.memory.lengths[sequence.sequence_id]
            self.preempted.append(sequence.sequence_id)
        for sequence in self.scheduler.admit():
            self.memory.lengths[sequence.sequence_id] = 0
        schedule = self.scheduler.schedule()
        self.left = schedule.num_draft_tokens
        self.scheduler.check_integrity()
        for row in schedule.rows:
            self.memory.lengths[row.sequence.sequence_id] += row.num_tokens
            if row.completes:
                row.sequence.token_ids.append(1)
        return [(row.sequence.sequence_id, row.num_tokens, row.completes) for row in schedule.rows]

    def remove(self, sequence: Fake) -> None:
        self.scheduler.remove(sequence)
        self.memory.lengths.pop(sequence.sequence_id, None)


def test_prompts_are_cut_into_chunks_that_fit():
    """A prompt of 25 with 10 tokens a step: 10, 10, 5; only the last completes."""
    loop = Loop()
    loop.add(25)
    assert [loop.step() for _ in range(4)] == [[(0, 10, False)], [(0, 10, False)], [(0, 5, True)], [(0, 1, True)]]


def test_decoding_comes_before_prompts():
    """A long prompt does not hold up those that decode, whoever came first; it gets what they leave."""
    loop = Loop(budget=8)
    loop.add(3)
    loop.step()
    loop.add(30, priority=-1)
    assert loop.step() == [(0, 1, True), (1, 7, False)]
    assert loop.step() == [(0, 1, True), (1, 7, False)]


def test_a_sequence_whose_text_is_fed_again_is_like_a_prompt():
    """After a preemption many tokens are pending, though there is output; short replays decode."""
    loop = Loop(budget=40)
    first, second = loop.add(30, 30)
    while first.num_output_tokens < 2:
        loop.step()
    loop.memory.lengths[first.sequence_id] = 0
    loop.memory.lengths[second.sequence_id] -= 3
    assert loop.step()[0][0] == second.sequence_id


def test_a_prompt_that_is_cut_leaves_nothing_to_the_next():
    """The budget is spent in the order of arrival; who would get nothing is not let in."""
    loop = Loop()
    loop.add(6, 6, 6)
    assert loop.step() == [(0, 6, True), (1, 4, False)]
    assert [s.sequence_id for s in loop.scheduler.waiting] == [2]
    assert loop.step() == [(0, 1, True), (1, 2, True), (2, 6, True)]


def test_no_more_than_max_num_seqs_run():
    """The rest wait, in order, and come in as others leave."""
    loop = Loop(max_num_seqs=2, budget=100)
    first, *_ = loop.add(3, 3, 3, 3)
    assert [row[0] for row in loop.step()] == [0, 1]
    loop.remove(first)
    assert [row[0] for row in loop.step()] == [1, 2]
    assert [s.sequence_id for s in loop.scheduler.waiting] == [3]


def test_a_lower_number_goes_first_and_drives_nobody_out():
    """Among equals the earlier one; a running sequence keeps its place."""
    loop = Loop(max_num_seqs=2, budget=100)
    running, _ = loop.add(3, 3, priority=5)
    loop.step()
    loop.add(3, priority=1)
    loop.add(3, priority=-1)
    loop.add(3, priority=1)
    assert [row[0] for row in loop.step()] == [0, 1]
    loop.remove(running)
    assert [row[0] for row in loop.step()] == [1, 3]
    assert [s.sequence_id for s in loop.scheduler.waiting] == [2, 4]


def test_a_big_request_is_not_overtaken():
    """It needs all of the memory; the small ones behind it wait too."""
    loop = Loop(budget=100, max_positions=40)
    small, *_ = loop.add(5, 40, 5)
    for _ in range(3):
        assert [row[0] for row in loop.step()] == [0]
    loop.remove(small)
    assert [row[0] for row in loop.step()] == [1]


def test_the_last_one_is_preempted_when_the_memory_is_full():
    """Of the lowest priority the latest; it keeps its output, and comes back before those that came after it."""
    loop = Loop(budget=100, max_positions=24)
    loop.add(6, priority=1)
    first, second = loop.add(6, 6)
    while not loop.preempted:
        loop.step()
    assert loop.preempted == [0]
    assert [s.sequence_id for s in loop.scheduler.waiting] == [0]
    assert loop.scheduler.waiting[0].num_output_tokens > 0
    loop.add(1, priority=1)
    while len(loop.preempted) < 2:
        loop.step()
    assert loop.preempted == [0, 2]
    assert [s.sequence_id for s in loop.scheduler.waiting] == [2, 0, 3]
    loop.remove(first)
    assert [row[0] for row in loop.step()] == [2]
    loop.remove(second)
    assert [row[0] for row in loop.step()] == [0, 3]


def test_prompts_leave_room_for_drafts_if_those_who_decode_want_it():
    """A quarter of the step at most, and no more than is wanted; without prompts all that is left."""
    loop = Loop(max_num_seqs=8, budget=100)
    drafting, _ = loop.add(3, 3, draft_limit=4)
    loop.step()
    prompt, *_ = loop.add(500)
    assert loop.step() == [(0, 1, True), (1, 1, True), (2, 90, False)]
    assert loop.left == 8
    drafting.draft_limit = 90
    assert loop.step() == [(0, 1, True), (1, 1, True), (2, 98 - 100 // DRAFT_SHARE, False)]
    assert loop.left == 100 // DRAFT_SHARE
    loop.remove(prompt)
    loop.step()
    assert loop.left == 98


@pytest.mark.parametrize(
    ("plan", "most", "expected"),
    [
        ([3, 0, 5], 8, [3, 0, 5]),
        ([3, 0, 5], 7, [3, 0, 4]),
        ([3, 0, 5], 5, [3, 0, 2]),
        ([3, 0, 5], 1, [1, 0, 0]),
        ([8, 8, 8], 10, [4, 3, 3]),
        ([8, 1], 0, [0, 0]),
        ([], 0, []),
    ],
)
def test_the_longest_drafts_are_trimmed(plan, most, expected):
    """Down to a common level; what then is left over goes to the first."""
    assert trim(plan, most) == expected


def test_remove_finds_a_sequence_wherever_it_is():
    """Waiting or running; one that is neither is our own mistake."""
    loop = Loop(max_num_seqs=1, budget=100)
    first, second = loop.add(3, 3)
    loop.step()
    loop.remove(second)
    assert loop.scheduler.has_work
    loop.remove(first)
    assert not loop.scheduler.has_work
    with pytest.raises(ValueError, match="sequence 0 is neither running nor waiting"):
        loop.remove(first)


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 5), st.integers(1, 24), st.integers(60, 200))
def test_every_sequence_gets_its_tokens(choose: random.Random, max_num_seqs: int, budget: int, max_positions: int):
    """Random arrivals, lengths, priorities, preemptions and aborts: no limit is exceeded and none is left behind.

    In every step the first of the running ones gets tokens unless others decode with all of the budget, the waiting
    line is not overtaken, and each token is fed once between two preemptions.
    """
    loop = Loop(max_num_seqs, budget, max_positions)
    wanted: dict[int, int] = {}
    alive: list[Fake] = []
    for now in range(3000):
        if now < 40 and choose.random() < 0.4:
            (new,) = loop.add(
                choose.randint(1, 40), priority=choose.choice([0, 0, 1]), draft_limit=choose.randint(0, 4)
            )
            alive.append(new)
            wanted[new.sequence_id] = choose.randint(1, 20)
        if alive and choose.random() < 0.03:
            loop.remove(alive.pop(choose.randrange(len(alive))))
        if loop.scheduler.running and choose.random() < 0.02:
            victim = choose.choice(loop.scheduler.running)
            loop.scheduler.put_back(victim)
            del loop.memory.lengths[victim.sequence_id]
        waited = [s.order for s in loop.scheduler.waiting]
        rows = loop.step()
        running = loop.scheduler.running
        assert bool(rows) == bool(alive)
        assert sum(n for _, n, _ in rows) + loop.left == budget
        assert loop.left >= 0
        assert all(n > 0 for _, n, _ in rows)
        assert len(running) == 1 or len(running) * loop.scheduler.longest <= max_positions + len(running)
        let_in = [order for order in waited if any(s.order == order for s in running)]
        assert let_in == waited[: len(let_in)]
        for sequence in list(running):
            assert loop.memory.lengths[sequence.sequence_id] <= len(sequence.token_ids)
            if sequence.num_output_tokens >= wanted[sequence.sequence_id]:
                loop.remove(sequence)
                alive.remove(sequence)
        if now >= 40 and not alive:
            break
    assert not loop.scheduler.has_work
    assert set(loop.memory.lengths) == set()
