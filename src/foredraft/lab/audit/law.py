"""The target's law of each token of a finished text, computed apart from the engine that wrote the text.

The logits come from plain passes of the model over the whole text, without draft, rejection or rollback. From
there on everything is done anew, in float64 and by sorting: the filters here share no code with the sampler.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.target.forward import TargetModel
from foredraft.target.layout import PassRow
from foredraft.types import SamplingParams

Scores = NDArray[np.float64]

PASS_TOKENS = 256
ROUNDING = 1e-4
"""Logits and cumulative probabilities this close to a filter's limit may fall on either side of it."""
_FIRST_ID = -1_000_000
_LOWEST_TEMPERATURE = 1e-5
_LARGEST = 2048


@dataclass(frozen=True, slots=True)
class Noise:
    """How far the same logits differ between passes of other shapes, measured on texts of the audit.

    Attributes:
        logits: largest difference; 0 where passes of all shapes give the same bits.
        total_variation: mean distance of the laws that follow from them.
    """

    logits: float = 0.0
    total_variation: float = 0.0


def text_logits(
    target: TargetModel, token_ids: Sequence[int], num_last: int, *, width: int = PASS_TOKENS, num_copies: int = 1
) -> Scores:
    """Logits from which the last ``num_last`` tokens of a text were to be chosen, ``[num_last, V]`` float64.

    Args:
        target: may have sequences of an engine in its slots, which are left alone.
        width: tokens of a pass; the prompt goes in passes of its own.
        num_copies: so many rows with the same text share each pass.
    """
    ids = [_FIRST_ID - copy for copy in range(num_copies)]
    start = len(token_ids) - num_last - 1
    found = []
    for sequence_id in ids:
        target.slots.open(sequence_id)
    try:
        for sequence_id in ids:
            target.prefill(sequence_id, list(token_ids[:start]), PASS_TOKENS)
        for at in range(start, len(token_ids) - 1, width):
            part = list(token_ids[at : min(at + width, len(token_ids) - 1)])
            logits = target.forward([PassRow(sequence_id, part, len(part)) for sequence_id in ids])
            found.append(logits[: len(part)].to(torch.float64).cpu().numpy())
            for sequence_id in ids:
                target.slots.commit(sequence_id, len(part))
    finally:
        for sequence_id in reversed(ids):
            target.slots.close(sequence_id)
    joined: Scores = np.concatenate(found)
    return joined


def measure_noise(
    target: TargetModel,
    token_ids: Sequence[int],
    num_prompt_tokens: int,
    params: SamplingParams,
    width: int,
    stop_ids: tuple[int, ...] = (),
) -> Noise:
    """Compare one pass over a text with passes of 1 and of ``width`` tokens, alone and in a batch of 3."""
    num_last = len(token_ids) - num_prompt_tokens
    reference = text_logits(target, token_ids, num_last)
    worst, distances = 0.0, [0.0]
    for pass_width, num_copies in ((1, 1), (width, 1), (1, 3), (width, 3)):
        other = text_logits(target, token_ids, num_last, width=pass_width, num_copies=num_copies)
        difference = float(np.abs(other - reference).max())
        worst = max(worst, difference)
        if difference and not params.is_greedy:
            pairs = zip(
                token_laws(reference, token_ids, num_prompt_tokens, params, stop_ids),
                token_laws(other, token_ids, num_prompt_tokens, params, stop_ids),
                strict=True,
            )
            distances.append(float(np.mean([0.5 * np.abs(a.probs - b.probs).sum() for a, b in pairs])))
    return Noise(worst, max(distances))


@dataclass(frozen=True, slots=True)
class TokenLaw:
    """Scores ``[V]`` after all that may change an argmax, and the probabilities ``[V]`` after the filters."""

    scores: Scores
    probs: Scores
    params: SamplingParams

    def excludes(self, token: int, noise: float = 0.0) -> bool:
        """Whether a token has probability 0, and has it still if limits are shifted by rounding and ``noise``."""
        return bool(self.probs[token] == 0.0 and filtered_probs(self.scores, self.params, noise)[token] == 0.0)


def token_laws(
    logits_NV: Scores,
    token_ids: Sequence[int],
    num_prompt_tokens: int,
    params: SamplingParams,
    stop_ids: tuple[int, ...] = (),
) -> Iterator[TokenLaw]:
    """The law of each output token of a text.

    Args:
        logits_NV: ``[number of output tokens, V]``.
        stop_ids: what ``min_tokens`` bans.
    """
    prompt, output = token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:]
    for place, logits_V in enumerate(logits_NV):
        scores = adjusted_scores(logits_V, params, prompt, output[:place], stop_ids)
        yield TokenLaw(scores, filtered_probs(scores, params), params)


def adjusted_scores(
    logits_V: Scores,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Sequence[int] = (),
) -> Scores:
    """Allowed and banned tokens, bias and penalties, in the order of vLLM's sampler."""
    scores = logits_V.copy()
    if params.allowed_token_ids is not None:
        scores[np.setdiff1d(np.arange(len(scores)), params.allowed_token_ids)] = -np.inf
    scores[list(params.banned_token_ids or ())] = -np.inf
    if len(output) < params.min_tokens:
        scores[list(stop_ids)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    if params.repetition_penalty != 1.0:
        for token in {*prompt, *output}:
            factor = params.repetition_penalty if scores[token] <= 0 else 1 / params.repetition_penalty
            scores[token] *= factor
    if params.presence_penalty or params.frequency_penalty:
        for token, count in Counter(output).items():
            scores[token] -= params.presence_penalty + params.frequency_penalty * count
    return scores


def filtered_probs(scores_V: Scores, params: SamplingParams, noise: float | None = None) -> Scores:
    """Temperature, min-p, top-k, top-p and softmax; tokens that tie with a limit stay.

    Args:
        noise: loosen every limit by what this difference of logits, and rounding, could do; None: not at all.
    """
    if params.is_greedy:
        return _softmax(np.where(scores_V == scores_V.max(), 0.0, -np.inf))
    temperature = max(params.temperature, _LOWEST_TEMPERATURE)
    scaled = scores_V / temperature
    loose = 0.0 if noise is None else ROUNDING + 2.0 * noise * max(1.0, params.repetition_penalty) / temperature
    if params.min_p > 0.0:
        scaled = _keep(scaled, float(scaled.max()) + math.log(params.min_p) - loose)
    if 0 < params.top_k < len(scaled):
        scaled = _keep(scaled, float(np.partition(scaled, -params.top_k)[-params.top_k]) - loose)
    if params.top_p < 1.0:
        scaled = _keep(scaled, _nucleus_limit(scaled, params.top_p + loose) - loose)
    return _softmax(scaled)


def _keep(scaled_V: Scores, smallest: float) -> Scores:
    return np.where(scaled_V >= smallest, scaled_V, -np.inf)


def _nucleus_limit(scaled_V: Scores, top_p: float) -> float:
    """The score of the token with which the most likely ones reach ``top_p``; -inf if they never do."""
    probs = _softmax(scaled_V)
    for size in (min(_LARGEST, len(probs)), len(probs)):
        largest = np.argpartition(probs, len(probs) - size)[len(probs) - size :]
        order = largest[np.argsort(-probs[largest], kind="stable")]
        at = int(np.searchsorted(np.cumsum(probs[order]), top_p))
        if at < len(order):
            return float(scaled_V[order[at]])
    return -math.inf


def _softmax(scores_V: Scores) -> Scores:
    weights: Scores = np.exp(scores_V - scores_V.max())
    weights /= weights.sum()
    return weights
