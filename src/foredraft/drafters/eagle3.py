"""EAGLE-3 (Li et al., 2503.01840): the head is described in :mod:`foredraft.heads.eagle3`."""

from __future__ import annotations

from typing import Any

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters.base import Drafter
from foredraft.drafters.recurrent_head import build_head_drafter
from foredraft.heads.checkpoint import read_head
from foredraft.heads.eagle3_format import read_eagle3
from foredraft.target.forward import TargetModel


def build(speculative: SpeculativeConfig, config: EngineConfig, target: TargetModel, tokenizer: Any) -> Drafter:
    assert speculative.model is not None
    files = read_head(speculative.model, config.cache_dir)
    head = read_eagle3(files, target.hidden_size, target.vocab_size, len(target.layers))
    return build_head_drafter(head, speculative, "eagle3", target, tokenizer, speculative.model)
