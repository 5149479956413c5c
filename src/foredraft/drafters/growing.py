"""Drafting a tree level by level, from a model's logits behind the nodes of its frontier.

A level's likeliest nodes get children. If that is one, a tree is a chain with other tokens beside its own, and takes as
many passes of the draft model as the chain does.

How a node's children are made depends on the request: greedy rows take the likeliest tokens, rows under the coupled
rule those that are likeliest with the target's noise, all others draw without replacement (Sequoia, Chen et al.,
2402.12374). Of likeliest ones more are tried than fit, and the most probable paths are kept (EAGLE-2, Li et al.,
2406.16858); what was drawn is kept always, since to drop a token after seeing it would bias the output.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.drafters.autoregressive import AutoregressiveDrafter
from foredraft.drafters.base import DraftRow, tree_draft
from foredraft.drafters.tree import grow_tree
from foredraft.sampling import (
    SamplingRow,
    Stream,
    may_change_argmax,
    probs_from_logits,
    round_position,
    sample_inverse_cdf,
    uniform,
)
from foredraft.types import Draft
from foredraft.verify.tree import children_of, path_to


@dataclass(slots=True)
class Tree:
    """A tree in the making: its nodes, and those of the last level that will get children."""

    row: DraftRow
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    laws: list[Tensor | None] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [-1])

    @property
    def is_drawn(self) -> bool:
        return not self.row.sampling_row(()).params.is_greedy and self.row.rule != "coupled"

    def add(self, node: int, token: int, prob: float, law_V: Tensor | None) -> None:
        """A child of a node, -1 being the text; ``law_V`` is what it was drawn from, if it was."""
        self.token_ids.append(token)
        self.parents.append(node)
        self.probs.append(prob * (self.probs[node] if node >= 0 else 1.0))
        self.laws.append(law_V)

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


class TreeDrafter(AutoregressiveDrafter):
    """Drafts trees; a subclass says what a model finds likely behind their nodes.

    Attributes:
        width: children of a node.
        depth: levels, each a pass of the draft model.
        beam: nodes of a level that get children; None: as many as ``width``.
    """

    makes_trees = True
    width: int
    depth: int
    beam: int | None = None

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        trees = [Tree(row) for row in rows]
        growing = [tree for tree in trees if self._room(tree.row, tree.row.token_ids)]
        for tree in growing:
            self._catch_up(tree.row.sequence_id, tree.row.token_ids)
        while growing := [tree for tree in growing if tree.frontier and self._num_left(tree)]:
            if not self._run_down(growing):
                self._grow(growing)
        kept = [tree.kept() for tree in trees]
        tokens = [[tree.token_ids[i] for i in nodes] for tree, nodes in zip(trees, kept, strict=True)]
        parents = [
            [nodes.index(tree.parents[i]) if tree.parents[i] >= 0 else -1 for i in nodes]
            for tree, nodes in zip(trees, kept, strict=True)
        ]
        laws = [[law for law in tree.laws if law is not None] if tree.is_drawn else [] for tree in trees]
        return tree_draft(tokens, parents, self._stack(laws, max(map(len, tokens), default=0)) if any(laws) else None)

    def _num_left(self, tree: Tree) -> int:
        """Nodes that may still be added; what is not drawn is cut to size at the end."""
        if not self._levels_left(tree):
            return 0
        return tree.row.num_draft_tokens - len(tree.token_ids) if tree.is_drawn else self.width * self.width

    def _levels_left(self, tree: Tree) -> int:
        most = min(self.depth, self._room(tree.row, tree.row.token_ids))
        return max(0, most - max(map(len, map(tree.path, tree.frontier))))

    def _run_down(self, trees: list[Tree]) -> bool:
        """Add levels to each tree without showing their logits; False where that cannot be done."""
        return False

    def _grow(self, trees: list[Tree]) -> None:
        """One pass of the draft model, and the children of every frontier node."""
        logits = self._frontier_logits(trees)
        places = [(tree, node) for tree in trees for node in tree.frontier]
        sampling = [tree.row.sampling_row(tree.prefix(node)) for tree, node in places]
        before = {id(tree): len(tree.token_ids) for tree in trees}
        if any(may_change_argmax(place) or not place.params.is_greedy for place in sampling):
            self._add_by_law(places, sampling, logits)
        else:
            self._add_likeliest(places, logits)
        for tree in trees:
            new = range(before[id(tree)], len(tree.token_ids))
            tree.frontier = sorted(sorted(new, key=tree.probs.__getitem__, reverse=True)[: self.beam or self.width])

    def _add_likeliest(self, places: list[tuple[Tree, int]], logits: Tensor) -> None:
        """Children of greedy rows that ask for nothing: no look at the whole vocabulary."""
        best = torch.softmax(logits.float(), -1).topk(min(self.width, logits.shape[-1]))
        for (tree, node), columns, probs in zip(places, best.indices.tolist(), best.values.tolist(), strict=True):
            for column, prob in zip(columns, probs, strict=True):
                if prob > 0.0:
                    tree.add(node, self._target_token(column), prob, None)

    def _add_by_law(self, places: list[tuple[Tree, int]], sampling: list[SamplingRow], logits: Tensor) -> None:
        adjusted, is_narrow = self._adjusted(logits, sampling)
        for i, ((tree, node), place) in enumerate(zip(places, sampling, strict=True)):
            if not bool(adjusted[i].isfinite().any()):  # the draft model knows none of the tokens that are allowed
                continue
            if place.params.is_greedy:
                probs = torch.softmax(adjusted[i], -1)
            else:
                probs = probs_from_logits(adjusted[i : i + 1], [place.params])[0]
            for index, prob, law in self._children(tree, node, probs, is_narrow):
                token = self._target_token(index) if is_narrow else index
                law_V = self._over_target(law, 0.0) if is_narrow and tree.is_drawn else law
                tree.add(node, token, prob, law_V)

    def _children(self, tree: Tree, node: int, probs: Tensor, is_narrow: bool) -> Iterator[tuple[int, float, Tensor]]:
        """Columns of the children, with their probabilities and what they were drawn from."""
        row, count = tree.row, min(self.width, self._num_left(tree))
        if tree.is_drawn:
            for i in range(count):
                key = round_position(len(row.token_ids), len(tree.token_ids))
                number = torch.tensor([uniform(row.noise_seed, Stream.DRAFT, key)], dtype=torch.float64)
                index = int(sample_inverse_cdf(probs[None], number))
                yield index, float(probs[index]), probs
                rest = probs.index_fill(0, torch.tensor([index]), 0.0)
                mass = float(rest.sum(dtype=torch.float64))
                if i + 1 == count or not mass > 0.0:
                    return
                probs = rest / mass
            return
        if row.rule == "coupled":
            noise = self._noise(row, len(row.token_ids) + len(tree.path(node)), is_narrow)
            probs = torch.softmax(probs.log().double().add_(noise), -1)
        best = probs.topk(min(count, int((probs > 0).sum())))
        for index, prob in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            yield index, prob, probs

    @abstractmethod
    def _frontier_logits(self, trees: list[Tree]) -> Tensor:
        """Logits behind the frontier nodes of all trees, as :meth:`_over_target` takes them."""
