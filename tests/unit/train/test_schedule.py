"""Learning rate, unrolling and the number of updates as functions of the number of the update."""

from __future__ import annotations

import pytest

from foredraft.train.schedule import GROUND, learning_rate_factor, num_steps_at, updates_within


def test_the_learning_rate_rises_and_falls():
    rates = [learning_rate_factor(update, 100, 0.1) for update in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert GROUND < rates[-1] < GROUND + 0.01
    assert learning_rate_factor(0, 1, 0.1) == 1.0


@pytest.mark.parametrize(("most", "expected"), [(1, {1}), (3, {1, 3}), (5, {1, 3, 5})])
def test_a_head_is_unrolled_further_late(most: int, expected: set[int]):
    steps = [num_steps_at(update, 60, most) for update in range(60)]
    assert set(steps) == expected
    assert steps == sorted(steps)
    assert steps[:20] == [1] * 20
    assert steps[-1] == most
    assert {num_steps_at(update, 60, most, is_trained=True) for update in range(60)} == {most}


def test_updates_within_a_time():
    assert updates_within(10.0, lambda steps: 0.1, 3) == pytest.approx(100, abs=1)
    assert updates_within(10.0, lambda steps: 0.1 * steps, 3) == pytest.approx(10 / (0.1 / 3 + 0.3 * 2 / 3), abs=1)
    assert updates_within(10.0, lambda steps: 0.1 * steps, 3, is_trained=True) == pytest.approx(10 / 0.3, abs=1)
    assert updates_within(0.0, lambda steps: 0.1, 3) == 1
