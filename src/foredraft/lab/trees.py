"""Acceptance rules of draft trees, as references written from the papers without the engine's code.

At a node a rule either goes down to a child (the token is accepted, the walk goes on) or emits a token and
stops. The two probabilities of each token are all that the law of the output depends on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from foredraft.lab.enumeration import Emissions, Instance
from foredraft.lab.toy import Floats


@dataclass(frozen=True, slots=True)
class NodeLaw:
    """Of one node, ``[V]`` each: chance to go down to the child with this token, to emit it and stop."""

    descend: Floats
    emit: Floats


NodeRule = Callable[[Floats, Floats], NodeLaw]


def walk(instance: Instance, rule: NodeRule, *, depth: int) -> Emissions:
    """Emissions of a walk from the root down to ``depth``, where the bonus token is the target's own draw."""
    vocab_size = instance.vocab_size
    reached: Floats = np.ones(())
    emissions = []
    for i in range(depth):
        descend = np.empty((vocab_size,) * (i + 1))
        emit = np.empty((vocab_size,) * (i + 1))
        for prefix in np.ndindex(reached.shape):
            law = rule(instance.target[i][prefix], instance.draft[i][prefix])
            descend[prefix], emit[prefix] = law.descend, law.emit
        emissions.append(reached[..., None] * emit)
        reached = reached[..., None] * descend
    emissions.append(reached[..., None] * instance.target[depth])
    return tuple(emissions)


def _normalised(weights: Floats) -> Floats | None:
    total = weights.sum()
    return weights / total if total > 0.0 else None


def _without(weights: Floats, token: int) -> Floats:
    struck = weights.copy()
    struck[token] = 0.0
    return struck


def best_children(draft_probs: Floats, num_children: int) -> list[int]:
    """The drafter's most likely tokens, best first."""
    return [int(token) for token in np.argsort(-draft_probs, kind="stable")[:num_children]]


def deterministic_children(target_probs: Floats, draft_probs: Floats, *, num_children: int = 2) -> NodeLaw:
    """Children are the drafter's best tokens, tried in turn against what is left of the target.

    Child c is accepted with its probability, else struck out and the rest normalised. Source: EAGLE's
    evaluation of a tree (Li et al. 2024, arXiv 2401.15077), SpecInfer with one-hot drafts.
    """
    descend, left, remaining = np.zeros_like(target_probs), target_probs.copy(), 1.0
    for child in best_children(draft_probs, num_children):
        descend[child] = remaining * left[child]
        remaining *= 1.0 - left[child]
        rest = _normalised(_without(left, child))
        left = _without(left, child) if rest is None else rest
    return NodeLaw(descend, remaining * left)


def drawn_children(
    target_probs: Floats,
    draft_probs: Floats,
    *,
    num_children: int = 2,
    replace: bool,
    renormalise: bool = True,
) -> NodeLaw:
    """Children are drawn from the drafter, each judged by the ratio rule against the residual so far.

    Source: with replacement SpecInfer (Miao et al. 2024, arXiv 2305.09781), without Sequoia (Chen et al.
    2024, 2402.12374), whose drafter distribution loses each rejected token. ``renormalise=False`` is the
    mistake of judging such a child by the distribution before the loss.
    """
    descend, emit = np.zeros_like(target_probs), np.zeros_like(target_probs)

    def judge(left: Floats, draw: Floats | None, ratio: Floats, weight: float, num_left: int) -> None:
        if num_left == 0 or draw is None:
            emit[:] += weight * left
            return
        for child in map(int, np.flatnonzero(draw)):
            accept = min(1.0, left[child] / ratio[child])
            descend[child] += weight * draw[child] * accept
            rejected = weight * draw[child] * (1.0 - accept)
            if rejected > 0.0:
                residual = _normalised(np.maximum(left - ratio, 0.0))
                next_draw = draw if replace else _normalised(_without(draw, child))
                next_ratio = next_draw if renormalise and next_draw is not None else ratio
                judge(left if residual is None else residual, next_draw, next_ratio, rejected, num_left - 1)

    judge(target_probs, draft_probs, draft_probs, 1.0, num_children)
    return NodeLaw(descend, emit)


def tree_match(target_probs: Floats, draft_probs: Floats, *, num_children: int = 2) -> NodeLaw:
    """One draw of the target at the node; if it is a child, go down to it. All emitted tokens are draws."""
    is_child = np.zeros(len(target_probs), dtype=bool)
    is_child[best_children(draft_probs, num_children)] = True
    return NodeLaw(np.where(is_child, target_probs, 0.0), np.where(is_child, 0.0, target_probs))
