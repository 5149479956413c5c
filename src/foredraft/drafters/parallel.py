"""Drafting all tokens from one pass, which gives a law for each of the next places: PARD and DFlash.

A place's law depends on the text and on nothing that was drafted before it, so each token is drawn from its own law
alone and the ratio rules hold with that law as q. A tree takes its nodes from the same laws (DDTree, 2604.12989).
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from foredraft.config import SpeculativeConfig
from foredraft.drafters.autoregressive import AutoregressiveDrafter, Chain
from foredraft.drafters.base import DraftRow
from foredraft.drafters.growing import Tree, TreeDrafter
from foredraft.drafters.tree import grow_tree
from foredraft.sampling import SamplingRow, Stream, adjust_logits, gumbel, may_change_argmax, probs_from_logits
from foredraft.types import Draft

logger = logging.getLogger(__name__)


class ParallelDrafter(AutoregressiveDrafter):
    """Drafts chains; a subclass runs the pass."""

    max_passes = 1

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._laws: dict[int, Tensor] = {}  # logits of the next places of each sequence, while a draft is made

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        draft = super().propose(rows)
        self._laws.clear()
        return draft

    def _next_logits(self, chains: list[Chain]) -> Tensor:
        place = len(chains[0].token_ids)
        if not place:
            self._look_ahead([chain.row for chain in chains])
        return torch.stack([self._laws[chain.row.sequence_id][place] for chain in chains])

    def _look_ahead(self, rows: list[DraftRow]) -> None:
        counts = [self._room(row, row.token_ids) for row in rows]
        parts = self._run(rows, counts).split(counts)
        self._laws = {row.sequence_id: part for row, part in zip(rows, parts, strict=True)}

    @abstractmethod
    def _run(self, rows: list[DraftRow], counts: list[int]) -> Tensor:
        """Logits of the next places, so many of each row, row after row, as :meth:`_over_target` takes them."""


class ParallelTreeDrafter(ParallelDrafter, TreeDrafter):
    """Drafts trees: the most probable paths by the product of the laws; what is drawn, grows level by level.

    Attributes:
        width: children of a node.
        depth: levels, at most as many as the pass gives places.
    """

    def _grow(self, trees: list[Tree]) -> None:
        if trees[0].frontier == [-1]:
            self._look_ahead([tree.row for tree in trees])
        drawn = [tree for tree in trees if tree.is_drawn]
        if drawn:
            super()._grow(drawn)
        for tree in trees:
            if not tree.is_drawn:
                self._take_likeliest(tree)

    def _frontier_logits(self, trees: list[Tree]) -> Tensor:
        place = len(trees[0].path(trees[0].frontier[0]))
        laws = torch.stack([self._laws[tree.row.sequence_id][place] for tree in trees])
        counts = torch.tensor([len(tree.frontier) for tree in trees], device=laws.device)
        return laws.repeat_interleave(counts, 0)

    def _take_likeliest(self, tree: Tree) -> None:
        """The whole tree at once, best first."""
        row, laws = tree.row, self._laws[tree.row.sequence_id]
        root: tuple[int, ...] = ()
        known: dict[int, list[tuple[int, float]]] = {}  # of places whose law is the same behind every prefix

        def expand(prefix: tuple[int, ...]) -> Iterator[tuple[int, float, tuple[int, ...]]]:
            place = len(prefix)
            if place >= min(len(laws), self.depth):
                return
            sampling = row.sampling_row(prefix)
            if may_change_argmax(sampling):
                children = self._likeliest(row, sampling, laws, place)
            else:
                if place not in known:
                    known[place] = self._likeliest(row, sampling, laws, place)
                children = known[place]
            for token, prob in children:
                yield token, prob, (*prefix, token)

        grown = grow_tree(root, expand, row.num_draft_tokens)
        tree.token_ids, tree.parents, tree.probs = grown.token_ids, grown.parents, grown.probs
        tree.laws, tree.frontier = [None] * len(grown.token_ids), []

    def _likeliest(self, row: DraftRow, sampling: SamplingRow, laws: Tensor, place: int) -> list[tuple[int, float]]:
        """Tokens and probabilities of the children of a node; under the coupled rule those that the noise prefers."""
        logits, params = laws[place : place + 1], sampling.params
        if params.is_greedy and not may_change_argmax(sampling):  # no look at the whole vocabulary
            best = torch.softmax(logits[0].float(), -1).topk(min(self.width, logits.shape[-1]))
            tokens = [self._target_token(column) for column in best.indices.tolist()]
            return [(token, prob) for token, prob in zip(tokens, best.values.tolist(), strict=True) if prob > 0.0]
        adjusted = adjust_logits(self._over_target(logits), [sampling])
        if not bool(adjusted.isfinite().any()):
            return []
        if params.is_greedy:
            probs_V = torch.softmax(adjusted[0].float(), -1)
        else:
            probs_V = probs_from_logits(adjusted, [params])[0]
            noise = gumbel(row.noise_seed, Stream.TARGET, len(row.token_ids) + place, self.vocab_size)
            probs_V = torch.softmax(probs_V.log().double().add_(noise), -1)
        best = probs_V.topk(min(self.width, int((probs_V > 0).sum())))
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def places_of_draft(speculative: SpeculativeConfig, method: str, trained: int | None) -> int:
    """Places that a pass looks ahead: as many as are wanted, and not more than were trained.

    Args:
        trained: None if the checkpoint does not say.
    """
    wanted = speculative.draft_limit(method)
    asked = speculative.num_speculative_tokens
    if speculative.tree_width > 1:
        wanted, asked = speculative.tree_depth or wanted, speculative.tree_depth
    if trained is None or wanted <= trained:
        return wanted
    if asked is not None:
        name = "num_speculative_tokens" if speculative.tree_width == 1 else "tree_depth"
        logger.warning(
            "%s=%d is above the %d tokens that %s was trained to look ahead; %d are drafted",
            name, asked, trained, speculative.model, trained,
        )  # fmt: skip
    return trained
