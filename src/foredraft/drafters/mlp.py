"""The MLP speculator (Wertheimer et al., 2404.19124): the head is described in :mod:`foredraft.heads.mlp`.

text      c0 .. c(n-2) c(n-1)
states        f(n-2) --c(n-1)--> s0 --d1--> s1 --d2--> s2      s0 says what follows c(n-1), s1 what follows d1
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
from foredraft.heads.convention import check_conventions
from foredraft.heads.mlp import MlpSpeculator, read_mlp
from foredraft.heads.runner import pack
from foredraft.target.forward import TargetModel


class MlpDrafter(LastStateDrafter):
    """Drafts chains, as long as the speculator has steps."""

    def __init__(self, speculator: MlpSpeculator, target: TargetModel):
        config = speculator.config
        super().__init__(target.vocab_size, None, config.num_steps, target.max_model_len, config.feature_layers)
        packed = copy.deepcopy(speculator).to(dtype=target.dtype, device=target.device).requires_grad_(False)
        pack(packed, target.native)
        self._speculator = packed
        self._states: dict[tuple[int, int], Tensor] = {}  # behind each node of each draft in the making, -1 the text

    def forget(self, sequence_id: int) -> None:
        super().forget(sequence_id)
        self._states = {}

    def _next_logits(self, chains: list[Chain]) -> Tensor:
        step = len(chains[0].token_ids)
        nodes = [(chain.row.sequence_id, step - 1, step - 2) for chain in chains]
        return self._run(step, nodes, [(chain.token_ids or chain.text)[-1] for chain in chains])

    @torch.inference_mode()
    def _run(self, step: int, nodes: list[tuple[int, int, int]], token_ids: list[int]) -> Tensor:
        """Logits behind nodes ``(sequence, node, parent)`` of one depth, given with their tokens."""
        if step == 0:
            self._states = {}
            before = self._speculator.begin(torch.stack([self._last[sequence][1] for sequence, _, _ in nodes]))
        else:
            before = torch.stack([self._states[sequence, parent] for sequence, _, parent in nodes])
        states = self._speculator.step(before, torch.tensor(token_ids, device=before.device), step)
        self._states |= {(sequence, node): states[i] for i, (sequence, node, _) in enumerate(nodes)}
        return self._speculator.logits(states, step)


class MlpTreeDrafter(TreeDrafter, MlpDrafter):
    """Drafts trees.

    Args:
        width: children of a node, and nodes of a level that get children.
        depth: levels, at most as many as the speculator has steps.
    """

    def __init__(self, speculator: MlpSpeculator, target: TargetModel, width: int, depth: int):
        super().__init__(speculator, target)
        self.width, self.depth = width, min(depth, self.num_steps)
        self.max_passes = self.depth

    def _frontier_logits(self, trees: list[Tree]) -> Tensor:
        step = len(trees[0].path(trees[0].frontier[0]))
        nodes: list[tuple[int, int, int]] = []
        token_ids: list[int] = []
        for tree in trees:
            for node in tree.frontier:
                nodes.append((tree.row.sequence_id, node, tree.parents[node] if node >= 0 else -1))
                token_ids.append(tree.token_ids[node] if node >= 0 else tree.row.token_ids[-1])
        return self._run(step, nodes, token_ids)


def build(speculative: SpeculativeConfig, config: EngineConfig, target: TargetModel, tokenizer: Any) -> Drafter:
    assert speculative.model is not None
    files = read_head(speculative.model, config.cache_dir)
    speculator = read_mlp(files, target.hidden_size, target.vocab_size, target.num_layers)
    check_conventions(speculator, target, tokenizer, speculative.model)
    drafter: MlpDrafter
    if speculative.tree_width == 1:
        drafter = MlpDrafter(speculator, target)
    else:
        drafter = MlpTreeDrafter(speculator, target, speculative.tree_width, speculative.depth_of_tree("mlp"))
    parts = speculator.proj[-1], speculator.head[-1]
    drafter.cost = sum(parameter.numel() for part in parts for parameter in part.parameters()) / target.num_parameters
    return drafter
