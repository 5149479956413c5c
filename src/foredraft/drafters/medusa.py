"""Medusa (Cai et al., 2401.10774): heads that look ahead from the last state that is known, without a cache.

    text      c0 .. c(n-2) c(n-1)          the state of c(n-2) is known, and c(n-1) was emitted from it
    head i         f(n-2)  ->  draft token i + 1

A head does not know what the heads before it were taken to say, so all nodes of a level have the same law.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters.autoregressive import Chain
from foredraft.drafters.base import Drafter, DraftRow, tree_draft
from foredraft.drafters.growing import Tree, TreeDrafter
from foredraft.drafters.last_state import LastStateDrafter
from foredraft.heads.checkpoint import read_head
from foredraft.heads.medusa import MedusaHeads, read_medusa
from foredraft.heads.runner import pack
from foredraft.sampling import may_change_argmax
from foredraft.target.features import AFTER_NORM
from foredraft.target.forward import TargetModel
from foredraft.types import Draft


class MedusaDrafter(LastStateDrafter):
    """Drafts chains, as long as there are heads."""

    def __init__(self, heads: MedusaHeads, target: TargetModel):
        token_map = heads.token_map
        token_ids = None if token_map is None else token_map.to(target.device, torch.int64)
        super().__init__(target.vocab_size, token_ids, heads.config.num_heads, target.max_model_len, (AFTER_NORM,))
        packed = copy.deepcopy(heads).to(dtype=target.dtype, device=target.device).requires_grad_(False)
        pack(packed, target.native)
        self._heads = packed

    def _next_logits(self, chains: list[Chain]) -> Tensor:
        return self._run([chain.row.sequence_id for chain in chains], len(chains[0].token_ids))

    @torch.inference_mode()
    def _run(self, sequence_ids: list[int], head: int) -> Tensor:
        logits: Tensor = self._heads(torch.stack([self._last[sequence_id][1] for sequence_id in sequence_ids]), head)
        return logits


class MedusaTreeDrafter(TreeDrafter, MedusaDrafter):
    """Drafts trees: the most probable paths by the product of what the heads say.

    Heads that were saved with a measured tree (paper, section 2.3.3) use that one for greedy requests: one look at each
    head gives all of it.

    Args:
        width: children of a node, and nodes of a level that get children.
        depth: levels, at most as many as there are heads.
    """

    def __init__(self, heads: MedusaHeads, target: TargetModel, width: int, depth: int):
        super().__init__(heads, target)
        self.width, self.depth = width, min(depth, self.num_steps)
        self.max_passes = self.depth
        self._choices = [path for path in heads.config.choices if len(path) <= self.num_steps]
        self._num_ranks = 1 + max((rank for path in self._choices for rank in path), default=0)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        sampling = [row.sampling_row(()) for row in rows]
        if not self._choices or any(not s.params.is_greedy or may_change_argmax(s) for s in sampling):
            return super().propose(rows)
        tokens, parents = [], []
        for row in rows:
            depth = self._room(row, row.token_ids)
            paths = [path for path in self._choices if len(path) <= depth][: row.num_draft_tokens]
            best = self._best_tokens(row.sequence_id, max(map(len, paths), default=0))
            places = {path: i for i, path in enumerate(paths)}
            tokens.append([best[len(path) - 1][path[-1]] for path in paths])
            parents.append([places.get(path[:-1], -1) for path in paths])
        return tree_draft(tokens, parents)

    def _best_tokens(self, sequence_id: int, num_heads: int) -> list[list[int]]:
        """The likeliest tokens of the first heads, best first."""
        best = (self._run([sequence_id], head)[0].topk(self._num_ranks).indices for head in range(num_heads))
        return [[self._target_token(column) for column in columns.tolist()] for columns in best]

    def _frontier_logits(self, trees: list[Tree]) -> Tensor:
        level = len(trees[0].path(trees[0].frontier[0]))
        logits = self._run([tree.row.sequence_id for tree in trees], level)
        return logits.repeat_interleave(torch.tensor([len(tree.frontier) for tree in trees], device=logits.device), 0)


def build(speculative: SpeculativeConfig, config: EngineConfig, target: TargetModel, tokenizer: Any) -> Drafter:
    assert speculative.model is not None
    heads = read_medusa(read_head(speculative.model, config.cache_dir), target.hidden_size, target.vocab_size)
    drafter: MedusaDrafter
    if speculative.tree_width == 1:
        drafter = MedusaDrafter(heads, target)
    else:
        drafter = MedusaTreeDrafter(heads, target, speculative.tree_width, speculative.depth_of_tree("medusa"))
    num_parameters = sum(parameter.numel() for parameter in heads.parameters())
    drafter.cost = num_parameters / heads.config.num_heads / target.num_parameters
    return drafter
