"""What the decoder layers of draft heads are made of.

A layer does not know how its attention finds keys: it calls ``attend(self.self_attn, x)``. In training that is
:class:`UnrolledAttention`, over a whole text at once; in drafting the packed attention over the head's slots.
Layers that are transformers' own (:mod:`foredraft.heads.kinds`) are called by ``attend`` as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from foredraft.heads.kinds import layer_classes
from foredraft.target.storage import LayerShape

Attend = Callable[[nn.Module, Tensor], Tensor]
"""From an attention module and its input ``[..., T, input size]`` to its output ``[..., T, hidden]``."""


def rms_norm(size: int, config: Any) -> LlamaRMSNorm:
    return LlamaRMSNorm(size, eps=config.rms_norm_eps)


def rotary_table(config: Any, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[num_positions, rotated dims]`` of a layer configuration's rotary positions, float32."""
    rotary = layer_classes(config.model_type).rotary(config)
    cos, sin = rotary(torch.empty(0), torch.arange(num_positions)[None])
    return cos[0], sin[0]


class HeadAttention(nn.Module):
    """The projections of an attention layer whose input may be wider than the hidden size.

    Args:
        config: a Llama or Qwen3 configuration of transformers; Qwen3 has norms of queries and keys.
        layer_idx: which layer of the head's slots it writes.
    """

    def __init__(self, config: Any, layer_idx: int, input_size: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        bias = bool(getattr(config, "attention_bias", False))
        qkv_bias = bias or bool(getattr(config, "qkv_bias", False))
        self.q_proj = nn.Linear(input_size, self.num_heads * self.head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(input_size, self.num_kv_heads * self.head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(input_size, self.num_kv_heads * self.head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=bias)
        has_norms = config.model_type == "qwen3"
        self.q_norm = rms_norm(self.head_dim, config) if has_norms else None
        self.k_norm = rms_norm(self.head_dim, config) if has_norms else None

    @property
    def cache_shape(self) -> LayerShape:
        """Of a token's keys and values."""
        return LayerShape(self.num_kv_heads, self.head_dim, self.head_dim)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values: ``[B, heads, T, D]`` of ``x [B, T, input size]``; kv heads repeated."""
        query, key, value = (
            linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        group = self.num_heads // self.num_kv_heads
        return query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)


class DecoderLayer(nn.Module):
    """Attention and a gated MLP, each with a residual.

    Args:
        input_size: of the attention, if it is not the hidden size; there is no norm before it then.
    """

    def __init__(self, config: Any, layer_idx: int, input_size: int | None = None):
        super().__init__()
        self.self_attn = HeadAttention(config, layer_idx, input_size or config.hidden_size)
        self.mlp = Qwen3MLP(config) if config.model_type == "qwen3" else LlamaMLP(config)
        self.input_layernorm = rms_norm(config.hidden_size, config)
        self.post_attention_layernorm = rms_norm(config.hidden_size, config)
        self.packed: Callable[[Tensor, Tensor, Attend], Tensor] | None = None  # all of it at once, set by ``runner``

    def forward(self, hidden: Tensor, attend: Attend) -> Tensor:
        return self.through(hidden, self.input_layernorm(hidden), attend)

    def through(self, residual: Tensor, x: Tensor, attend: Attend) -> Tensor:
        """The layer's output from its residual stream and what its attention reads."""
        if self.packed is not None:
            return self.packed(residual, x, attend)
        hidden = residual + attend(self.self_attn, x)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class UnrolledAttention:
    """Attention in training, where a head is run several steps ahead of every place at once (training-time test).

    Row i of step j stands for the j-th draft token behind place i. It attends to the rows 0 .. i of step 0, whose
    hidden states are the target's, and to the rows i of steps 1 .. j, the tokens of its own draft::

                     keys of step 0     of steps 1, 2
        queries 0    causal
        queries 1    causal             own row
        queries 2    causal             own row, own row

    EAGLE-3 (Li et al., 2503.01840), section 3.2 and figure 6. Row i of step j has position i + j.

    Args:
        cos_sin: of :func:`rotary_table`, for as many positions as rows and steps together.
    """

    def __init__(self, cos_sin: tuple[Tensor, Tensor], num_rows: int):
        self._cos, self._sin = cos_sin
        self._num_rows = num_rows
        self.step = 0
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        positions = slice(self.step, self.step + self._num_rows)
        cos, sin = (table[positions].to(x)[None] for table in (self._cos, self._sin))
        if not isinstance(module, HeadAttention):
            whole_layer: Tensor = module(x, (cos, sin), unrolled=self)[0]
            return whole_layer
        attended = self.attend(module.layer_idx, *module.project(x, cos, sin), module.head_dim**-0.5)
        out: Tensor = module.o_proj(attended.flatten(2))
        return out

    def attend(self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Keep keys and values of this step and attend: ``[B, T, heads, D]`` from ``[B, heads, T, D]`` each."""
        keys, values = (kept.setdefault(layer_idx, []) for kept in (self._keys, self._values))
        keys.append(key)
        values.append(value)
        return _attend(query, keys, values, scale).transpose(1, 2)


def _attend(query: Tensor, keys: list[Tensor], values: list[Tensor], scale: float) -> Tensor:
    if len(keys) == 1:
        return F.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True, scale=scale)
    num_rows = query.shape[2]
    ahead = torch.ones(num_rows, num_rows, dtype=torch.bool, device=query.device).triu(1)
    causal = (query @ keys[0].transpose(2, 3)).masked_fill(ahead, float("-inf"))
    own = [(query * key).sum(-1, keepdim=True) for key in keys[1:]]
    probs = torch.softmax(torch.cat([causal, *own], -1).float() * scale, -1).to(query.dtype)
    out = probs[..., :num_rows] @ values[0]
    for at, value in enumerate(values[1:]):
        out = out + probs[..., num_rows + at, None] * value
    return out
