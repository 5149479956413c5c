"""The cost of a step: interpolation, correction by what is seen, robustness against single slow steps."""

from __future__ import annotations

import pytest

from foredraft.policy import PassTable, StepCost
from foredraft.policy.cost import WINDOW, interpolate

TABLE = PassTable((1, 8, 32), (0.010, 0.011, 0.035), key_s=1e-6, pair_s=1e-7)


def test_between_points_and_beyond_them():
    xs, ys = (1, 8, 32), (1.0, 8.0, 20.0)
    assert [interpolate(x, xs, ys) for x in (0, 1, 4, 8, 20, 32, 64)] == [1.0, 1.0, 4.0, 8.0, 14.0, 20.0, 36.0]
    assert interpolate(5, (1,), (3.0,)) == 3.0


def test_a_pass_is_its_tokens_and_its_context():
    cost = StepCost(TABLE)
    assert cost.pass_s(8, 0, 0) == pytest.approx(0.011)
    assert cost.pass_s(8, 1000, 8000) == pytest.approx(0.011 + 1e-3 + 7e-4)
    assert TABLE.free_tokens == 8


def test_a_slower_machine_makes_all_passes_slower():
    """Once the points seen are settled, what comes after is the machine."""
    cost = StepCost(TABLE)
    for factor, times in ((1.0, 2 * WINDOW), (2.0, WINDOW)):
        for _ in range(times):
            cost.observe_pass(8, 0, 0, 0.011 * factor)
    assert cost.pass_s(8, 0, 0) == pytest.approx(0.022, rel=0.05)
    assert cost.pass_s(32, 0, 0) == pytest.approx(0.070, rel=0.05)


def test_a_point_that_was_measured_wrongly_is_corrected_alone():
    cost = StepCost(TABLE)
    for _ in range(WINDOW):
        cost.observe_pass(32, 0, 0, 0.070)
    assert cost.pass_s(32, 0, 0) == pytest.approx(0.070, rel=0.01)
    assert cost.pass_s(8, 0, 0) == pytest.approx(0.011, rel=0.01)


def test_two_slow_steps_change_nothing_much():
    cost = StepCost(TABLE)
    for _ in range(2):
        cost.observe_pass(8, 0, 0, 1.0)
    for _ in range(5):
        cost.observe_pass(8, 0, 0, 0.011)
    assert cost.pass_s(8, 0, 0) == pytest.approx(0.011)


@pytest.mark.parametrize(("one_pass", "expected"), [(False, 0.012), (True, 0.008)])
def test_drafting_costs_by_the_token_or_once(one_pass, expected):
    """A draft of 4 took 8 ms: one of 6 takes 12 ms, or the same if the drafter needs one pass for all."""
    cost = StepCost(TABLE, one_pass_drafts=one_pass)
    cost.observe_rest(4, 5, draft_s=0.008, verify_s=0.001, host_s=0.002)
    assert cost.draft_s(6) == pytest.approx(expected)
    assert cost.draft_s(0) == 0.0
    assert cost.overhead_s(10) == pytest.approx(0.002 + 0.002)
    cost.observe_rest(0, 1, draft_s=1.0, verify_s=0.0002, host_s=0.002)  # nothing was drafted
    assert cost.draft_s(6) == pytest.approx(expected)
