"""Trees of drafts: the walk from the root down, for targets that name a token and for ratio rules.

A node's children were made in one of three ways; the walk judges them in the order of their indices:

* deterministic (``draft_probs`` None): child x is accepted with what is left of the target's probability of x, else
  x is struck out and the rest normalised (EAGLE, Li et al., 2401.15077; SpecInfer with one-hot drafts).
* drawn, with or without replacement: child x, drawn from q, is accepted with min(1, left(x) / q(x)), else what is
  left becomes norm(max(left - q, 0)). With replacement every sibling has the same q (SpecInfer, Miao et al.,
  2305.09781, algorithm 2); without, the q of a sibling is the drafter's law with the earlier ones struck out and
  normalised, for that is what it was drawn from (Sequoia, Chen et al., 2402.12374, algorithm 2).

Each child's own law is therefore all that the walk needs to know, and the emitted tokens have the target's law. On
a chain it is token-by-token rejection sampling. Nodes are numbered 0 .. N-1, parents before children; -1 is the root,
the last committed token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from foredraft.verify.rejection import row_sums


def children_of(parents: Sequence[int]) -> dict[int, list[int]]:
    """The children of each node that has any, in ascending order."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    return children


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """The nodes from a child of the root down to ``node``; empty for the root."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def match_path(
    token_ids: Sequence[int], parents: Sequence[int], target_token: Callable[[int, int], int]
) -> tuple[list[int], int]:
    """Go down while the target's own token is a child; greedy, coupled and sample-and-match trees (`match`).

    Args:
        target_token: of a node and its depth (-1 and 0 for the root) gives the token that the target puts behind it;
            asked once a node.

    Returns:
        the accepted nodes, and the token that follows them.
    """
    children, node, path = children_of(parents), -1, list[int]()
    while True:
        token = target_token(node, len(path))
        found = next((child for child in children.get(node, ()) if token_ids[child] == token), None)
        if found is None:
            return path, token
        node = found
        path.append(node)


def rejection_path(
    token_ids: Sequence[int],
    parents: Sequence[int],
    target_probs: Callable[[int], Tensor],
    draft_probs: Tensor | None,
    uniforms: Sequence[float],
) -> tuple[list[int], Tensor]:
    """Go down by recursive rejection sampling.

    Args:
        target_probs: of a node (-1 for the root) gives the target's law ``[V]`` behind it; asked once a node.
        draft_probs: ``[N, V]`` that each node was drawn from, or None for deterministic children.
        uniforms: one independent number in (0, 1) per node.

    Returns:
        the accepted nodes, and the law ``[V]`` of the token that follows them.
    """
    children, path = children_of(parents), list[int]()
    left_V = target_probs(-1)
    while True:
        for child in children.get(path[-1] if path else -1, ()):
            token = token_ids[child]
            draft_V = None if draft_probs is None else draft_probs[child]
            drafted = 1.0 if draft_V is None else float(draft_V[token])
            if uniforms[child] < (float(left_V[token]) / drafted if drafted > 0.0 else 0.0):
                path.append(child)
                left_V = target_probs(child)
                break
            left_V = _residual(left_V, token, draft_V)
        else:
            return path, left_V


def _residual(left_V: Tensor, token: int, draft_V: Tensor | None) -> Tensor:
    """What is left of the target after a rejection; the same as before if nothing is, which only rounding can do."""
    if draft_V is None:
        residual_V = left_V.clone()
        residual_V[token] = 0.0
    else:
        residual_V = (left_V - draft_V).clamp_(min=0.0)
    mass = row_sums(residual_V[None])
    return residual_V / mass if float(mass) > 0.0 else left_V


def longest_path(parents: Sequence[int], passed: Sequence[bool]) -> list[int]:
    """The longest path of nodes that all passed, the first of several (LOSSY, for `typical`)."""
    longest: list[int] = []
    paths: dict[int, list[int]] = {-1: []}
    for node, parent in enumerate(parents):
        if passed[node] and parent in paths:
            paths[node] = [*paths[parent], node]
            if len(paths[node]) > len(longest):
                longest = paths[node]
    return longest
