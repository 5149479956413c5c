"""The vectorised samplers, their exact laws and the uniformity of their p-values."""

import numpy as np
import pytest

from foredraft.errors import InvalidOptionError
from foredraft.lab import chains
from foredraft.lab.distribution import SAMPLERS, check_draft_len, exact_total_variation, sample, uniformity
from foredraft.lab.fast_sampling import sample_rule
from foredraft.lab.toy import exact_law, noise_total_variation, seed_language

LANGUAGE = seed_language()
EXACT = [sampler for sampler in SAMPLERS if sampler.promise == "exact"]
OFF = [sampler for sampler in SAMPLERS if sampler.promise != "exact"]
BY_NAME = {sampler.name: sampler for sampler in SAMPLERS}


@pytest.mark.parametrize("sampler", EXACT, ids=lambda sampler: sampler.name)
def test_exact_samplers_have_distance_zero_and_fit(sampler):
    """200,000 sequences; p below 1e-4 would be a false alarm once in 10,000 (the seed is fixed)."""
    assert exact_total_variation(LANGUAGE, sampler) < 1e-12
    row = sample(LANGUAGE, sampler, 200_000)
    assert row.chi_square_p > 1e-4
    assert row.total_variation < 1.5 * noise_total_variation(exact_law(LANGUAGE), 200_000)


@pytest.mark.parametrize("sampler", OFF, ids=lambda sampler: sampler.name)
def test_other_samplers_end_at_their_exact_distance(sampler):
    distance = exact_total_variation(LANGUAGE, sampler)
    assert distance > 0.1
    row = sample(LANGUAGE, sampler, 200_000)
    assert row.total_variation == pytest.approx(distance, abs=0.005)
    assert row.chi_square_p < 1e-12


def test_wrong_fallback_stays_near_the_document_s_0_107():
    assert f"{exact_total_variation(LANGUAGE, BY_NAME['wrong fallback']):.12f}" == "0.105808612169"


def test_counts_add_up_and_depend_on_the_seed_but_not_on_the_threads():
    runs = [
        sample_rule(LANGUAGE, chains.BLOCK, 150_001, 2, seed=seed, num_threads=threads)
        for seed, threads in ((1, 1), (1, 2), (2, 2))
    ]
    assert all(run.counts.sum() == 150_001 for run in runs)
    assert np.array_equal(runs[0].counts, runs[1].counts)
    assert not np.array_equal(runs[0].counts, runs[2].counts)


def test_tokens_per_target_pass_are_in_the_order_of_the_rules():
    tokens = {s.name: sample(LANGUAGE, s, 50_000).tokens_per_target_pass for s in EXACT}
    assert tokens["target only"] == 1.0
    assert tokens["block"] > tokens["rejection"] > tokens["coupled"] > tokens["match"] > 1.2


def test_coupled_sequences_equal_plain_decoding_with_the_same_noise():
    row = sample(LANGUAGE, BY_NAME["coupled"], 100_000)
    assert row.num_unlike_plain == 0
    assert row.tokens_per_target_pass is not None
    assert 2.0 < row.tokens_per_target_pass < 4.0
    assert sample(LANGUAGE, BY_NAME["rejection"], 1000).num_unlike_plain is None


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 4])
def test_other_draft_lengths(num_draft_tokens):
    for name in ("rejection", "coupled"):
        assert exact_total_variation(LANGUAGE, BY_NAME[name], num_draft_tokens) < 1e-12
        assert sample(LANGUAGE, BY_NAME[name], 60_000, num_draft_tokens).chi_square_p > 1e-4


def test_p_values_are_uniform_for_a_correct_sampler_and_zero_for_the_wrong_one():
    """30 seeds, N = 30,000; a KS p below 0.001 would be a false alarm once in 1,000 (the seeds are fixed)."""
    right, wrong = (uniformity(LANGUAGE, BY_NAME[name], range(30), 30_000) for name in ("rejection", "wrong fallback"))
    assert right.kolmogorov_smirnov_p > 0.001
    assert min(right.p_values) < 0.2 < 0.8 < max(right.p_values)
    assert max(wrong.p_values) < 1e-12


@pytest.mark.parametrize("num_draft_tokens", [0, 5])
def test_draft_lengths_that_cannot_be_enumerated_are_refused(num_draft_tokens):
    with pytest.raises(InvalidOptionError, match=f"num_draft_tokens={num_draft_tokens} is outside"):
        check_draft_len(num_draft_tokens)
