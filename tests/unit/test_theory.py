"""The formulas against brute force, against each other, and against figures printed elsewhere."""

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from foredraft import theory
from foredraft.errors import InvalidOptionError

RATES = (0.0, 0.1, 0.5, 0.784, 0.9, 0.99)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 8])
def test_expected_tokens_is_the_mean_over_all_accept_and_reject_patterns(rate, num_draft_tokens):
    mean = 0.0
    for pattern in itertools.product((True, False), repeat=num_draft_tokens):
        accepted = len(list(itertools.takewhile(bool, pattern)))
        mean += (accepted + 1) * math.prod(rate if passed else 1 - rate for passed in pattern)
    assert theory.expected_tokens(rate, num_draft_tokens) == pytest.approx(mean, rel=1e-12)


def test_equation_1_is_the_case_of_equal_independent_acceptances():
    conditional = [0.7] * 6
    marginal = theory.position_acceptances(conditional)
    assert marginal == pytest.approx([0.7**i for i in range(1, 7)])
    assert theory.expected_tokens_by_position(marginal) == pytest.approx(theory.expected_tokens(0.7, 6))


def test_perfect_drafter():
    assert theory.expected_tokens(1.0, 5) == 6.0
    assert theory.saturation(1.0) == math.inf
    assert theory.expected_tokens(1.0 - 1e-9, 5) == pytest.approx(6.0)


@pytest.mark.parametrize("rate", RATES)
def test_saturation_is_the_limit_of_long_drafts(rate):
    assert theory.expected_tokens(rate, 5000) == pytest.approx(theory.saturation(rate), rel=1e-9)
    assert theory.expected_tokens(rate, 50) <= theory.saturation(rate)


def test_measured_speedup_reduces_to_theorem_3_8_when_a_verify_pass_costs_one_step():
    marginal = theory.position_acceptances([0.8] * 4)
    measured = theory.measured_speedup(marginal, plain_step_s=0.02, draft_step_s=0.002, verify_step_s=0.02)
    assert measured == pytest.approx(theory.speedup(0.8, 4, 0.1))


def test_measured_speedup_counts_a_dearer_verify_pass_and_the_host():
    slow = theory.measured_speedup([0.5], plain_step_s=1.0, draft_step_s=0.1, verify_step_s=1.2, host_s=0.2)
    assert slow == pytest.approx(1.5 / 1.5)


# Draft length and speedup of methods.md 16.1, for c = 0.02, 0.05, 0.1, 0.2, 0.4.
BEST = {
    0.5: [(4, 1.79), (3, 1.63), (2, 1.46), (1, 1.25), (1, 1.07)],
    0.6: [(6, 2.17), (4, 1.92), (3, 1.67), (2, 1.40), (1, 1.14)],
    0.7: [(8, 2.76), (6, 2.35), (4, 1.98), (3, 1.58), (2, 1.22)],
    0.8: [(11, 3.82), (8, 3.09), (6, 2.47), (4, 1.87), (2, 1.36)],
    0.9: [(19, 6.37), (13, 4.67), (10, 3.43), (7, 2.37), (4, 1.58)],
}


@pytest.mark.parametrize("rate", BEST)
def test_best_draft_length_of_the_reference_table(rate):
    for cost, (length, value) in zip((0.02, 0.05, 0.1, 0.2, 0.4), BEST[rate], strict=True):
        best = theory.best_num_draft_tokens(rate, cost)
        assert best == length
        assert f"{theory.speedup(rate, best, cost):.2f}" == f"{value:.2f}"


def test_best_draft_length_is_0_when_drafting_never_pays():
    assert theory.best_num_draft_tokens(0.3, 0.4) == 0
    assert theory.continuous_best_num_draft_tokens(0.3, 0.7) == 0.0
    assert theory.best_num_draft_tokens(0.0, 0.0) == 0


def test_best_draft_length_is_the_limit_when_drafts_are_free_and_the_shortest_of_equal_ones():
    assert theory.best_num_draft_tokens(0.9, 0.0, limit=7) == 7
    assert theory.speedup(0.5, 1, 0.2) == pytest.approx(theory.speedup(0.5, 2, 0.2))
    assert theory.best_num_draft_tokens(0.5, 0.2) == 1


@pytest.mark.parametrize("rate", [0.4, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("cost", [0.01, 0.05, 0.2])
def test_continuous_optimum_is_stationary_and_next_to_the_integer_one(rate, cost):
    best = theory.continuous_best_num_draft_tokens(rate, cost)
    left = rate ** (best + 1) * (1 - math.log(rate) * (best + 1 / cost))
    assert left == pytest.approx(1.0, abs=1e-10)
    numeric = minimize_scalar(
        lambda g: -(1 - rate ** (g + 1)) / (g * cost + 1),
        bounds=(0, 400),
        method="bounded",
        options={"xatol": 1e-9},
    )
    assert best == pytest.approx(numeric.x, abs=1e-3)
    assert theory.best_num_draft_tokens(rate, cost, limit=400) in (math.floor(best), math.ceil(best))


@pytest.mark.parametrize(
    ("rate", "cost", "expected"),
    [(0.0, 0.1, 0.0), (0.9, 0.0, math.inf), (1.0, 0.5, math.inf), (1.0, 1.0, 0.0), (0.9, math.inf, 0.0)],
)
def test_continuous_optimum_at_the_edges(rate, cost, expected):
    assert theory.continuous_best_num_draft_tokens(rate, cost) == expected


def test_marginal_rule_stops_at_the_best_length():
    """Adding tokens while the next one pays must find the arg-max for every rate and cost of a grid."""
    for rate, cost in itertools.product(np.linspace(0.1, 0.95, 18), (0.01, 0.03, 0.1, 0.3)):
        length = 0
        while length < 200 and theory.next_draft_token_pays(
            rate ** (length + 1), theory.expected_tokens(rate, length), cost, length * cost + 1
        ):
            length += 1
        assert length == theory.best_num_draft_tokens(rate, cost, limit=200)


def _distributions(seed: int, size: int = 5):
    return np.random.default_rng(seed).dirichlet(np.full(size, 0.7), size=2).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_acceptances_and_their_order(seed):
    target, draft = _distributions(seed)
    distance = theory.total_variation(target, draft)
    rejection = theory.rejection_acceptance(target, draft)
    coupled = theory.coupled_acceptance(target, draft)
    at_least, at_most = theory.coupled_acceptance_bounds(target, draft)
    assert rejection == pytest.approx(1 - distance)
    assert at_least <= coupled <= at_most == pytest.approx(rejection)
    assert theory.match_acceptance(target, draft) == pytest.approx(float(np.dot(target, draft)))
    assert theory.match_acceptance(target, draft) <= coupled


def test_coupled_acceptance_counts_equal_gumbel_draws():
    """200,000 pairs; five standard errors, so a false alarm has probability 6e-7 (the seed is fixed)."""
    target, draft = _distributions(1)
    noise = np.random.default_rng(0).gumbel(size=(200_000, 5))
    agree = ((np.log(target) + noise).argmax(1) == (np.log(draft) + noise).argmax(1)).mean()
    exact = theory.coupled_acceptance(target, draft)
    assert 0.05 < exact < 0.95
    assert agree == pytest.approx(exact, abs=5 * math.sqrt(exact * (1 - exact) / 200_000))


def test_acceptance_of_equal_disjoint_and_filtered_distributions():
    assert theory.coupled_acceptance([0.3, 0.7], [0.3, 0.7]) == pytest.approx(1.0)
    assert theory.coupled_acceptance([1.0, 0.0], [0.0, 1.0]) == 0.0
    assert theory.rejection_acceptance([1.0, 0.0], [0.0, 1.0]) == 0.0
    assert theory.coupled_acceptance([1.0, 0.0], [0.4, 0.6]) == pytest.approx(0.4)


def test_roofline_of_a_7b_model_on_an_h100():
    """The seed document: about 4 ms, 240 tokens/s and 14 microseconds."""
    read_s = theory.weight_read_s(7e9, 2, 3.35e12)
    assert read_s == pytest.approx(4.179e-3, rel=1e-3)
    assert theory.ceiling_tokens_per_s(7e9, 2, 3.35e12) == pytest.approx(239.3, rel=1e-3)
    assert theory.arithmetic_s(7e9, 990e12) == pytest.approx(14.1e-6, rel=5e-3)
    assert theory.kv_bytes_per_token(32, 8, 128, 2) == 131072
    assert theory.kv_share(14e9, 14e9) == 0.5


@pytest.mark.parametrize("kv_bytes", [0.0, 1e6])
@pytest.mark.parametrize("tokens", [1, 5])
def test_compute_bound_batch_is_where_memory_and_arithmetic_take_equally_long(kv_bytes, tokens):
    batch = theory.compute_bound_batch(
        7e9,
        2,
        bandwidth_bytes_per_s=3.35e12,
        flops_per_s=989e12,
        kv_bytes_per_sequence=kv_bytes,
        tokens_per_sequence=tokens,
    )
    memory_s = (7e9 * 2 + batch * kv_bytes) / 3.35e12
    assert theory.arithmetic_s(7e9, 989e12, batch * tokens) == pytest.approx(memory_s)


def test_no_batch_is_compute_bound_when_the_cache_outweighs_the_arithmetic():
    batch = theory.compute_bound_batch(
        7e9, 2, bandwidth_bytes_per_s=3.35e12, flops_per_s=989e12, kv_bytes_per_sequence=1e9
    )
    assert batch == math.inf


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: theory.expected_tokens(1.2, 3), "acceptance_rate=1.2"),
        (lambda: theory.expected_tokens(math.nan, 3), "acceptance_rate=nan"),
        (lambda: theory.expected_tokens(0.5, -1), "num_draft_tokens=-1"),
        (lambda: theory.speedup(0.5, 1, -0.1), "draft_cost=-0.1"),
        (lambda: theory.best_num_draft_tokens(0.5, 0.1, limit=-2), "limit=-2"),
        (lambda: theory.saturation(-0.1), "acceptance_rate=-0.1"),
        (lambda: theory.expected_tokens_by_position([0.5, 1.5]), "acceptance=1.5"),
        (lambda: theory.position_acceptances([-0.5]), "conditional acceptance=-0.5"),
        (lambda: theory.total_variation([1.0], [0.5, 0.5]), "1 entries and draft_probs 2"),
        (lambda: theory.weight_read_s(0, 2, 1e12), "num_params=0"),
        (lambda: theory.next_draft_token_pays(0.5, 0.0, 0.1, 1.0), "tokens_now=0.0"),
    ],
)
def test_bad_input_names_the_value(call, words):
    with pytest.raises(InvalidOptionError, match=words):
        call()
