"""Keyed noise: a function of its arguments, of the right law, independent between keys.

Statistical tests have fixed keys; they would fail by chance for 1 choice of keys in a million, as stated.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from foredraft.sampling import Stream, gumbel, uniform
from foredraft.sampling.noise import unit_interval

FALSE_ALARM = 1e-6
VOCAB_SIZE = 49_152


def test_is_a_function_of_its_arguments() -> None:
    """In any order, interleaved, and whatever was drawn with numpy or torch in between."""
    first = gumbel(7, Stream.TARGET, 11, 100), uniform(7, Stream.ACCEPT, 11)
    np.random.default_rng(7).random(3)
    torch.rand(3)
    gumbel(7, Stream.TARGET, 12, 100)
    assert torch.equal(first[0], gumbel(7, Stream.TARGET, 11, 100))
    assert first[1] == uniform(7, Stream.ACCEPT, 11)


def test_values_are_pinned() -> None:
    """A change of these numbers changes the output of every seeded request: it must be on purpose."""
    assert uniform(0, Stream.TARGET, 0) == 0.011546754286331562
    expected = [-0.20252901932180128, -1.5725961649304758, 0.4098651683864243]
    assert gumbel(42, Stream.TARGET, 3, 3).tolist() == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 17, 1000, 49_151])
def test_a_larger_vocabulary_only_appends(size: int) -> None:
    assert torch.equal(gumbel(3, Stream.DRAFT, 9, VOCAB_SIZE)[:size], gumbel(3, Stream.DRAFT, 9, size))


def test_every_part_of_the_key_counts() -> None:
    """All distinct: seeds and positions that differ in one low or high bit, and every stream."""
    seeds = [0, 1, 2, 2**32, 2**62, 2**63 - 1]
    positions = [0, 1, 2, 3, 2**20]
    values = {uniform(*key) for key in itertools.product(seeds, Stream, positions)}
    assert len(values) == len(seeds) * len(Stream) * len(positions)
    vectors = {tuple(gumbel(*key, 2).tolist()) for key in itertools.product(seeds, Stream, positions)}
    assert len(vectors) == len(values)


def test_open_interval_and_resolution() -> None:
    """The extreme bit patterns stay off 0 and 1; neighbours are 2^-52 apart, also next to 1."""
    bits = np.array([0, 2**12 - 1, 2**12, 2**64 - 2**12 - 1, 2**64 - 1], dtype=np.uint64)
    unit = unit_interval(bits)
    assert unit.tolist() == [2**-53, 2**-53, 3 * 2**-53, 1 - 3 * 2**-53, 1 - 2**-53]
    assert np.isfinite(-np.log(-np.log(unit))).all()


def test_uniform_uses_the_same_grid() -> None:
    values = [uniform(5, Stream.RECOVER, position) for position in range(2000)]
    assert all(0.0 < value < 1.0 and (value * 2**53) % 2 == 1 for value in values)


def test_laws() -> None:
    """Kolmogorov-Smirnov, n = 49,152 per vector and 5,000 for single numbers, false alarm 1e-6 each."""
    for seed, stream, position in [
        (0, Stream.TARGET, 0),
        (1, Stream.DRAFT, 5),
        (2**63 - 1, Stream.TARGET, 9),
    ]:
        noise = gumbel(seed, stream, position, VOCAB_SIZE)
        assert noise.dtype == torch.float64
        assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > FALSE_ALARM
    for stream in Stream:
        values = [uniform(3, stream, position) for position in range(5000)]
        assert stats.kstest(values, "uniform").pvalue > FALSE_ALARM


def test_the_test_of_the_law_can_fail() -> None:
    """It finds a scale that is 5 % off at n = 49,152."""
    noise = gumbel(0, Stream.TARGET, 0, VOCAB_SIZE)
    assert stats.kstest((1.05 * noise).numpy(), "gumbel_r").pvalue < FALSE_ALARM


def test_upper_tail() -> None:
    """The largest of each of 200 vectors of 49,152 is Gumbel around log(49,152); false alarm 1e-6.

    Uniform numbers of 24 bits, as float32 has them, would end at 17.3 and tie there.
    """
    largest = torch.stack([gumbel(9, Stream.TARGET, i, VOCAB_SIZE).amax() for i in range(200)]).double()
    excess = (largest - math.log(VOCAB_SIZE)).numpy()
    assert stats.kstest(excess, "gumbel_r").pvalue > FALSE_ALARM
    assert len(set(largest.tolist())) == 200


def test_neighbouring_keys_are_independent() -> None:
    """Correlation and a 12 x 12 table of joint counts, n = 49,152 per pair, false alarm 1e-6 per test.

    The correlation of n independent pairs of unit variance has a standard deviation of n^-1/2 and is normal.
    """
    base = (4, Stream.TARGET, 6)
    others = [
        (5, Stream.TARGET, 6),
        (4 + 2**32, Stream.TARGET, 6),
        (4, Stream.DRAFT, 6),
        (4, Stream.ACCEPT, 6),
        (4, Stream.RECOVER, 6),
        (4, Stream.TARGET, 5),
        (4, Stream.TARGET, 7),
        (6, Stream.TARGET, 4),
    ]
    limit = stats.norm.isf(FALSE_ALARM / 2) / math.sqrt(VOCAB_SIZE)
    one = cells(base)
    for key in others:
        other = cells(key)
        correlation = np.corrcoef(one, other)[0, 1]
        assert abs(correlation) < limit, key
        table = np.histogram2d(one, other, bins=12, range=[[0, 1], [0, 1]])[0]
        assert stats.chi2_contingency(table).pvalue > FALSE_ALARM, key
    shifted = np.corrcoef(one[1:], one[:-1])[0, 1]
    assert abs(shifted) < limit, "neighbouring token ids"


def cells(key: tuple[int, Stream, int]) -> NDArray[np.float64]:
    """The uniform numbers behind a vector."""
    return torch.exp(-torch.exp(-gumbel(*key, VOCAB_SIZE))).numpy()


def test_single_numbers_of_neighbouring_positions_are_independent() -> None:
    """n = 5,000 pairs each: next position, other stream. False alarm 1e-6."""
    limit = stats.norm.isf(FALSE_ALARM / 2) / math.sqrt(5000)
    accept = np.array([uniform(8, Stream.ACCEPT, position) for position in range(5001)])
    recover = np.array([uniform(8, Stream.RECOVER, position) for position in range(5000)])
    assert abs(np.corrcoef(accept[:-1], accept[1:])[0, 1]) < limit
    assert abs(np.corrcoef(accept[:-1], recover)[0, 1]) < limit
