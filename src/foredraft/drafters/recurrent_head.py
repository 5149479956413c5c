"""Heads that draft from the target's hidden states and then from their own: EAGLE and its kin, chains and trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foredraft.config import SpeculativeConfig
from foredraft.drafters.autoregressive import AutoregressiveDrafter, Chain, takes_highest
from foredraft.drafters.base import DraftRow
from foredraft.drafters.growing import Tree, TreeDrafter
from foredraft.drafters.head_cache import HeadCache, Nodes
from foredraft.heads.convention import check_conventions
from foredraft.heads.eagle import EagleHead
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.mtp import MtpHead
from foredraft.heads.native_chain import Noises
from foredraft.heads.runner import HeadRunner
from foredraft.target.forward import TargetModel
from foredraft.types import Draft


class HeadDrafter(AutoregressiveDrafter):
    """Drafts chains.

    A row drafts once the states of all of its text but the last token have come; the step that ends a prompt drafts
    nothing.

    Args:
        feature_layers: whose states the head reads.
        vocab_size: of the target.
        token_ids: the target's token of each id that the head drafts; None if they are the same.
    """

    def __init__(
        self, runner: HeadRunner, feature_layers: tuple[int, ...], vocab_size: int, token_ids: Tensor | None = None
    ):
        super().__init__(vocab_size, token_ids)
        self.feature_layers = feature_layers
        self.cache = HeadCache(runner)
        self._max_len, self._num_columns = runner.slots.max_len, vocab_size if token_ids is None else len(token_ids)

    def observe_features(self, sequence_id: int, token_ids: list[int], start: int, features: Tensor) -> None:
        self.cache.add(sequence_id, token_ids, start, features)

    def forget(self, sequence_id: int) -> None:
        self.cache.forget(sequence_id)

    def num_unread(self, row: DraftRow) -> int:
        return self.cache.num_waiting(row.sequence_id)

    def _room(self, row: DraftRow, text: list[int]) -> int:
        known = self.cache.num_known(row.sequence_id)
        if not known or known != len(text) - 1:
            return 0
        return max(0, min(row.num_draft_tokens, self._max_len - len(text)))

    def _catch_up(self, sequence_id: int, text: list[int]) -> None:
        """What waits is fed with the draft's first pass, of all rows at once."""

    def _next_logits(self, chains: list[Chain]) -> Tensor:
        if not chains[0].token_ids:
            return self.cache.read([(chain.row.sequence_id, chain.text) for chain in chains])
        parents = list(range(-1, len(chains[0].token_ids) - 1))
        return self.cache.extend([Nodes(c.row.sequence_id, c.token_ids[-1:], parents, [0]) for c in chains])

    def _run_on(self, chains: list[Chain], num_steps: int) -> bool:
        if self.cache.runner.chain is None:
            return False
        noises = self._noises([(chain.row, len(chain.token_ids)) for chain in chains], num_steps)
        if chains[0].token_ids:
            drafts = [(chain.row.sequence_id, chain.token_ids) for chain in chains]
            found = self.cache.follow(drafts, num_steps, noises=noises)
        else:
            texts = [(chain.row.sequence_id, chain.text) for chain in chains]
            found = self.cache.begin(texts, num_steps, noises=noises)
        for chain, each in zip(chains, found, strict=True):
            chain.token_ids += [token for ((token, _),) in each]
        return True

    def _noises(self, rows: Sequence[tuple[DraftRow, int]], num_steps: int) -> Noises | None:
        """What makes scores of the logits behind so many draft tokens of each row; None if all rows are greedy."""
        if all(row.sampling_row(()).params.is_greedy for row, _ in rows):
            return None
        noises: dict[int, tuple[float, Tensor]] = {}
        for row, num_before in rows:
            params, first = row.sampling_row(()).params, len(row.token_ids) + num_before
            if params.is_greedy:
                noises[row.sequence_id] = 1.0, torch.zeros(num_steps, self._num_columns)
            else:
                noise = [self._noise(row, first + i, True) for i in range(num_steps)]
                noises[row.sequence_id] = 1.0 / params.temperature, torch.stack(noise)
        return noises


class HeadTreeDrafter(TreeDrafter, HeadDrafter):
    """Drafts trees: EAGLE-2's dynamic ones (Li et al., 2406.16858, section 4) where likeliest children are taken.

    Each level feeds the frontier's nodes only; those above are in the cache.

    Args:
        width: children of a node.
        depth: levels, each a pass of the head.
        beam: nodes of a level that get children.
    """

    def __init__(
        self,
        runner: HeadRunner,
        feature_layers: tuple[int, ...],
        vocab_size: int,
        token_ids: Tensor | None,
        width: int,
        depth: int,
        beam: int,
    ):
        super().__init__(runner, feature_layers, vocab_size, token_ids)
        self.width, self.depth, self.beam, self.max_passes = width, depth, beam, depth
        self._fed: dict[int, list[int]] = {}  # nodes in the order in which they were fed, while a tree grows
        self._last: dict[int, list[int]] = {}  # those of the last pass

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        draft = super().propose(rows)
        self._fed.clear()
        self._last.clear()
        return draft

    def _run_down(self, trees: list[Tree]) -> bool:
        """Of trees that are chains with other tokens beside them, where those with the highest scores are wanted."""
        chain = self.cache.runner.chain
        if self.beam != 1 or chain is None or not all(takes_highest(tree.row) for tree in trees):
            return False
        num_levels, num_best = min(map(self._levels_left, trees)), min(self.width, chain.entry.draft_vocab)
        noises = self._noises([(tree.row, len(tree.path(tree.frontier[0]))) for tree in trees], num_levels)
        if trees[0].token_ids:
            drafts = [(tree.row.sequence_id, list(tree.prefix(tree.frontier[0]))) for tree in trees]
            found = self.cache.follow(drafts, num_levels, num_best, noises)
        else:
            texts = [(tree.row.sequence_id, tree.row.token_ids) for tree in trees]
            found = self.cache.begin(texts, num_levels, num_best, noises)
        for tree, each in zip(trees, found, strict=True):
            for best in each:
                node, tree.frontier = tree.frontier[0], [len(tree.token_ids)]
                for token, prob in best:
                    tree.add(node, token, prob, None)
        return True

    def _frontier_logits(self, trees: list[Tree]) -> Tensor:
        ids = [tree.row.sequence_id for tree in trees]
        if trees[0].frontier == [-1]:
            self._fed = {sequence_id: [] for sequence_id in ids}
            self._last = {sequence_id: [-1] for sequence_id in ids}
            return self.cache.read([(tree.row.sequence_id, tree.row.token_ids) for tree in trees])
        drafts = []
        for sequence_id, tree in zip(ids, trees, strict=True):
            fed, last = self._fed[sequence_id], self._last[sequence_id]
            sources = [last.index(tree.parents[node]) for node in tree.frontier]
            fed += tree.frontier
            parents = [fed.index(tree.parents[node]) if tree.parents[node] >= 0 else -1 for node in fed]
            drafts.append(Nodes(sequence_id, [tree.token_ids[node] for node in tree.frontier], parents, sources))
            self._last[sequence_id] = tree.frontier
        return self.cache.extend(drafts)


def make_head_drafter(
    runner: HeadRunner,
    feature_layers: tuple[int, ...],
    vocab_size: int,
    token_ids: Tensor | None,
    width: int,
    depth: int,
    beam: int | None = None,
) -> HeadDrafter:
    """Chains for width 1, else trees of so many levels; see :class:`HeadTreeDrafter`."""
    if token_ids is not None and torch.equal(token_ids, torch.arange(vocab_size)):
        token_ids = None
    if width == 1:
        return HeadDrafter(runner, feature_layers, vocab_size, token_ids)
    return HeadTreeDrafter(runner, feature_layers, vocab_size, token_ids, width, depth, beam or width)


def build_head_drafter(
    head: Eagle3Head | EagleHead | MtpHead,
    speculative: SpeculativeConfig,
    method: str,
    target: TargetModel,
    tokenizer: Any,
    name: str,
) -> HeadDrafter:
    """The drafter of a head that was read from ``name``, its conventions checked."""
    runner = HeadRunner(head, head.config.layer, target)
    check_conventions(head, target, tokenizer, name)
    drafter = make_head_drafter(
        runner,
        head.config.feature_layers,
        target.vocab_size,
        head.token_ids if isinstance(head, Eagle3Head) else None,
        speculative.tree_width,
        speculative.depth_of_tree(method),
        speculative.tree_beam,
    )
    drafter.cost = runner.num_parameters / target.num_parameters
    return drafter
