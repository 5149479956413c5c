"""Drawing with shared Gumbel noise: the exact law of the pair (target's token, drafter's token), and a run.

The law is what the enumeration of the coupled rule needs; the run shows on keyed noise that the emitted
tokens are those of plain decoding with the same seed, whatever was drafted.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from foredraft.lab.toy import Floats, ToyLanguage
from foredraft.sampling.draw import sample_gumbel
from foredraft.sampling.noise import Stream, gumbel
from foredraft.verify import match


def gumbel_pair_law(target_probs: Floats, draft_probs: Floats) -> Floats:
    """``[V, V]``: chance that the target draws x while the drafter draws z, both with the same Gumbel noise.

    Draws are argmins of E_y / p_y and E_y / q_y over exponential E. On the diagonal this is the term of
    Moulton and Jiang (2018). Off it, with r = E_z / E_x and the other tokens integrated out,

        integral from p_z/p_x to q_z/q_x of dr / (1 + r + sum over other y of max(p_y/p_x, r q_y/q_z))^2,

    which is elementary between the points where a maximum changes sides. Rows add up to p, columns to q.
    """
    vocab_size = len(target_probs)
    law = np.zeros((vocab_size, vocab_size))
    for x in np.flatnonzero(target_probs):
        for z in np.flatnonzero(draft_probs):
            by_target, by_draft = target_probs / target_probs[x], draft_probs / draft_probs[z]
            if x == z:
                law[x, x] = 1.0 / np.maximum(by_target, by_draft).sum()
                continue
            low = by_target[z]
            high = 1.0 / by_draft[x] if by_draft[x] > 0.0 else np.inf
            if low < high:
                others = np.ones(vocab_size, dtype=bool)
                others[[x, z]] = False
                law[x, z] = _integral(by_target[others], by_draft[others], low, high)
    return law


def _integral(constants: Floats, slopes: Floats, low: float, high: float) -> float:
    """Integral over r of (1 + r + sum of max(constant, r slope))^-2, exactly, piece by piece."""
    turns = constants[slopes > 0.0] / slopes[slopes > 0.0]
    edges = [low, *sorted(turns[(turns > low) & (turns < high)]), high]
    total = 0.0
    for left, right in pairwise(edges):
        inside = 2.0 * left + 1.0 if np.isinf(right) else 0.5 * (left + right)
        rising = inside * slopes > constants
        constant, slope = 1.0 + constants[~rising].sum(), 1.0 + slopes[rising].sum()
        # (right - left) / (f(left) f(right)), written so that an infinite right edge is its limit
        at_left = constant + slope * left
        total += 1.0 / (slope * at_left) if np.isinf(right) else (right - left) / (at_left * (constant + slope * right))
    return float(total)


def plain_sequence(language: ToyLanguage, seed: int) -> list[int]:
    """Plain decoding of the toy language with the engine's keyed noise: one draw per position."""
    tokens: list[int] = []
    for position in range(language.sequence_len):
        tokens.append(_draw(language.target_probs, [language.start_token, *tokens][-1], seed, position))
    return tokens


def coupled_sequence(language: ToyLanguage, seed: int, num_draft_tokens: int) -> list[int]:
    """Speculative decoding of the toy language by the coupled rule, with the engine's noise and matching."""
    tokens: list[int] = []
    while (position := len(tokens)) < language.sequence_len:
        drafted = [[language.start_token, *tokens][-1]]
        for i in range(num_draft_tokens):
            drafted.append(_draw(language.draft_probs, drafted[i], seed, position + i))
        named = [_draw(language.target_probs, token, seed, position + i) for i, token in enumerate(drafted)]
        num_accepted = match.count_matches(
            torch.tensor([drafted[1:]], dtype=torch.int64),
            torch.tensor([num_draft_tokens]),
            torch.tensor([named]),
        )
        tokens += named[: int(num_accepted) + 1]
    return tokens[: language.sequence_len]


def _draw(probs: Floats, context: int, seed: int, position: int) -> int:
    noise = gumbel(seed, Stream.TARGET, position, probs.shape[1])
    return int(sample_gumbel(torch.from_numpy(probs[context][None]), noise[None]))
