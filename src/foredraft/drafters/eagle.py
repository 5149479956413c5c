"""EAGLE-1 and, with trees, EAGLE-2 (Li et al., 2401.15077, 2406.16858): the head is that of ``heads.eagle``."""

from __future__ import annotations

from typing import Any

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters.base import Drafter
from foredraft.drafters.recurrent_head import build_head_drafter
from foredraft.heads.checkpoint import read_head
from foredraft.heads.eagle_format import read_eagle
from foredraft.target.forward import TargetModel


def build(speculative: SpeculativeConfig, config: EngineConfig, target: TargetModel, tokenizer: Any) -> Drafter:
    assert speculative.model is not None
    files = read_head(speculative.model, config.cache_dir)
    head = read_eagle(files, target.hidden_size, target.vocab_size, target.num_layers)
    return build_head_drafter(head, speculative, "eagle", target, tokenizer, speculative.model)
