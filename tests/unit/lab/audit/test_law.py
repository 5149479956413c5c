"""The target's law, computed apart: against transformers' own logits, and against the sampler's filters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from foredraft.lab.audit.law import TokenLaw, filtered_probs, measure_noise, text_logits, token_laws
from foredraft.sampling import SamplingRow, TokenCounts, adjust_logits, probs_from_logits
from foredraft.testing import target_for
from foredraft.types import SamplingParams

TEXT = [7, 8, 9, 10, 7, 8, 9, 3, 5, 3, 5, 41, 41, 2]
NUM_PROMPT = 4
STOP_IDS = (3, 9)


@pytest.mark.parametrize("width", [1, 3, 256])
@pytest.mark.parametrize("num_copies", [1, 3])
def test_logits_are_those_of_the_model(tiny: Any, width: int, num_copies: int) -> None:
    with torch.inference_mode():
        expected = tiny(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0, NUM_PROMPT - 1 : -1]
    target = target_for(tiny)
    found = text_logits(target, TEXT, len(TEXT) - NUM_PROMPT, width=width, num_copies=num_copies)
    assert np.abs(found - expected.numpy()).max() < 1e-3
    assert target.slots.num_open == 0


def test_no_noise_where_passes_give_the_same_bits(tiny: Any) -> None:
    target = target_for(tiny)
    if target.native is None:
        pytest.skip("the kernels of this machine depend on the number of rows")
    assert measure_noise(target, TEXT, NUM_PROMPT, SamplingParams(), width=5).logits == 0.0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 5},
        {"top_p": 0.6, "temperature": 1.7},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.01, "temperature": 1.3},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.7},
        {"logit_bias": {5: 2.0, 8: -1.0}, "banned_token_ids": (1, 2), "min_tokens": 4},
        {"allowed_token_ids": (3, 4, 5, 9, 41), "min_tokens": 4, "repetition_penalty": 0.8},
    ],
    ids=str,
)
def test_two_implementations_of_the_filters_agree(options: dict[str, Any]) -> None:
    """The sampler's, in float32 by thresholds, and the audit's, in float64 by sorting; bf16 logits, so with ties."""
    logits = (3 * torch.randn(len(TEXT) - NUM_PROMPT, 64, generator=torch.Generator().manual_seed(1))).bfloat16()
    params = SamplingParams(**options)
    rows = []
    for place in range(len(logits)):
        counts = TokenCounts(TEXT[:NUM_PROMPT])
        counts.append(TEXT[NUM_PROMPT : NUM_PROMPT + place])
        rows.append(SamplingRow(params, num_output_tokens=place, counts=counts, stop_ids=STOP_IDS))
    expected = probs_from_logits(adjust_logits(logits, rows), [params] * len(rows))
    laws = list(token_laws(logits.double().numpy(), TEXT, NUM_PROMPT, params, STOP_IDS))
    for law, row in zip(laws, expected.double().numpy(), strict=True):
        assert ((law.probs > 0) == (row > 0)).all()
        assert np.abs(law.probs - row).max() < 1e-6


def test_a_nucleus_of_many_tokens_is_found_by_sorting_all() -> None:
    """Flat logits of 5,000 tokens: more than are sorted at first."""
    scores = np.linspace(0.0, 0.1, 5000)
    kept = filtered_probs(scores, SamplingParams(top_p=0.9)) > 0
    order = np.argsort(-scores)
    mass = np.exp(scores[order]) / np.exp(scores).sum()
    assert kept.sum() == np.searchsorted(np.cumsum(mass), 0.9) + 1
    assert kept[order[: kept.sum()]].all()


def test_a_token_at_a_limit_is_excluded_only_beyond_rounding_and_noise() -> None:
    scores = np.array([5.0, 4.0, 3.99999, 3.9, 1.0])
    law = TokenLaw(scores, filtered_probs(scores, SamplingParams(top_k=2)), SamplingParams(top_k=2))
    assert [law.excludes(token) for token in range(5)] == [False, False, False, True, True]
    assert [law.excludes(token, noise=0.06) for token in range(5)] == [False, False, False, False, True]
