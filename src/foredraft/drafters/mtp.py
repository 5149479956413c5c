"""Multi-token prediction (DeepSeek-V3, 2412.19437): the head is described in :mod:`foredraft.heads.mtp`."""

from __future__ import annotations

from typing import Any

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters.base import Drafter
from foredraft.drafters.recurrent_head import build_head_drafter
from foredraft.heads.mtp_format import read_mtp, read_mtp_files
from foredraft.target.forward import TargetModel


def build(speculative: SpeculativeConfig, config: EngineConfig, target: TargetModel, tokenizer: Any) -> Drafter:
    """The module is that of ``speculative.model``, or the target's own."""
    name = speculative.model or config.model
    files = read_mtp_files(name, config.cache_dir)
    head = read_mtp(files, target.hidden_size, target.vocab_size, target.num_layers)
    return build_head_drafter(head, speculative, "mtp", target, tokenizer, name)
