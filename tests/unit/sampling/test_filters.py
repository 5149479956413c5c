"""Each filter by hand on 4 tokens, and against transformers' processors on random logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from foredraft.sampling import filters

INF = float("inf")
PROBS = torch.tensor([0.15, 0.50, 0.05, 0.30])
LOGITS = PROBS.log()


def kept(logits_V: Tensor) -> list[int]:
    return (logits_V > -INF).nonzero().squeeze(-1).tolist()


def test_keep_allowed() -> None:
    assert filters.keep_allowed(LOGITS, (2, 3)).tolist() == [-INF, -INF, LOGITS[2].item(), LOGITS[3].item()]


def test_ban_tokens() -> None:
    assert kept(filters.ban_tokens(LOGITS, (1, 3, 1))) == [0, 2]
    assert torch.equal(filters.ban_tokens(LOGITS, ()), LOGITS)


def test_logit_bias() -> None:
    biased = filters.add_logit_bias(torch.tensor([1.0, 2.0, 3.0, -INF]), (0, 2, 3), (0.5, -4.0, 7.0))
    assert biased.tolist() == [1.5, 2.0, -1.0, -INF]


def test_repetition_penalty() -> None:
    logits = torch.tensor([2.0, -2.0, 0.0, 4.0])
    assert filters.apply_repetition_penalty(logits, torch.tensor([0, 1, 2, 0, 1]), 2.0).tolist() == [
        1,
        -4,
        0,
        4,
    ]


def test_output_penalties() -> None:
    logits = torch.tensor([2.0, -2.0, 0.0, 4.0])
    penalised = filters.apply_output_penalties(logits, torch.tensor([3, 1]), torch.tensor([3, 1]), 0.5, 0.25)
    assert penalised.tolist() == [2.0, -2.75, 0.0, 2.75]


def test_temperature() -> None:
    assert filters.apply_temperature(torch.tensor([1.0, -2.0]), 0.5).tolist() == [2.0, -4.0]


def test_tiny_temperature_does_not_overflow() -> None:
    probs = filters.apply_temperature(torch.tensor([900.0, 899.0, -900.0]), 1e-44).softmax(dim=-1)
    assert probs.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(("min_p", "expected"), [(0.01, [0, 1, 2, 3]), (0.2, [0, 1, 3]), (0.5, [1, 3]), (1, [1])])
def test_min_p(min_p: float, expected: list[int]) -> None:
    assert kept(filters.apply_min_p(LOGITS, min_p)) == expected


@pytest.mark.parametrize(
    ("top_k", "expected"), [(1, [1]), (2, [1, 3]), (3, [0, 1, 3]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])]
)
def test_top_k(top_k: int, expected: list[int]) -> None:
    assert kept(filters.apply_top_k(LOGITS, top_k)) == expected


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [(1e-9, [1]), (0.49, [1]), (0.51, [1, 3]), (0.79, [1, 3]), (0.81, [0, 1, 3]), (0.96, [0, 1, 2, 3])],
)
def test_top_p(top_p: float, expected: list[int]) -> None:
    assert kept(filters.apply_top_p(LOGITS, top_p)) == expected


def test_top_p_is_taken_of_what_an_earlier_filter_left() -> None:
    """After top-k 2 token 1 has 0.5 / 0.8 = 0.625: it alone reaches 0.6, though not of the whole."""
    assert kept(filters.apply_top_p(filters.apply_top_k(LOGITS, 2), 0.6)) == [1]
    assert kept(filters.apply_top_p(LOGITS, 0.6)) == [1, 3]


def test_ties_stay_together() -> None:
    """vLLM keeps ties with the k-th token too; here min-p and top-p follow the same rule."""
    logits = torch.tensor([1.0, 3.0, 1.0, 2.0, 1.0])
    assert kept(filters.apply_top_k(logits, 3)) == [0, 1, 2, 3, 4]
    assert kept(filters.apply_top_k(logits, 2)) == [1, 3]
    probs = logits.softmax(dim=-1)
    assert kept(filters.apply_top_p(logits, float(probs[1] + probs[3]) + 0.01)) == [0, 1, 2, 3, 4]
    assert kept(filters.apply_min_p(logits, math.exp(-1.5))) == [1, 3]
    assert kept(filters.apply_top_p(torch.zeros(200), 0.7)) == list(range(200))


def test_top_k_over_banned_tokens() -> None:
    """Fewer than k tokens are left: they all stay and no banned one comes back."""
    assert kept(filters.apply_top_k(torch.tensor([-INF, 1.0, -INF, 0.0]), 3)) == [1, 3]


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999, 0.9999999])
@pytest.mark.parametrize("sharpness", [0.0, 0.1, 1.0, 5.0])
def test_top_p_on_a_large_vocabulary(top_p: float, sharpness: float) -> None:
    """The set is the smallest that reaches top_p, for nuclei below and above the 64 that are sorted."""
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(2)) * sharpness
    filtered = filters.apply_top_p(logits, top_p)
    probs = logits.softmax(dim=-1).double()
    stays = filtered > -INF
    assert torch.equal(filtered[stays], logits[stays])
    assert stays.all() or logits[stays].min() > logits[~stays].max()
    rounding = 1e-6
    assert probs[stays].sum() >= top_p - rounding
    if sharpness > 0:
        assert probs[stays].sum() - probs[stays].min() < top_p + rounding


def test_both_ways_of_top_p_were_taken() -> None:
    """The premise of the test above: nuclei of 5 to 4,500 tokens."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(5000, generator=generator)
    assert len(kept(filters.apply_top_p(logits * 5.0, 0.3))) < 20
    assert len(kept(filters.apply_top_p(logits * 0.1, 0.9))) > 4000


def test_bisection_and_sort_agree() -> None:
    """Nuclei around the width where one takes over from the other; the sum by a full sort in float64."""
    generator = torch.Generator().manual_seed(4)
    sizes = set()
    for _ in range(300):
        logits = torch.randn(400, generator=generator) * (0.5 + 2.0 * torch.rand((), generator=generator))
        top_p = float(torch.rand((), generator=generator).clamp(0.05, 0.98))
        probs = logits.softmax(dim=-1).double()
        expected = int((probs.sort(descending=True).values.cumsum(dim=-1) < top_p).sum()) + 1
        assert len(kept(filters.apply_top_p(logits, top_p))) == expected
        sizes.add(expected)
    assert min(sizes) < 30
    assert max(sizes) > 200
    assert sizes & set(range(60, 70))


@pytest.mark.parametrize("seed", range(3))
def test_as_in_transformers(seed: int) -> None:
    """Where the meaning is the same. The logits have no ties, on which transformers depends on its sort."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(997, generator=generator) * 3
    assert len(logits.unique()) == len(logits)
    seen = torch.randint(0, 997, (1, 60), generator=generator)

    def reference(processor: LogitsProcessor) -> Tensor:
        scores: Tensor = processor(seen, logits[None].clone())
        return scores[0]

    banned = [3, 77, 500]
    bias = {5: 1.5, 8: -2.0}
    cases = {
        "temperature": (filters.apply_temperature(logits, 0.7), TemperatureLogitsWarper(0.7)),
        "top_k": (filters.apply_top_k(logits, 40), TopKLogitsWarper(40)),
        "top_p": (filters.apply_top_p(logits, 0.6), TopPLogitsWarper(0.6)),
        "top_p, wide": (filters.apply_top_p(logits, 0.99), TopPLogitsWarper(0.99)),
        "min_p": (filters.apply_min_p(logits, 0.05), MinPLogitsWarper(0.05)),
        "repetition": (
            filters.apply_repetition_penalty(logits, seen.unique(), 1.3),
            RepetitionPenaltyLogitsProcessor(1.3),
        ),
        "banned": (filters.ban_tokens(logits, banned), SuppressTokensLogitsProcessor(banned)),
        "bias": (
            filters.add_logit_bias(logits, list(bias), list(bias.values())),
            SequenceBiasLogitsProcessor({(token_id,): value for token_id, value in bias.items()}),
        ),
    }
    for name, (ours, processor) in cases.items():
        theirs = reference(processor)
        assert torch.equal(ours > -INF, theirs > -INF), name
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=0.0), name
        assert not torch.equal(ours, logits), name


def test_no_argument_is_changed() -> None:
    logits = torch.tensor([1.0, 4.0, 2.0, 3.0])
    before = logits.clone()
    ids = torch.tensor([1, 2])
    filters.keep_allowed(logits, (0,))
    filters.ban_tokens(logits, (0,))
    filters.add_logit_bias(logits, (0,), (1.0,))
    filters.apply_repetition_penalty(logits, ids, 2.0)
    filters.apply_output_penalties(logits, ids, ids, 1.0, 1.0)
    filters.apply_temperature(logits, 2.0)
    filters.apply_min_p(logits, 0.9)
    filters.apply_top_k(logits, 1)
    filters.apply_top_p(logits, 0.1)
    assert torch.equal(logits, before)
