"""EAGLE-3 (Li et al., 2503.01840): the head is described in :mod:`foredraft.heads.eagle3`."""

from __future__ import annotations

from typing import Any

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters.base import Drafter
from foredraft.drafters.recurrent_head import make_head_drafter
from foredraft.heads.checkpoint import read_head
from foredraft.heads.convention import check_conventions
from foredraft.heads.eagle3_format import read_eagle3
from foredraft.heads.runner import HeadRunner
from foredraft.target.forward import TargetModel


def build(speculative: SpeculativeConfig, config: EngineConfig, target: TargetModel, tokenizer: Any) -> Drafter:
    assert speculative.model is not None
    files = read_head(speculative.model, config.cache_dir)
    head = read_eagle3(files, target.hidden_size, target.vocab_size, len(target.layers))
    runner = HeadRunner(head, head.config.layer, target)
    check_conventions(head, target, tokenizer, speculative.model)
    drafter = make_head_drafter(
        runner,
        head.config.feature_layers,
        target.vocab_size,
        head.token_ids,
        speculative.tree_width,
        speculative.depth_of_tree("eagle3"),
    )
    drafter.cost = runner.num_parameters / target.num_parameters
    return drafter
