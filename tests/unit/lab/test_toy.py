"""The toy language and the statistics."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from foredraft.lab.toy import chi_square_p, exact_law, fit, noise_total_variation, seed_language


def test_exact_law_is_the_product_of_conditionals_in_base_v():
    language = seed_language()
    law = exact_law(language)
    assert law.sum() == pytest.approx(1.0, abs=1e-14)
    for index, sequence in enumerate(itertools.product(range(4), repeat=4)):
        contexts = (0, *sequence)
        chance = math.prod(language.target_probs[a, b] for a, b in itertools.pairwise(contexts))
        assert law[index] == pytest.approx(chance, rel=1e-14)


def test_fit_of_perfect_and_of_shifted_counts():
    law = np.array([0.5, 0.3, 0.2])
    perfect = fit(np.array([500, 300, 200]), law)
    assert perfect.total_variation == pytest.approx(0.0, abs=1e-15)
    assert perfect.chi_square_p > 0.95
    shifted = fit(np.array([600, 200, 200]), law)
    assert shifted.total_variation == pytest.approx(0.1)
    assert shifted.chi_square_p < 1e-6


def test_rare_outcomes_are_pooled():
    """Two outcomes expect one hit each; alone they would make the statistic explode."""
    law = np.array([0.98, 0.01, 0.01])
    pooled = fit(np.array([98, 2, 0]), law)
    assert pooled.chi_square_p == pytest.approx(chi_square_p(0.0, 1))


@pytest.mark.parametrize("degrees", [50, 120, 255])
def test_cube_root_approximation_is_close_to_the_chi_square_tail(degrees):
    for statistic in np.linspace(0.5 * degrees, 1.7 * degrees, 40):
        assert chi_square_p(statistic, degrees) == pytest.approx(stats.chi2.sf(statistic, degrees), abs=5e-4)


def test_noise_total_variation_is_what_correct_counts_show():
    """Mean of 200 multinomial counts; its standard error is below 0.5 %, the tolerance is 2 %."""
    law = exact_law(seed_language())
    counts = np.random.default_rng(0).multinomial(100_000, law, size=200)
    shown = 0.5 * np.abs(counts / 100_000 - law).sum(axis=1).mean()
    assert noise_total_variation(law, 100_000) == pytest.approx(shown, rel=0.02)
