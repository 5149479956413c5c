"""The audit's statistics: exact where a small case can be enumerated, else with the sample size stated."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom

from foredraft.lab.audit.statistics import (
    MartingaleTest,
    NeverTest,
    Panel,
    PitTests,
    log_evidence,
    randomised_pit,
    tokens_needed,
    visible_bias,
)


@pytest.mark.parametrize("probability", [0.5, 0.03, 0.9])
@pytest.mark.parametrize("num_tokens", [1, 7, 200])
def test_evidence_is_worth_at_most_1_on_average(probability: float, num_tokens: int) -> None:
    """Exact: the mean over the binomial law of a fair coin's sum, so the bet cannot win on an exact engine."""
    counts = np.arange(num_tokens + 1)
    worth = [
        math.exp(log_evidence(k - num_tokens * probability, num_tokens * probability * (1 - probability)))
        for k in counts
    ]
    mean = float(np.dot(binom.pmf(counts, num_tokens, probability), worth))
    assert 0.3 < mean <= 1 + 1e-12


@pytest.mark.parametrize("rate", [0.2, 0.01])
def test_looking_after_every_token_keeps_the_false_alarm_rate(rate: float) -> None:
    """Exact: the probability that a coin of known bias is convicted at any of 400 looks, by enumeration of sums."""
    probability, alive, convicted = 0.3, np.array([1.0]), 0.0
    for num_tokens in range(1, 401):
        alive = np.convolve(alive, [1 - probability, probability])
        sums = np.arange(num_tokens + 1) - num_tokens * probability
        variance = num_tokens * probability * (1 - probability)
        caught = np.array([log_evidence(total, variance) >= -math.log(rate) for total in sums])
        convicted += float(alive[caught].sum())
        alive[caught] = 0.0
    assert rate / 100 < convicted <= rate


def test_many_tests_with_one_verdict_keep_the_false_alarm_rate() -> None:
    """200 exact engines of 300 tokens, looked at 30 times, at a rate of 0.5: 100 alarms at most are expected.

    More than 140 has a probability below 1e-7; none at all would mean that nothing was tested.
    """
    rng = np.random.default_rng(1)
    alarms = 0
    for _ in range(200):
        pit, event = PitTests(), MartingaleTest("event")
        panel = Panel([event, *pit.tests], false_alarm_rate=0.5)
        for _ in range(30):
            numbers = rng.random(10)
            event.add(numbers < 0.2, 0.2, 0.16)
            pit.add(numbers)
            panel.look()
        alarms += panel.convicted
    assert 2 < alarms <= 140


def test_adding_in_parts_changes_nothing() -> None:
    rng = np.random.default_rng(2)
    numbers = rng.random(50)
    whole, parts = PitTests(), PitTests()
    whole.add(numbers, 0.01)
    parts.add(numbers[:20], 0.01)
    parts.add(numbers[20:], 0.01, before=float(numbers[19]))
    for one, other in zip(whole.tests, parts.tests, strict=True):
        assert one.num_observations == other.num_observations
        assert one.total == pytest.approx(other.total)
        assert one.log_evidence == pytest.approx(other.log_evidence)


def test_z_score_and_bias_of_a_hand_worked_sum() -> None:
    test = MartingaleTest("event")
    test.add([1, 0, 1], [0.5, 0.2, 0.9], [0.25, 0.16, 0.09])
    assert test.total == pytest.approx(0.4)
    assert test.bias == pytest.approx(0.4 / 3)
    assert test.z_score == pytest.approx(0.4 / math.sqrt(0.5))


def test_a_bias_is_seen_with_the_tokens_that_were_said_to_suffice() -> None:
    """200 engines whose event comes 0.05 too often: about 90 % are convicted; fewer than 160 has p < 1e-5."""
    limit = Panel([MartingaleTest("event")], 1e-6).limit
    needed = tokens_needed(0.05, 0.2 * 0.8, limit)
    assert 2000 < needed < 5000
    assert visible_bias(needed, 0.16, limit) <= 0.05 < visible_bias(needed - 1, 0.16, limit)
    counts = np.random.default_rng(3).binomial(needed, 0.25, size=200)
    seen = sum(log_evidence(count - 0.2 * needed, 0.16 * needed) >= limit for count in counts)
    assert 160 <= seen < 200


def test_an_allowance_for_rounding_hides_what_rounding_could_do_and_no_more() -> None:
    def evidence(bias: float) -> float:
        test = MartingaleTest("event")
        test.add(np.full(20_000, 0.3 + bias), 0.3, 0.21, total_variation=0.01)
        return test.log_evidence

    assert evidence(0.02) < 0.0
    assert evidence(0.10) > math.log(1e6)


def test_the_transform_of_any_discrete_law_is_uniform() -> None:
    """Exact: the probability that the number lies below a point equals that point."""
    probs = np.array([0.5, 0.0, 0.2, 0.3])
    below = np.concatenate([[0.0], np.cumsum(probs)[:-1]])
    for point in (0.1, 0.5, 0.61, 0.93):
        reach = np.clip((point - below) / np.where(probs > 0, probs, 1.0), 0.0, 1.0)
        assert float(np.dot(probs, reach)) == pytest.approx(point)
    assert randomised_pit(below, probs, 0.5).tolist() == pytest.approx([0.25, 0.5, 0.6, 0.85])


def test_numbers_that_repeat_are_convicted_of_dependence_and_not_of_their_law() -> None:
    """Each number is used twice in a row, as by an engine that reads one random stream twice; 4,000 tokens."""
    pit = PitTests()
    panel = Panel(pit.tests)
    for _ in range(20):
        pit.add(np.repeat(np.random.default_rng(4).random(100), 2))
    assert panel.look()
    assert panel.strongest in pit.serial


def test_a_skewed_law_is_convicted_of_it() -> None:
    pit = PitTests()
    panel = Panel(pit.tests)
    pit.add(np.random.default_rng(5).random(3000) ** 1.4)
    assert panel.look()
    assert panel.strongest in pit.uniformity


def test_one_excluded_token_is_certain() -> None:
    never = NeverTest("excluded")
    panel = Panel([never, MartingaleTest("event")])
    never.add(np.zeros(100, dtype=bool))
    assert not panel.look()
    never.add([False, True])
    assert panel.look()
    assert panel.strongest is never


def test_a_conviction_stands() -> None:
    event = MartingaleTest("event")
    panel = Panel([event])
    event.add(np.ones(60), 0.5, 0.25)
    assert panel.look()
    event.add(np.zeros(60), 0.5, 0.25)
    assert event.z_score == 0.0
    assert panel.look()


def test_what_would_make_the_evidence_meaningless_is_refused() -> None:
    with pytest.raises(ValueError, match="exceeds the bound 1"):
        MartingaleTest("log-probability").add(-5.0, -1.0, 2.0)
    with pytest.raises(ValueError, match="outside"):
        Panel([], false_alarm_rate=1.0)
    with pytest.raises(ValueError, match="no number of tokens"):
        tokens_needed(0.0, 0.25, 14.0)
