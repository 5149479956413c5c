"""The one builder of draft trees: best first by path probability, within a budget of nodes.

A child is never more probable than its parent, so the nodes taken are the most probable ones of all that could be
reached, and every prefix of the list is a tree (EAGLE-2, Li et al., 2406.16858, section 4; DDTree).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

State = TypeVar("State")


@dataclass(slots=True)
class DraftTree(Generic[State]):
    """Nodes in the order in which they were taken, parents before children.

    Attributes:
        probs: of the path from the root to each node.
        states: what the expansion gave with each node.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    states: list[State] = field(default_factory=list)

    def first(self, count: int) -> DraftTree[State]:
        """The tree of the nodes that were taken first."""
        return DraftTree(self.token_ids[:count], self.parents[:count], self.probs[:count], self.states[:count])

    @property
    def expected_len(self) -> float:
        """Expected number of accepted tokens, if the path probabilities are right."""
        return sum(self.probs)


def grow_tree(
    root: State,
    expand: Callable[[State], Iterable[tuple[int, float, State]]],
    max_nodes: int,
    *,
    min_prob: float = 0.0,
) -> DraftTree[State]:
    """Grow a tree from ``root``.

    Args:
        expand: gives the children of a node: token, probability given the node, and the child's state. The tokens
            of siblings differ.
        max_nodes: of the tree, the root not counted.
        min_prob: paths below this probability are left out.
    """
    tree = DraftTree[State]()
    order = itertools.count()  # of equally probable paths the one found first
    frontier: list[tuple[float, int, int, int, State]] = []

    def push(parent: int, prob: float, state: State) -> None:
        for token, child_prob, child in expand(state):
            if prob * child_prob >= min_prob:
                heapq.heappush(frontier, (-prob * child_prob, next(order), token, parent, child))

    if max_nodes > 0:
        push(-1, 1.0, root)
    while frontier and len(tree.token_ids) < max_nodes:
        cost, _, token, parent, state = heapq.heappop(frontier)
        tree.token_ids.append(token)
        tree.parents.append(parent)
        tree.probs.append(-cost)
        tree.states.append(state)
        if len(tree.token_ids) < max_nodes:
            push(len(tree.token_ids) - 1, -cost, state)
    return tree
