"""Medusa (Cai et al., 2401.10774): heads that look ahead from the last state that is known, without a cache.

    text      c0 .. c(n-2) c(n-1)          the state of c(n-2) is known, and c(n-1) was emitted from it
    head i         f(n-2)  ->  draft token i + 1

A head does not know what the heads before it were taken to say, so all nodes of a level have the same law.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters.autoregressive import Chain
from foredraft.drafters.base import Drafter
from foredraft.drafters.growing import Tree, TreeDrafter
from foredraft.drafters.last_state import LastStateDrafter
from foredraft.heads.checkpoint import read_head
from foredraft.heads.medusa import MedusaHeads, read_medusa
from foredraft.heads.runner import pack
from foredraft.target.features import AFTER_NORM
from foredraft.target.forward import TargetModel


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

    Args:
        width: children of a node, and nodes of a level that get children.
        depth: levels, at most as many as there are heads.
    """

    def __init__(self, heads: MedusaHeads, target: TargetModel, width: int, depth: int):
        super().__init__(heads, target)
        self.width, self.depth = width, min(depth, self.num_steps)

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
