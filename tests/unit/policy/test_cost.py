"""The cost of a step: the table, its correction by what is seen, robustness against slow steps."""

from __future__ import annotations

import random
from operator import mul

import pytest

from foredraft.policy import DraftCost, PassTable, StepCost
from foredraft.policy.cost import PassCost
from foredraft.policy.filters import LinearCost

TABLE = PassTable((1, 8, 32), (0.010, 0.011, 0.035), key_s=1e-6, pair_s=1e-7, row_s=1e-5)


def predicted(cost: PassCost, num_tokens: int) -> float:
    return cost.prices(1, 0)(num_tokens, 0)


def watch(cost: PassCost, num_tokens: int, seconds: float, times: int, seed: int = 0) -> None:
    """Passes of one size, with 3 % of noise."""
    rng = random.Random(seed)
    for _ in range(times):
        cost.observe(1, num_tokens, 0, 0, seconds * rng.uniform(0.97, 1.03))


def test_a_pass_is_its_tokens_its_rows_and_its_context():
    assert TABLE.pass_s(1, 8, 0, 0) == pytest.approx(0.011)
    assert TABLE.pass_s(1, 20, 0, 0) == pytest.approx(0.023)
    assert TABLE.pass_s(3, 8, 1000, 8000) == pytest.approx(0.011 + 2e-5 + 1e-3 + 7e-4)
    assert TABLE.pass_s(1, 64, 0, 0) == pytest.approx(0.067), "behind the last size with the last slope"
    assert TABLE.free_tokens == 8
    cost = PassCost(TABLE)
    for size in (3, 8, 20, 64):
        assert predicted(cost, size) == pytest.approx(TABLE.pass_s(1, size, 0, 0))


def test_a_slower_machine_makes_all_passes_slower():
    cost = PassCost(TABLE)
    watch(cost, 8, 0.011, 100)
    watch(cost, 8, 0.022, 25)
    assert predicted(cost, 8) == pytest.approx(0.022, rel=0.05)
    assert predicted(cost, 32) == pytest.approx(0.070, rel=0.1)
    assert predicted(cost, 1) == pytest.approx(0.020, rel=0.1)


def test_a_size_that_was_measured_wrongly_is_corrected_alone():
    """Passes of 8 take what the table says, those of 32 twice as much."""
    cost = PassCost(TABLE)
    for seed in range(40):
        watch(cost, 8, 0.011, 1, seed)
        watch(cost, 32, 0.070, 1, seed)
    assert predicted(cost, 32) / predicted(cost, 8) == pytest.approx(0.070 / 0.011, rel=0.1)


@pytest.mark.parametrize("size", [8, 20])
def test_tenfold_outliers_move_nothing_much(size):
    """One pass in ten takes ten times as long."""
    cost = PassCost(TABLE)
    expected = predicted(cost, size)
    worst = 0.0
    for i in range(300):
        watch(cost, size, expected * (10 if i % 10 == 5 else 1), 1, i)
        if i > 30 and i % 10 == 4:
            worst = max(worst, abs(predicted(cost, size) / expected - 1))
    assert worst < 0.1


def test_a_size_between_two_points_corrects_both():
    cost = PassCost(TABLE)
    watch(cost, 20, 0.046, 60)
    assert predicted(cost, 20) == pytest.approx(0.046, rel=0.03)


@pytest.mark.parametrize(
    ("counts", "seconds"),
    [([1, 4, 0, 4], 0.008), ([1, 1, 0, 1], 0.002), ([1, 8, 0, 32], 0.016)],
)
def test_drafting_costs_by_the_token(counts, seconds):
    """2 ms for each token of the longest draft, learnt from a first estimate of 3 ms."""
    cost = StepCost(TABLE, DraftCost(step_s=0.003))
    rng = random.Random(0)
    for _ in range(60):
        longest = rng.randrange(1, 7)
        cost.observe_rest(longest, 0, longest, longest + 1, 0.002 * longest * rng.uniform(0.9, 1.1), 1e-4)
    assert sum(map(mul, cost.draft_seconds, counts)) == pytest.approx(seconds, rel=0.25)


@pytest.mark.parametrize("max_passes", [1, 3])
def test_a_draft_costs_no_more_passes_than_the_drafter_makes(max_passes):
    """4 ms a pass: heads that draft all at once make one, trees one a level."""
    cost = StepCost(TABLE, DraftCost(step_s=0.003), max_passes)
    for i in range(120):
        longest = 1 + i % 6
        cost.observe_rest(longest, 0, longest, longest + 1, 0.004 * min(longest, max_passes), 1e-4)
    seconds = cost.prices(1, 100, 0)
    plain_s = seconds(0, 0, 0, 100)
    for longest in (1, 3, 8):
        drafting_s = seconds(0, longest, longest, 100) - plain_s
        assert drafting_s == pytest.approx(0.004 * min(longest, max_passes), rel=0.1)


@pytest.mark.parametrize("rested", [1, 30])
def test_what_was_left_to_read_does_not_make_drafts_dear(rested):
    """0.1 ms a token that is read, after each step without a draft one more; 2 ms for a draft of four."""
    cost, rng = StepCost(TABLE, DraftCost(step_s=0.001)), random.Random(0)
    for _ in range(80):
        unread = rng.randrange(1, 1 + 2 * rested) * 2
        cost.observe_rest(4, unread, 4, 5, 0.002 + 0.0001 * unread, 1e-4)
    seconds = cost.prices(1, 100, 0)
    assert seconds(0, 4, 4, 100) - seconds(0, 0, 0, 100) == pytest.approx(0.002, rel=0.2)


def test_steps_without_drafts_do_not_change_the_cost_of_drafting():
    cost = StepCost(TABLE, DraftCost(step_s=0.002))
    before = cost.draft_seconds
    cost.observe_rest(0, 0, 0, 1, 1.0, 1e-4)
    assert cost.draft_seconds == before


def test_linear_costs_are_robust_and_never_negative():
    cost, rng = LinearCost([1e-3, 1e-4], [1e-3, 1e-4]), random.Random(0)
    for i in range(400):
        count = rng.randrange(1, 64)
        seconds = (4e-4 + 3e-5 * count) * rng.uniform(0.9, 1.1) * (10 if i % 20 == 3 else 1)
        cost.observe([1, count], seconds)
        assert min(cost.seconds) >= 0
    assert sum(map(mul, cost.seconds, [1, 40])) == pytest.approx(1.6e-3, rel=0.15)
    assert sum(cost.seconds) == pytest.approx(4.3e-4, rel=0.4)
