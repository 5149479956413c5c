"""A smaller language model drafts a tree, level by level.

Each level is one pass of the draft model over the nodes that lead to its frontier. How a node's children are made
depends on the request: greedy rows take the likeliest tokens, rows under the coupled rule those that are likeliest
with the target's noise, all others draw without replacement (Sequoia, Chen et al., 2402.12374). Of likeliest ones more
are tried than fit, and the most probable paths are kept (EAGLE-2, Li et al., 2406.16858); what was drawn is kept
always, since to drop a token after seeing it would bias the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.drafters.base import DraftRow, tree_draft
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.tree import grow_tree
from foredraft.errors import IncompatibleDrafterError
from foredraft.sampling import (
    Stream,
    adjust_logits,
    gumbel,
    probs_from_logits,
    round_position,
    sample_inverse_cdf,
    uniform,
)
from foredraft.target.forward import TargetModel
from foredraft.target.kinds import describe
from foredraft.target.layout import PassRow
from foredraft.types import Draft
from foredraft.verify.tree import children_of, path_to


@dataclass(slots=True)
class _Tree:
    """A tree in the making: its nodes, and those of the last level that will get children."""

    row: DraftRow
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [-1])

    @property
    def is_drawn(self) -> bool:
        return not self.row.sampling_row(()).params.is_greedy and self.row.rule != "coupled"

    def path(self, node: int) -> list[int]:
        return path_to(node, self.parents)

    def prefix(self, node: int) -> tuple[int, ...]:
        return tuple(self.token_ids[i] for i in self.path(node))

    def kept(self) -> list[int]:
        """The nodes to propose: all that were drawn, the most probable of the others."""
        if self.is_drawn:
            return list(range(len(self.token_ids)))
        children = children_of(self.parents)

        def expand(node: int) -> Iterator[tuple[int, float, int]]:
            above = self.probs[node] if node >= 0 else 1.0
            for child in children.get(node, ()) if above > 0.0 else ():
                yield self.token_ids[child], self.probs[child] / above, child

        return grow_tree(-1, expand, self.row.num_draft_tokens).states


class DraftTreeDrafter(DraftModelDrafter):
    """Drafts trees with a second model of the same vocabulary.

    Args:
        width: children of a node, and nodes of a level that get children.
        depth: levels, each a pass of the draft model.

    Raises:
        IncompatibleDrafterError: the draft model can be fed chains only.
    """

    makes_trees = True

    def __init__(self, model: TargetModel, vocab_size: int, width: int, depth: int):
        if not model.supports_trees:
            raise IncompatibleDrafterError(
                f"{describe(model.model)} keeps a state that cannot branch, so it cannot draft trees; use tree_width=1"
            )
        super().__init__(model, vocab_size)
        self.width, self.depth = width, depth

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        trees = [_Tree(row) for row in rows]
        growing = [tree for tree in trees if self._room(tree.row, tree.row.token_ids)]
        for tree in growing:
            self._catch_up(tree.row.sequence_id, tree.row.token_ids)
        for _ in range(self.depth):
            growing = [tree for tree in growing if tree.frontier and self._num_left(tree)]
            if growing:
                self._grow(growing)
        kept = [tree.kept() for tree in trees]
        tokens = [[tree.token_ids[i] for i in nodes] for tree, nodes in zip(trees, kept, strict=True)]
        parents = [
            [nodes.index(tree.parents[i]) if tree.parents[i] >= 0 else -1 for i in nodes]
            for tree, nodes in zip(trees, kept, strict=True)
        ]
        laws = [tree.laws if tree.is_drawn else [] for tree in trees]
        return tree_draft(tokens, parents, self._stack(laws, max(map(len, tokens), default=0)) if any(laws) else None)

    def _num_left(self, tree: _Tree) -> int:
        """Nodes that may still be added; what is not drawn is cut to size at the end."""
        if max(map(len, map(tree.path, tree.frontier))) >= self._room(tree.row, tree.row.token_ids):
            return 0
        return tree.row.num_draft_tokens - len(tree.token_ids) if tree.is_drawn else self.width * self.width

    def _grow(self, trees: list[_Tree]) -> None:
        """One pass of the draft model, and the children of every frontier node."""
        logits = self._frontier_logits(trees)
        places = [(tree, node) for tree in trees for node in tree.frontier]
        sampling = [tree.row.sampling_row(tree.prefix(node)) for tree, node in places]
        adjusted = adjust_logits(logits, sampling)
        probs = [
            torch.softmax(adjusted[i].float(), -1)
            if place.params.is_greedy
            else probs_from_logits(adjusted[i : i + 1], [place.params])[0]
            for i, place in enumerate(sampling)
        ]
        before = {id(tree): len(tree.token_ids) for tree in trees}
        for (tree, node), adjusted_V, probs_V in zip(places, adjusted, probs, strict=True):
            if bool(adjusted_V.isfinite().any()):  # else the draft model knows none of the tokens that are allowed
                self._add_children(tree, node, probs_V)
        for tree in trees:
            new = range(before[id(tree)], len(tree.token_ids))
            tree.frontier = sorted(sorted(new, key=tree.probs.__getitem__, reverse=True)[: self.width])

    def _add_children(self, tree: _Tree, node: int, probs_V: Tensor) -> None:
        above = tree.probs[node] if node >= 0 else 1.0
        for token, prob, law_V in self._children(tree, node, probs_V):
            tree.token_ids.append(token)
            tree.parents.append(node)
            tree.probs.append(above * prob)
            tree.laws.append(law_V)

    def _children(self, tree: _Tree, node: int, probs_V: Tensor) -> Iterator[tuple[int, float, Tensor]]:
        row, count = tree.row, min(self.width, self._num_left(tree))
        if tree.is_drawn:
            for i in range(count):
                key = round_position(len(row.token_ids), len(tree.token_ids))
                number = torch.tensor([uniform(row.noise_seed, Stream.DRAFT, key)], dtype=torch.float64)
                token = int(sample_inverse_cdf(probs_V[None], number))
                yield token, float(probs_V[token]), probs_V
                rest_V = probs_V.index_fill(0, torch.tensor([token]), 0.0)
                mass = float(rest_V.sum(dtype=torch.float64))
                if i + 1 == count or not mass > 0.0:
                    return
                probs_V = rest_V / mass
            return
        if row.rule == "coupled":
            position = len(row.token_ids) + len(tree.path(node))
            noise = gumbel(row.noise_seed, Stream.TARGET, position, self.vocab_size)
            probs_V = torch.softmax(probs_V.log().double().add_(noise), -1)
        best = probs_V.topk(min(count, int((probs_V > 0).sum())))
        for token, prob in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            yield token, prob, probs_V

    def _frontier_logits(self, trees: list[_Tree]) -> Tensor:
        """Feed each row's new text and the nodes down to its frontier; the text is committed, the nodes are not."""
        passes = []
        for tree in trees:
            nodes = sorted({i for node in tree.frontier for i in tree.path(node)})
            text = tree.row.token_ids[len(self._fed[tree.row.sequence_id]) :]
            parents = [nodes.index(tree.parents[i]) if tree.parents[i] >= 0 else -1 for i in nodes]
            tokens = text + [tree.token_ids[i] for i in nodes]
            passes.append(PassRow(tree.row.sequence_id, tokens, len(tree.frontier), parents))
        logits = self.model.forward(passes)
        for tree in trees:
            fed = self._fed[tree.row.sequence_id]
            text = tree.row.token_ids[len(fed) :]
            self.model.slots.commit(tree.row.sequence_id, len(text))
            fed += text
        return self._fit(logits)
