"""Draws: right law, never an impossible token, robust to rounding, independent of the neighbours."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from foredraft.sampling import Stream, gumbel, likeliest_tokens, most_likely_tokens, sample_gumbel, sample_inverse_cdf

SMALLEST, LARGEST = 2.0**-53, 1.0 - 2.0**-53


def test_inverse_cdf_by_hand() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    uniforms = torch.tensor([SMALLEST, 0.2499, 0.25, 0.7499, 0.75, LARGEST], dtype=torch.float64)
    assert sample_inverse_cdf(probs.expand(6, -1), uniforms).tolist() == [1, 1, 3, 3, 4, 4]


def test_inverse_cdf_needs_no_normalisation() -> None:
    probs = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3e-30, 1e-30]])
    uniforms = torch.tensor([0.76, 0.74], dtype=torch.float64)
    assert sample_inverse_cdf(probs, uniforms).tolist() == [2, 1]


def test_a_uniform_rounded_to_one_stays_in_the_vocabulary() -> None:
    """As float32 the largest number is 1, where a plain search falls off the end of the vocabulary."""
    probs = torch.tensor([[0.3, 0.3, 0.3, 0.0]])
    uniforms = torch.tensor([LARGEST], dtype=torch.float32)
    cumulative = probs[0].double().cumsum(dim=-1)
    assert torch.searchsorted(cumulative, uniforms * cumulative[-1], right=True).item() == 4
    assert sample_inverse_cdf(probs, uniforms).tolist() == [2]


@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-9, 0.1, 1.0]), min_size=1, max_size=12),
    uniform=st.one_of(st.sampled_from([SMALLEST, LARGEST, 0.5]), st.floats(SMALLEST, LARGEST)),
    seed=st.integers(0, 2**32),
)
def test_no_impossible_token(weights: list[float], uniform: float, seed: int) -> None:
    if not any(weights):
        weights[0] = 1.0
    probs = torch.tensor([weights])
    by_cdf = sample_inverse_cdf(probs, torch.tensor([uniform], dtype=torch.float64))
    by_gumbel = sample_gumbel(probs, [gumbel(seed, Stream.TARGET, 0, len(weights))])
    assert probs[0, by_cdf[0]] > 0
    assert probs[0, by_gumbel[0]] > 0


def test_gumbel_draws_have_the_law() -> None:
    """20,000 keyed draws, chi-squared with 4 degrees of freedom, false alarm 1e-6."""
    probs = torch.tensor([0.4, 0.0, 0.3, 0.2, 0.09, 0.01])
    noise = [gumbel(1, Stream.TARGET, position, 6) for position in range(20_000)]
    counts = sample_gumbel(probs.expand(20_000, -1), noise).bincount(minlength=6)
    assert counts[1] == 0
    observed, expected = counts[probs > 0].numpy(), (probs[probs > 0] * 20_000).double().numpy()
    assert stats.chisquare(observed, expected * 20_000 / expected.sum()).pvalue > 1e-6


def test_gumbel_of_a_one_hot_row_is_its_token() -> None:
    """So a greedy row needs no special case."""
    probs = torch.eye(5)
    assert sample_gumbel(probs, [gumbel(2, Stream.TARGET, i, 5) for i in range(5)]).tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_gumbel_of_float32_and_float64_rows() -> None:
    """float64 noise decides: a float32 sum of log and noise would tie where these two differ by 1e-9."""
    probs = torch.tensor([[0.5, 0.5]])
    noise = torch.tensor([[11.3, 11.3 + 1e-9]], dtype=torch.float64)
    in_float32 = (probs.log() + noise).float()
    assert in_float32[0, 0] == in_float32[0, 1]
    assert sample_gumbel(probs, noise).tolist() == [1]
    assert sample_gumbel(probs.double(), noise).tolist() == [1]


def test_most_likely_token_is_the_first_of_equals() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0], [float("-inf"), -5.0, -9.0, -5.0]])
    assert most_likely_tokens(scores).tolist() == [1, 0, 1]


def test_most_likely_token_in_bf16_is_that_in_float32() -> None:
    """Ties, numbers that are all negative, zeros of both signs, infinities."""
    generator = torch.Generator().manual_seed(0)
    inf = float("inf")
    rows = [
        [-3.0, -1.0, -1.0],
        [-0.0, 0.0, -1.0],
        [-2.0, -0.0, 0.0],
        [-inf, -inf, -5.0],
        [1.0, inf, 2.0],
        [5.0, 5.0, -6.0],
    ]
    for scores in (*torch.tensor(rows)[:, None], torch.tensor(rows), torch.randn(40, 999, generator=generator)):
        assert most_likely_tokens(scores.bfloat16()).equal(most_likely_tokens(scores.bfloat16().float()))
    part = torch.randn(8, 70, generator=generator).bfloat16()[:5, :64]
    assert most_likely_tokens(part).equal(most_likely_tokens(part.float()))


@pytest.mark.parametrize(("num_tokens", "count"), [(2048, 1), (2048, 8), (1024, 8), (1000, 3), (49_152, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_likeliest_tokens_have_the_highest_scores(num_tokens: int, count: int, dtype: torch.dtype) -> None:
    """In bf16 many are equal; each is named once."""
    scores = torch.randn(5, num_tokens, generator=torch.Generator().manual_seed(0)).to(dtype)
    scores[3, 256:] = float("-inf")
    found = likeliest_tokens(scores, count)
    assert scores.gather(1, found).equal(scores.sort(dim=-1, descending=True).values[:, :count])
    assert all(len(set(row)) == count for row in found.tolist())


def test_rows_are_independent() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = (torch.randn(6, 5001, generator=generator) * 2).softmax(dim=-1)
    uniforms = torch.rand(6, generator=generator, dtype=torch.float64)
    noise = [gumbel(4, Stream.TARGET, i, 5001) for i in range(6)]
    by_cdf, by_gumbel = sample_inverse_cdf(probs, uniforms), sample_gumbel(probs, noise)
    for row in range(6):
        one = slice(row, row + 1)
        assert sample_inverse_cdf(probs[one], uniforms[one])[0] == by_cdf[row]
        assert sample_gumbel(probs[one], noise[one])[0] == by_gumbel[row]
    assert len(set(by_cdf.tolist())) > 3
