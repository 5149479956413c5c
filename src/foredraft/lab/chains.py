"""Acceptance rules of draft chains, enumerated through the engine's own functions in :mod:`foredraft.verify`.

Every draft that can be drawn is one row of a batch, with its probability as weight. The uniforms of the ratio
rules are enumerated too: a test passes or fails, so two values of each suffice, 0 and 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.lab.coupling import gumbel_pair_law
from foredraft.lab.enumeration import Emissions, Instance
from foredraft.lab.toy import Floats
from foredraft.verify import block, match, rejection, typical

TYPICAL_THRESHOLD, TYPICAL_ALPHA = 0.09, 0.3


@dataclass(frozen=True, slots=True)
class Drafts:
    """All D = V^k drafts of an instance as a batch for the rules, and how likely each is.

    ``token_ids [D, k]`` (first token slowest), ``num_draft_tokens [D]``, ``target_probs [D, k + 1, V]`` and
    ``draft_probs [D, k, V]`` or None are as in :mod:`foredraft.verify.rejection`, in float64; the chances of
    the drafts are ``weights [D]``.
    """

    token_ids: Tensor
    num_draft_tokens: Tensor
    target_probs: Tensor
    draft_probs: Tensor | None
    weights: Floats


@dataclass(frozen=True, slots=True)
class RatioRule:
    """A rule that tests draft tokens with uniforms.

    Its functions give the pass probabilities ``[D, k]``, how many tokens are accepted given those and the
    uniforms, and the next token's law ``[D, V]`` given how many were.
    """

    pass_probs: Callable[[Drafts], Tensor]
    count_accepted: Callable[[Tensor, Tensor], Tensor]
    next_token_probs: Callable[[Drafts, Tensor], Tensor]


REJECTION = RatioRule(
    lambda d: rejection.accept_probs(d.token_ids, d.num_draft_tokens, d.target_probs, d.draft_probs),
    rejection.count_accepted,
    lambda d, n: rejection.next_token_probs(d.token_ids, d.num_draft_tokens, d.target_probs, d.draft_probs, n),
)
BLOCK = RatioRule(
    lambda d: block.stop_probs(d.token_ids, d.num_draft_tokens, d.target_probs, d.draft_probs),
    block.count_accepted,
    lambda d, n: block.next_token_probs(d.token_ids, d.num_draft_tokens, d.target_probs, d.draft_probs, n),
)
TYPICAL = RatioRule(
    lambda d: typical.accept_probs(d.token_ids, d.num_draft_tokens, d.target_probs, TYPICAL_THRESHOLD, TYPICAL_ALPHA),
    rejection.count_accepted,
    lambda d, n: typical.next_token_probs(d.target_probs, n),
)
# The mistake of drawing from the target after a rejection: what was over-drafted gets a second chance.
WRONG_FALLBACK = replace(REJECTION, next_token_probs=TYPICAL.next_token_probs)


def every_draft(instance: Instance) -> Drafts:
    """Drafts drawn from the drafter's distributions."""
    vocab_size, k = instance.vocab_size, instance.num_draft_tokens
    paths = np.array(list(itertools.product(range(vocab_size), repeat=k)), dtype=np.int64).reshape(-1, k)
    prefixes = [tuple(paths[:, :i].T) for i in range(k + 1)]
    target_probs = np.stack(
        [np.broadcast_to(instance.target[i][prefixes[i]], (len(paths), vocab_size)) for i in range(k + 1)], 1
    )
    weights = np.ones(len(paths))
    draft_probs = np.zeros((len(paths), k, vocab_size))
    for i in range(k):
        draft_probs[:, i] = instance.draft[i][prefixes[i]]
        weights = weights * instance.draft[i][prefixes[i + 1]]
    return Drafts(
        token_ids=torch.from_numpy(paths),
        num_draft_tokens=torch.full((len(paths),), k),
        target_probs=torch.from_numpy(target_probs),
        draft_probs=torch.from_numpy(draft_probs),
        weights=weights,
    )


def greedy_draft(instance: Instance, *, keep_probs: bool) -> Drafts:
    """The drafter's most likely tokens, always.

    ``keep_probs`` leaves its distributions in, which is a mistake: the tokens were not drawn from them.
    """
    drafts = every_draft(instance)
    assert drafts.draft_probs is not None
    is_best = drafts.draft_probs.argmax(dim=-1) == drafts.token_ids
    weights = is_best.all(dim=-1).double().numpy()
    return replace(drafts, weights=weights, draft_probs=drafts.draft_probs if keep_probs else None)


def cut_drafts(instance: Instance, *, threshold: float, keep_unsure: bool) -> Drafts:
    """Drafts that end at the first token whose own draft probability is below ``threshold``.

    With ``keep_unsure`` that token is still part of the draft; without, the draft's length depends on the
    very token that it drops, which biases the output.
    """
    drafts = every_draft(instance)
    assert drafts.draft_probs is not None
    own_probs = drafts.draft_probs.gather(-1, drafts.token_ids[..., None]).squeeze(-1)
    num_sure = rejection.leading_run(own_probs >= threshold)
    lengths = torch.minimum(num_sure + int(keep_unsure), drafts.num_draft_tokens)
    return replace(drafts, num_draft_tokens=lengths)


def stop_law(rule: RatioRule, drafts: Drafts) -> Floats:
    """``[D, k + 1]``: chance that a draft's first i tokens and no more are accepted."""
    pass_probs = rule.pass_probs(drafts)
    num_drafts, k = pass_probs.shape
    law = np.zeros((num_drafts, k + 1))
    for failures in itertools.product((0.0, 1.0), repeat=k):
        uniforms = torch.tensor(failures, dtype=torch.float64).expand(num_drafts, k)
        chances = torch.where(uniforms == 0.0, pass_probs, 1.0 - pass_probs).prod(dim=-1)
        law[np.arange(num_drafts), rule.count_accepted(pass_probs, uniforms).numpy()] += chances.numpy()
    return law


def next_token_laws(rule: RatioRule, drafts: Drafts) -> Floats:
    """``[D, k + 1, V]``: law of the token that follows i accepted ones."""
    num_drafts, k = drafts.token_ids.shape
    lengths = [torch.full((num_drafts,), num_accepted) for num_accepted in range(k + 1)]
    laws = [rule.next_token_probs(drafts, torch.minimum(n, drafts.num_draft_tokens)) for n in lengths]
    return torch.stack(laws, dim=1).numpy()


def ratio_emissions(rule: RatioRule, drafts: Drafts) -> Emissions:
    """What a round of a ratio rule emits."""
    k, vocab_size = drafts.token_ids.shape[1], drafts.target_probs.shape[-1]
    joint = (drafts.weights[:, None] * stop_law(rule, drafts))[..., None] * next_token_laws(rule, drafts)
    return tuple(
        joint[:, i].reshape(vocab_size**i, -1, vocab_size).sum(axis=1).reshape((vocab_size,) * (i + 1))
        for i in range(k + 1)
    )


def match_emissions(instance: Instance, *, coupled: bool) -> Emissions:
    """What a round emits that accepts on equality, over all pairs of a draft and the target's own tokens.

    The two are drawn independently, or ``coupled``, with the same Gumbel noise at each position.
    """
    vocab_size, k = instance.vocab_size, instance.num_draft_tokens
    drafts = every_draft(instance)
    drafted = np.repeat(drafts.token_ids.numpy(), vocab_size ** (k + 1), axis=0)
    named = np.array(list(itertools.product(range(vocab_size), repeat=k + 1)) * len(drafts.weights), dtype=np.int64)
    weights = np.ones(len(named))
    for i in range(k):
        pair_law = _pair_laws(instance.target[i], instance.draft[i], coupled=coupled)
        weights *= pair_law[(*drafted[:, :i].T, named[:, i], drafted[:, i])]
    weights *= instance.target[k][(*drafted.T, named[:, k])]
    num_accepted = match.count_matches(
        torch.from_numpy(drafted), torch.full((len(named),), k), torch.from_numpy(named)
    ).numpy()
    return tuple(_sum_by_tokens(named, weights * (num_accepted == i), i + 1, vocab_size) for i in range(k + 1))


def _pair_laws(target: Floats, draft: Floats, *, coupled: bool) -> Floats:
    """``[V] * i + [V, V]``: chance of (target's token, drafter's token) after each prefix."""
    if not coupled:
        return target[..., :, None] * draft[..., None, :]
    laws = np.empty((*target.shape, target.shape[-1]))
    for prefix in np.ndindex(target.shape[:-1]):
        laws[prefix] = gumbel_pair_law(target[prefix], draft[prefix])
    return laws


def _sum_by_tokens(tokens: NDArray[np.int64], weights: Floats, length: int, vocab_size: int) -> Floats:
    sums = np.zeros((vocab_size,) * length)
    np.add.at(sums, tuple(tokens[:, :length].T), weights)
    return sums
