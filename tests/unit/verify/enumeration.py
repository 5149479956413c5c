"""Exact law of what a rule emits, by enumeration of all drafts: no sampling noise, float64.

A law over sequences is a list of tables: ``law[i]`` has shape ``[V] * (i + 1)`` and holds the distribution of
token i given the i tokens before it. The joint law over n tokens is a tensor of shape ``[V] * n``.

    every draft of N tokens is a row b of one batch, with the weight that the drafter gives it
    count_law(...)        -> [B, N + 1]   probability that exactly n draft tokens are accepted
    next_token_probs(...) -> [B, V]       law of the token after them
    and the target continues up to N + 1 tokens
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.verify import block, rejection

Law = list[Tensor]


@dataclass(frozen=True)
class Rule:
    """A ratio rule as the enumerator sees it; both functions take the padded inputs of `foredraft.verify`."""

    count_law: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    next_token_probs: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor], Tensor]


def leading_run_law(accept_probs: Tensor) -> Tensor:
    """``[B, N]`` acceptance probabilities -> ``[B, N + 1]`` law of `rejection.count_accepted`."""
    one = accept_probs.new_ones(len(accept_probs), 1)
    reached = torch.cat([one, accept_probs.cumprod(dim=-1)], dim=-1)
    return reached * torch.cat([1.0 - accept_probs, one], dim=-1)


def longest_pass_law(stop_probs: Tensor) -> Tensor:
    """``[B, N]`` stop probabilities -> ``[B, N + 1]`` law of `block.count_accepted`."""
    one = stop_probs.new_ones(len(stop_probs), 1)
    none_longer = torch.cat([(1.0 - stop_probs).flip(-1).cumprod(dim=-1).flip(-1), one], dim=-1)
    return none_longer * torch.cat([one, stop_probs], dim=-1)


REJECTION = Rule(lambda *inputs: leading_run_law(rejection.accept_probs(*inputs)), rejection.next_token_probs)
BLOCK = Rule(lambda *inputs: longest_pass_law(block.stop_probs(*inputs)), block.next_token_probs)


def random_law(generator: torch.Generator, vocab_size: int, length: int, allowed: Tensor | None = None) -> Law:
    """Context-dependent random tables; tokens outside ``allowed`` ``[V]`` bool have probability 0."""
    law = []
    for position in range(length):
        weights = torch.rand([vocab_size] * (position + 1), generator=generator, dtype=torch.float64) ** 2 + 0.02
        if allowed is not None:
            weights = weights * allowed
        law.append(weights / weights.sum(dim=-1, keepdim=True))
    return law


def with_zeros(generator: torch.Generator, law: Law) -> Law:
    """Each entry set to 0 with probability 1/3, but never the largest of its distribution."""
    result = []
    for table in law:
        dropped = torch.rand(table.shape, generator=generator) < 1 / 3
        kept = torch.where(dropped & (table < table.amax(dim=-1, keepdim=True)), 0.0, table)
        result.append(kept / kept.sum(dim=-1, keepdim=True))
    return result


def joint(law: Law) -> Tensor:
    """Joint law over ``len(law)`` tokens."""
    probs = law[0].new_ones(())
    for table in law:
        probs = probs[..., None] * table
    return probs


def all_drafts(vocab_size: int, length: int) -> Tensor:
    """``[V ** length, length]`` int64, in the order of a flattened joint law."""
    drafts = list(itertools.product(range(vocab_size), repeat=length))
    return torch.tensor(drafts, dtype=torch.int64).reshape(len(drafts), length)


def rows_of(law: Law, drafts: Tensor, num_rows: int) -> Tensor:
    """Row i of each draft: the law given its first i tokens. ``[B, num_rows, V]``."""
    rows = [law[i][tuple(drafts[:, j] for j in range(i))].expand(len(drafts), -1) for i in range(num_rows)]
    return torch.stack(rows, dim=1)


def accumulate(target: Law, drafts: Tensor, emissions: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Joint law over ``len(target)`` tokens of what was emitted, continued by the target.

    Args:
        emissions: for each number n of accepted tokens, the weights ``[B]`` and next-token laws ``[B, V]``.
    """
    vocab_size = len(target[0])
    total = torch.zeros([vocab_size] * len(target), dtype=torch.float64)
    for num_accepted, (weights, next_probs) in enumerate(emissions):
        emitted = torch.zeros([vocab_size] * (num_accepted + 1), dtype=torch.float64)
        contributions = weights[:, None] * next_probs
        if num_accepted == 0:
            emitted += contributions.sum(dim=0)
        else:
            prefix = tuple(drafts[:, j] for j in range(num_accepted))
            emitted.index_put_(prefix, contributions, accumulate=True)
        for table in target[num_accepted + 1 :]:
            emitted = emitted[..., None] * table
        total += emitted
    return total


def emitted_law(
    rule: Rule,
    target: Law,
    draft: Law | None,
    weights: Tensor,
    *,
    num_padding: int = 0,
    num_draft_tokens: Tensor | None = None,
) -> tuple[Tensor, float]:
    """Joint law of the emitted tokens, and the mean number of accepted draft tokens.

    Args:
        target: N + 1 tables.
        draft: N tables as told to the rule, or None for a deterministic proposal.
        weights: ``[V ** N]``, the probability with which each draft is really made.
        num_padding: so many columns of nan (and token id -1) are appended to what the rule sees.
        num_draft_tokens: ``[V ** N]``, at most N; N if not given.
    """
    length = len(target) - 1
    drafts = all_drafts(len(target[0]), length)
    if num_draft_tokens is None:
        num_draft_tokens = torch.full((len(drafts),), length)

    def pad(values: Tensor, filler: float) -> Tensor:
        shape = (values.shape[0], num_padding, *values.shape[2:])
        return torch.cat([values, values.new_full(shape, filler)], dim=1)

    inputs = (
        pad(drafts, -1),
        num_draft_tokens,
        pad(rows_of(target, drafts, length + 1), float("nan")),
        None if draft is None else pad(rows_of(draft, drafts, length), float("nan")),
    )
    count_law = rule.count_law(*inputs)
    assert count_law[:, length + 1 :].count_nonzero() == 0
    emissions = []
    for num_accepted in range(length + 1):
        possible = num_draft_tokens >= num_accepted
        counts = torch.where(possible, num_accepted, 0)
        next_probs = rule.next_token_probs(*inputs, counts)
        emissions.append((weights * count_law[:, num_accepted], next_probs))
    mean_accepted = sum(float(weight.sum()) * n for n, (weight, _) in enumerate(emissions))
    return accumulate(target, drafts, emissions), mean_accepted


def total_variation(one: Tensor, other: Tensor) -> float:
    """Half the L1 distance; also large if one of them does not sum to 1."""
    return 0.5 * float((one - other).abs().sum())
