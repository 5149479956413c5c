"""Decoder layers of transformers that heads are made of: classes by kind, and one layer as a module of a head."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from foredraft.errors import UnsupportedModelError
from foredraft.target.storage import LayerShape

UNROLLED_NAME = "foredraft-unrolled"
"""transformers' attention of this name is that of ``layers.UnrolledAttention``."""
PREFIXES = {
    "deepseek_v3": "DeepseekV3",
    "glm4_moe": "Glm4Moe",
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_5_moe_text": "Qwen3_5Moe",
    "qwen3_5_text": "Qwen3_5",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
}


@dataclass(frozen=True, slots=True)
class LayerClasses:
    """Of transformers: a decoder layer ``(config, index)``, a norm ``(size, eps=)``, rotary positions ``(config)``."""

    layer: Any
    norm: Any
    rotary: Any


def layer_classes(kind: str) -> LayerClasses:
    """The classes of a ``model_type``.

    Raises:
        UnsupportedModelError: heads of this kind are not known.
    """
    if kind not in PREFIXES:
        raise UnsupportedModelError(
            f"heads with decoder layers of the kind {kind!r} are not known; known are {', '.join(PREFIXES)}"
        )
    name, prefix = kind.removesuffix("_text"), PREFIXES[kind]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    rotary = f"{prefix}TextRotaryEmbedding" if kind.endswith("_text") else f"{prefix}RotaryEmbedding"
    return LayerClasses(*(getattr(module, found) for found in (f"{prefix}DecoderLayer", f"{prefix}RMSNorm", rotary)))


class ModelLayer(nn.Module):
    """A decoder layer as the models of a kind have it, experts and latent attention included.

    Its attention is called by the name in ``config``: :data:`UNROLLED_NAME`, until ``runner`` sets the target's.

    Args:
        config: of the kind, for one layer of full attention; it is used by this layer alone.
    """

    def __init__(self, config: Any):
        super().__init__()
        AttentionInterface.register(UNROLLED_NAME, _attend_unrolled)
        self.config = config
        config._attn_implementation, config._experts_implementation = UNROLLED_NAME, "eager"
        self.inner = layer_classes(config.model_type).layer(config, 0)
        for parameter in self.inner.parameters():
            if parameter.dim() > 1:  # some are left as the memory was
                nn.init.normal_(parameter, 0.0, config.initializer_range)

    @property
    def cache_shape(self) -> LayerShape:
        """Of a token's keys and values."""
        config = self.config
        if getattr(config, "kv_lora_rank", None):
            return LayerShape(config.num_attention_heads, config.qk_head_dim, config.v_head_dim)
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return LayerShape(config.num_key_value_heads, dim, dim)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], **options: Any) -> tuple[Tensor, None]:
        """``[B, T, hidden]`` in and out; ``options`` reach the attention function."""
        return self.inner(x, position_embeddings=rotary, **options), None


def _attend_unrolled(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, *, unrolled: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attention in the signature of transformers' functions, by ``layers.UnrolledAttention``."""
    group = query.shape[1] // key.shape[1]
    key, value = (torch.repeat_interleave(part, group, 1) for part in (key, value))
    return unrolled.attend(module.layer_idx, query, key, value, options["scaling"]), None
