"""Tiny heads on the last state of tiny models: EAGLE-1, MTP, MLP speculator; random, or trained for a second."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from foredraft.heads.eagle import EagleConfig, EagleHead
from foredraft.heads.mlp import MlpConfig, MlpSpeculator
from foredraft.heads.mtp import MtpConfig, MtpHead, one_layer
from foredraft.testing.heads import layer_config

KIND_OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "deepseek_v3": {
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "num_key_value_heads": 4,
    },
    "qwen3_next": {
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_5_text": {"head_dim": 16},
}
"""Of tiny decoder layers of some kinds."""


def seeded(make: Any, config: Any, seed: int = 0, scale: float = 4.0) -> Any:
    """A random head; larger weights show one token more or less in the text in what is drafted."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head: nn.Module = make(config)
    for parameter in head.parameters():
        if parameter.dim() > 1:
            parameter.data *= scale
    return head.eval().requires_grad_(False)


def eagle_head(model: Any, seed: int = 0, scale: float = 4.0, **changes: Any) -> EagleHead:
    config = EagleConfig(**{"layer": layer_config(model.config), "vocab_size": model.config.vocab_size, **changes})
    head: EagleHead = seeded(EagleHead, config, seed, scale)
    return head


def mtp_layer(model: Any, kind: str, **changes: Any) -> Any:
    """The configuration of a layer of a kind behind a model; with experts if the kind has them."""
    options = layer_config(model.config).to_dict()
    del options["model_type"], options["head_dim"]
    given = {"initializer_range": 0.1, **options, **KIND_OPTIONS[kind], **changes}
    return one_layer(kind, given, has_experts="moe_intermediate_size" in given)


def mtp_head(model: Any, kind: str = "llama", seed: int = 0, scale: float = 4.0, **changes: Any) -> MtpHead:
    head: MtpHead = seeded(MtpHead, MtpConfig(**{"layer": mtp_layer(model, kind), **changes}), seed, scale)
    return head


def mlp_speculator(model: Any, seed: int = 0, scale: float = 4.0, **changes: Any) -> MlpSpeculator:
    options = {"inner_size": 48, "vocab_size": model.config.vocab_size, "num_steps": 3, **changes}
    head: MlpSpeculator = seeded(MlpSpeculator, MlpConfig(hidden_size=model.config.hidden_size, **options), seed, scale)
    return head
