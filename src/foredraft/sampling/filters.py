"""Filters on one row of logits, ``logits_V`` ``[V]`` float32: pure functions, none changes its argument.

Meaning and order are those of vLLM's sampler (`vllm/v1/sample`): allowed, banned, logit bias, penalties |
argmax for greedy | temperature, min-p, top-k, top-p. min-p, top-k and top-p each come down to the smallest
logit that stays, and tokens that tie with it stay too: a filter never separates tokens of equal probability,
and no result depends on a sort's order of equals. (vLLM: the same for min-p and top-k; at top-p its unstable
sort picks among ties.)

One row at a time, because then a row's bits cannot depend on its neighbours, and because it is faster on a
CPU: the temporaries of a row stay with the allocator, those of a batch are mapped and unmapped by the kernel
in each call (min-p on 8 x 49,152 logits: 0.4 against 2 ms).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_NEVER = float("-inf")
_LOWEST_TEMPERATURE = 1e-5
_SORTED_WIDTH = 64


def keep_allowed(logits_V: Tensor, token_ids: Sequence[int]) -> Tensor:
    """Set everything but the given ids to -inf."""
    index = torch.tensor(token_ids, dtype=torch.int64, device=logits_V.device)
    return torch.full_like(logits_V, _NEVER).index_copy_(0, index, logits_V[index])


def ban_tokens(logits_V: Tensor, token_ids: Sequence[int]) -> Tensor:
    """Set the given ids to -inf."""
    index = torch.tensor(token_ids, dtype=torch.int64, device=logits_V.device)
    return logits_V.index_fill(0, index, _NEVER)


def add_logit_bias(logits_V: Tensor, token_ids: Sequence[int], bias: Sequence[float]) -> Tensor:
    """Add ``bias[i]`` to the logit of ``token_ids[i]`` (distinct)."""
    index = torch.tensor(token_ids, dtype=torch.int64, device=logits_V.device)
    return logits_V.index_add(0, index, logits_V.new_tensor(bias))


def apply_repetition_penalty(logits_V: Tensor, seen_ids: Tensor, penalty: float) -> Tensor:
    """Divide positive and multiply other logits by the penalty (Keskar et al., 1909.05858, section 4.1).

    Args:
        seen_ids: int64, the tokens of prompt and output; a token given twice is penalised once.
    """
    old = logits_V[seen_ids]
    return logits_V.index_copy(0, seen_ids, torch.where(old > 0, old / penalty, old * penalty))


def apply_output_penalties(
    logits_V: Tensor, output_ids: Tensor, output_counts: Tensor, presence: float, frequency: float
) -> Tensor:
    """Subtract frequency * count and presence (as in the OpenAI API) from tokens of the output.

    Args:
        output_ids: int64, the distinct tokens of the output.
        output_counts: int64, how often each occurs in it.
    """
    new = logits_V[output_ids] - frequency * output_counts - presence
    return logits_V.index_copy(0, output_ids, new)


def apply_temperature(logits_V: Tensor, temperature: float) -> Tensor:
    """Divide by the temperature; one below 1e-5 counts as 1e-5, so that float32 cannot overflow."""
    return logits_V / max(temperature, _LOWEST_TEMPERATURE)


def apply_min_p(logits_V: Tensor, min_p: float) -> Tensor:
    """Drop tokens less likely than min_p times the most likely one (Nguyen et al., 2407.01082); min_p > 0."""
    return keep_at_least(logits_V, float(logits_V.amax()) + math.log(min_p))


def apply_top_k(logits_V: Tensor, top_k: int) -> Tensor:
    """Keep the k > 0 most likely tokens and those that tie with the k-th."""
    if top_k >= len(logits_V):
        return logits_V
    return keep_at_least(logits_V, float(logits_V.topk(top_k).values[-1]))


def apply_top_p(logits_V: Tensor, top_p: float) -> Tensor:
    """Keep the most likely tokens until their probability reaches top_p, and those that tie with the last.

    At least one token stays ("nucleus", Holtzman et al., 1904.09751). Probabilities are those of the logits
    given, that is, renormalised after an earlier filter. Only the 64 largest are sorted; a larger nucleus is
    found by bisection.
    """
    probs_V = logits_V.softmax(dim=-1)
    largest = logits_V.topk(min(_SORTED_WIDTH, len(logits_V)))
    mass = probs_V[largest.indices].cumsum(dim=-1, dtype=torch.float64)
    num_short = int((mass < top_p).sum())
    if num_short < len(mass):
        return keep_at_least(logits_V, float(largest.values[num_short]))
    floor = _bisect_nucleus(probs_V, top_p)
    if floor == 0.0:
        return logits_V
    return keep_at_least(logits_V, float(logits_V[probs_V == floor].amin()))


def keep_at_least(logits_V: Tensor, smallest: float) -> Tensor:
    """Set the logits below ``smallest`` to -inf. (`torch.threshold` is 20 times as fast as a mask.)"""
    just_below = np.nextafter(np.float32(smallest), np.float32(_NEVER))
    return torch.threshold(logits_V, float(just_below), _NEVER)


def _bisect_nucleus(probs_V: Tensor, top_p: float) -> float:
    """The largest float32 t with sum(probs >= t) >= top_p; 0 if rounding leaves the whole sum below top_p.

    Non-negative floats are ordered like their bit patterns, so at most 31 sums do (0.3 ms for 49,152 tokens,
    against 3.7 ms for a sort).
    """
    reaches, falls_short = 0, int(probs_V.amax().view(torch.int32)) + 1
    while falls_short - reaches > 1:
        middle = (reaches + falls_short) // 2
        if float(torch.threshold(probs_V, _float_of_bits(middle - 1), 0.0).sum()) >= top_p:
            reaches = middle
        else:
            falls_short = middle
    return _float_of_bits(reaches)


def _float_of_bits(bits: int) -> float:
    return float(np.int32(bits).view(np.float32))
