"""The formulas of what is counted, by hand; with the public bug reports that they answer."""

import numpy as np
import pytest

from foredraft.measure import metrics

ALL = [True] * 4


def test_o35_accepted_is_the_leading_run_and_the_last_token_is_counted_apart():
    """vllm#10604: a match behind the first mismatch was counted as accepted."""
    rounds = [[True, False, True, True], [True, True, True, True], [False, True, True, True]]
    accepted = [metrics.common_prefix_len(matches, ALL) for matches in rounds]
    drafted = [len(matches) for matches in rounds]
    emitted = [count + 1 for count in accepted]
    assert accepted == [1, 4, 0]
    assert sum(drafted) == 12
    assert emitted == [2, 5, 1]
    assert metrics.accepted_per_pass(emitted) == accepted
    assert metrics.acceptance_rate(accepted, drafted) == pytest.approx(5 / 12)
    assert metrics.tokens_per_target_pass(sum(emitted), len(rounds)) == pytest.approx(8 / 3)
    assert metrics.acceptance_len(accepted, drafted) == pytest.approx(8 / 3)
    assert metrics.acceptance_per_position(accepted, drafted) == pytest.approx([2 / 3, 1 / 3, 1 / 3, 1 / 3])
    assert sum(emitted) == sum(accepted) + len(rounds)


def test_positions_count_only_the_drafts_that_reach_them():
    assert metrics.acceptance_per_position([1, 3, 0], [1, 4, 0]) == [1.0, 1.0, 1.0, 0.0]


def test_nothing_drafted_has_no_rate():
    assert metrics.acceptance_rate([0, 0], [0, 0]) is None
    assert metrics.acceptance_len([0, 0], [0, 0]) is None
    assert metrics.acceptance_per_position([0, 0], [0, 0]) == []
    assert metrics.tokens_per_target_pass(0, 0) == 0.0


def test_acceptance_len_leaves_out_passes_without_a_draft():
    assert metrics.acceptance_len([0, 2, 0], [0, 4, 4]) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([], [], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [1, 2, 3], 2),
        ([], [5], 0),
        ([4, 1], [5, 1], 0),
    ],
)
def test_first_difference(left, right, expected):
    assert metrics.first_difference(left, right) == expected


@pytest.mark.parametrize("chunk", [1, 2, 4, 8])
def test_o36_the_decode_rate_counts_tokens_whatever_the_size_of_a_delivery(chunk):
    """llama-benchy#11: deliveries were counted as tokens. One token after 200 ms, then 24 in 60 ms."""
    times = [0.200 + 0.060 * (index + 1) / (24 // chunk) for index in range(24 // chunk)]
    tokens = 1 + chunk * len(times)
    assert tokens == 25
    assert metrics.decode_rate(tokens, 0.200, times[-1]) == pytest.approx(400.0)


def test_the_decode_rate_leaves_out_a_first_delivery_of_several_tokens():
    assert metrics.decode_rate(25, 0.2, 0.4, num_first_tokens=5) == pytest.approx(100.0)
    assert metrics.decode_rate(1, 0.2, 0.2) == 0.0


def test_the_token_rate_has_prefill_in_it():
    assert metrics.token_rate(30, 1.5) == pytest.approx(20.0)
    assert metrics.token_rate(30, 0.0) == 0.0


def test_ratio_of_missing_figures_is_missing():
    assert metrics.ratio(3.0, 1.5) == 2.0
    assert metrics.ratio(None, 1.5) is None
    assert metrics.ratio(3.0, None) is None
    assert metrics.ratio(3.0, 0.0) is None


def test_medians_and_the_run_in_the_middle():
    assert metrics.median_of([3.0, 1.0, 2.0]) == 2.0
    assert metrics.median_of([]) == 0.0
    assert metrics.middle_index([3.0, 1.0, 2.0]) == 2
    assert metrics.middle_index([4.0, 1.0, 2.0, 3.0]) == 2


def test_percentiles_lie_between_the_nearest_ranks():
    """By hand: of 0, 10, 20, 30, 40 the 90th lies 0.6 of the way from rank 3 to rank 4."""
    values = [40.0, 0.0, 20.0, 10.0, 30.0]
    assert metrics.percentile(values, 50) == 20.0
    assert metrics.percentile(values, 90) == pytest.approx(36.0)
    assert [metrics.percentile(values, percent) for percent in (0, 100)] == [0.0, 40.0]
    assert metrics.percentile([7.0], 99) == 7.0
    assert metrics.percentile([], 50) is None
    assert metrics.percentile(values, 90) == pytest.approx(float(np.percentile(values, 90)))


def test_the_time_per_token_is_that_behind_the_first_delivery():
    assert metrics.time_per_output_token(11, 1.0, 3.0) == pytest.approx(0.2)
    assert metrics.time_per_output_token(11, 1.0, 3.0, num_first_tokens=3) == pytest.approx(0.25)
    assert metrics.time_per_output_token(3, 1.0, 1.0, num_first_tokens=3) is None
