"""The one pipeline from logits to probabilities, for target and draft model alike.

    logits [M, V] -> adjust_logits -> (argmax) -> probs_from_logits -> probabilities [M, V] float32
                     all that can change an argmax    temperature, min-p, top-k, top-p, softmax

Each row has its own hypothetical prefix: the draft tokens that it assumes accepted count as output for
penalties and for ``min_tokens``. Without a filter the whole pipeline is one softmax. A row's bits do not
depend on what its neighbours ask for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foredraft.errors import RequestError
from foredraft.sampling import filters
from foredraft.sampling.draw import most_likely_tokens
from foredraft.types import SamplingParams


class TokenCounts:
    """What penalties need to know of one sequence: the tokens of its prompt, the counts of its output.

    Made only for a request for which :func:`needs_counts` holds. Only :meth:`append` changes it; looking
    ahead along a draft does not. ``prompt_ids`` holds the distinct ids of the prompt, int64.
    """

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        self.prompt_ids = _int64(set(prompt_token_ids))
        self._output: Counter[int] = Counter()

    def append(self, token_ids: Iterable[int]) -> None:
        """Count tokens that were committed to the output."""
        self._output.update(token_ids)

    def output_counts(self, draft_prefix: Iterable[int] = ()) -> Counter[int]:
        """Occurrences in the output, as if ``draft_prefix`` had been committed. A new counter."""
        counts = self._output.copy()
        counts.update(draft_prefix)
        return counts


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What one row of logits needs to know of its sequence.

    Attributes:
        params: of the request.
        num_output_tokens: emitted before this row's token, the hypothetical prefix included.
        counts: committed tokens; needed exactly if :func:`needs_counts` holds for ``params``.
        draft_prefix: the draft tokens that are hypothetically before this row.
        stop_ids: end and stop tokens, banned while ``num_output_tokens < params.min_tokens``.
    """

    params: SamplingParams
    num_output_tokens: int = 0
    counts: TokenCounts | None = None
    draft_prefix: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()


def needs_counts(params: SamplingParams) -> bool:
    """Whether the request uses a penalty, so that its sequence needs :class:`TokenCounts`."""
    return params.repetition_penalty != 1.0 or bool(params.presence_penalty or params.frequency_penalty)


def check_token_ids(params: SamplingParams, stop_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse, at admission, options under which a row could not be computed.

    Raises:
        RequestError: a token id is outside the vocabulary, a bias is not finite, or no token could ever be
            emitted because all allowed ones are banned (by ``banned_token_ids``, or before ``min_tokens``).
    """
    bias = params.logit_bias or {}
    for name, token_ids in (
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("banned_token_ids", params.banned_token_ids or ()),
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", tuple(bias)),
    ):
        outside = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
        if outside:
            raise RequestError(f"{name} has token id {outside[0]}; the vocabulary ends at {vocab_size - 1}")
    for token_id, value in bias.items():
        if not math.isfinite(value):
            raise RequestError(f"logit_bias of token {token_id} is {value}; use a finite number or a ban")
    banned = {*(params.banned_token_ids or ()), *(stop_ids if params.min_tokens else ())}
    allowed = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    if all(token_id in banned for token_id in allowed):
        raise RequestError(
            f"no token can be emitted: all {len(allowed)} allowed token ids are banned by banned_token_ids "
            f"or, before min_tokens={params.min_tokens}, as stop tokens; allow one more"
        )


def adjust_logits(logits_MV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Apply everything that may change an argmax: allowed, banned, min_tokens, logit bias, penalties.

    Args:
        logits_MV: ``[M, V]``, any floating dtype; not modified.
        rows: M of them; their options have passed :func:`check_token_ids`.

    Returns:
        ``[M, V]`` float32; the very input if it is float32 and no row asks for anything.
    """
    assert len(rows) == len(logits_MV)
    float_MV = logits_MV.float()
    asking = [index for index, row in enumerate(rows) if may_change_argmax(row)]
    if not asking:
        return float_MV
    adjusted_MV = float_MV.clone()
    for index in asking:
        adjusted_MV[index] = _adjust_row(float_MV[index], rows[index])
    return adjusted_MV


def probs_from_logits(adjusted_MV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Temperature, min-p, top-k, top-p and softmax; a greedy row is the one-hot of its argmax.

    Args:
        adjusted_MV: ``[M, V]`` float32 from :func:`adjust_logits`; not modified.
        params: M of them.

    Returns:
        ``[M, V]`` float32, rows sum to 1.
    """
    assert len(params) == len(adjusted_MV)
    if not any(_changes_softmax(param) for param in params):
        return adjusted_MV.softmax(dim=-1)
    greedy = [row for row, param in enumerate(params) if param.is_greedy]
    probs_MV = torch.zeros_like(adjusted_MV)
    if greedy:
        probs_MV[greedy, most_likely_tokens(adjusted_MV[greedy])] = 1.0
    for row, param in enumerate(params):
        if not param.is_greedy:
            probs_MV[row] = _filter_row(adjusted_MV[row], param).softmax(dim=-1)
    return probs_MV


def may_change_argmax(row: SamplingRow) -> bool:
    """Whether :func:`adjust_logits` does anything to the logits of this row."""
    params = row.params
    return bool(
        params.allowed_token_ids is not None
        or params.banned_token_ids
        or row.num_output_tokens < params.min_tokens
        or params.logit_bias
        or needs_counts(params)
    )


def _adjust_row(logits_V: Tensor, row: SamplingRow) -> Tensor:
    params = row.params
    if params.allowed_token_ids is not None:
        logits_V = filters.keep_allowed(logits_V, params.allowed_token_ids)
    if params.banned_token_ids:
        logits_V = filters.ban_tokens(logits_V, params.banned_token_ids)
    if row.num_output_tokens < params.min_tokens:
        logits_V = filters.ban_tokens(logits_V, row.stop_ids)
    if params.logit_bias:
        logits_V = filters.add_logit_bias(logits_V, list(params.logit_bias.keys()), list(params.logit_bias.values()))
    if needs_counts(params):
        assert row.counts is not None, "a row with a penalty needs TokenCounts"
        counts = row.counts.output_counts(row.draft_prefix)
        output_ids = _int64(counts.keys()).to(logits_V.device)
        output_counts = _int64(counts.values()).to(logits_V.device)
        seen_ids = torch.cat([row.counts.prompt_ids.to(logits_V.device), output_ids])
        logits_V = filters.apply_repetition_penalty(logits_V, seen_ids, params.repetition_penalty)
        logits_V = filters.apply_output_penalties(
            logits_V, output_ids, output_counts, params.presence_penalty, params.frequency_penalty
        )
    return logits_V


def has_filters(params: SamplingParams) -> bool:
    """Whether some tokens are left out by their probability: min-p, top-k, top-p."""
    return params.min_p > 0.0 or params.top_k > 0 or params.top_p < 1.0


def _changes_softmax(params: SamplingParams) -> bool:
    return params.temperature != 1.0 or has_filters(params)


def _filter_row(logits_V: Tensor, params: SamplingParams) -> Tensor:
    if params.temperature != 1.0:
        logits_V = filters.apply_temperature(logits_V, params.temperature)
    if params.min_p > 0.0:
        logits_V = filters.apply_min_p(logits_V, params.min_p)
    if params.top_k > 0:
        logits_V = filters.apply_top_k(logits_V, params.top_k)
    if params.top_p < 1.0:
        logits_V = filters.apply_top_p(logits_V, params.top_p)
    return logits_V


def _int64(values: Collection[int]) -> Tensor:
    """As a tensor; several times as fast as ``torch.tensor(list)`` for long ones."""
    return torch.from_numpy(np.fromiter(values, dtype=np.int64, count=len(values)))
