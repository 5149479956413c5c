"""Plain decoding as it is defined: the whole text through transformers' own model for every token.

No cache, no batch, no draft; the sampling pipeline is asked for one row at a time, with the counts of penalties
made afresh from the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foredraft.sampling import SamplingRow, Stream, TokenCounts, adjust_logits, gumbel, probs_from_logits
from foredraft.types import FinishReason, SamplingParams

GREEDY_GAP = 1e-3
SAMPLED_GAP = 1e-4


@dataclass(slots=True)
class Reference:
    """Output of the reference loop.

    Attributes:
        token_ids: emitted tokens.
        finish_reason: ``stop`` or ``length``.
        smallest_gap: by which a winning score led the next one anywhere; rounding is near 1e-5.
        probs: the distribution of each token after all filters, ``[V]`` each.
        logprobs: of all tokens at each place, unfiltered, ``[V]`` each.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.LENGTH
    smallest_gap: float = float("inf")
    probs: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)


def reference(
    model: Any,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    eos_token_ids: tuple[int, ...] = (),
    max_model_len: int | None = None,
) -> Reference:
    """Decode one prompt with a transformers model; sampling needs a seed.

    Raises:
        AssertionError: two scores came so close that rounding may decide; take another seed or prompt.
    """
    assert params.is_greedy or params.seed is not None, "an unseeded draw has no reference"
    stop_ids = (*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids))
    limit = (max_model_len or int(model.config.max_position_embeddings)) - len(prompt_token_ids)
    result = Reference()
    while len(result.token_ids) < min(limit, params.max_tokens or limit):
        token = _next_token(model, prompt_token_ids, result, params, stop_ids)
        result.token_ids.append(token)
        if token in stop_ids:
            result.finish_reason = FinishReason.STOP
            break
    limit_gap = GREEDY_GAP if params.is_greedy else SAMPLED_GAP
    assert result.smallest_gap > limit_gap, f"a near-tie: {result.smallest_gap}; take another seed or prompt"
    return result


def _next_token(
    model: Any, prompt: Sequence[int], so_far: Reference, params: SamplingParams, stop_ids: tuple[int, ...]
) -> int:
    counts = TokenCounts(prompt)
    counts.append(so_far.token_ids)
    row = SamplingRow(params, num_output_tokens=len(so_far.token_ids), counts=counts, stop_ids=stop_ids)
    logits_1V = last_logits(model, [*prompt, *so_far.token_ids])[None]
    adjusted_1V = adjust_logits(logits_1V, [row])
    probs_V = probs_from_logits(adjusted_1V, [params])[0]
    so_far.probs.append(probs_V)
    so_far.logprobs.append(logits_1V[0].log_softmax(-1))
    scores_V = adjusted_1V[0].double()
    if not params.is_greedy:
        assert params.seed is not None
        position = len(prompt) + len(so_far.token_ids)
        scores_V = probs_V.double().log() + gumbel(params.seed, Stream.TARGET, position, len(probs_V))
    best = scores_V.topk(2)
    so_far.smallest_gap = min(so_far.smallest_gap, float(best.values[0] - best.values[1]))
    return int(best.indices[0])


def last_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """Logits ``[V]`` after a text, by one full pass without a cache."""
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits
    return logits[0, -1].float()


def smallest_greedy_gap(model: Any, prompt_token_ids: Sequence[int], num_tokens: int) -> float:
    """The smallest lead of the best logit on the greedy path."""
    text, smallest = list(prompt_token_ids), float("inf")
    for _ in range(num_tokens):
        best = last_logits(model, text).topk(2)
        smallest = min(smallest, float(best.values[0] - best.values[1]))
        text.append(int(best.indices[0]))
    return smallest
