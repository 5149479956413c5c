"""A head packed for drafting: its layers over slots of its own, as fast as the target's."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from foredraft.heads.kinds import ModelLayer
from foredraft.heads.layers import DecoderLayer, HeadAttention, rotary_table
from foredraft.heads.native_chain import NativeChain
from foredraft.heads.recurrent import LmHead, RecurrentHead
from foredraft.target.attention import ATTENTION_NAME
from foredraft.target.forward import TargetModel
from foredraft.target.layers import Arena, LayerEntry, layer_entry, run_layers
from foredraft.target.layout import PassLayout, PassRow, build_layout
from foredraft.target.packed import PackedAttention, PackedGatedMLP, PackedLinear, PackedRMSNorm
from foredraft.target.slots import KVSlots


class HeadRunner:
    """Runs a recurrent head over rows of tokens and states.

    Args:
        head: its module; it is copied.
        layer: configuration of its decoder layers.
        target: whose kernels, device, embeddings and, if the head has none, lm_head are used.

    Attributes:
        slots: keys and values of rows that read the target's states; a row's place is that of its state in the text.
        logits: from what :meth:`forward` gave to the lm_head's ``[T, draft vocabulary]``.
        chain: drafts the likeliest tokens in one call; None for a head that cannot.
        num_parameters: read a step.
    """

    def __init__(self, head: nn.Module, layer: Any, target: TargetModel):
        packed = copy.deepcopy(head).to(dtype=target.dtype, device=target.device).requires_grad_(False).eval()
        own = getattr(packed, "embed_tokens", None)
        any_target: Any = target.model
        self.embeddings: Tensor = (own or any_target.get_input_embeddings()).weight.detach()
        self.num_parameters = sum(p.numel() for name, p in packed.named_parameters() if "embed_tokens" not in name)
        shapes = [module.cache_shape for module in packed.modules() if isinstance(module, HeadAttention | ModelLayer)]
        self.slots = KVSlots(shapes, target.dtype, target.device, target.max_model_len)
        cos, sin = rotary_table(layer, target.max_model_len)
        self._cos, self._sin = (table.to(target.device, target.dtype) for table in (cos, sin))
        pack(packed, target.native)
        arena = Arena()
        for module in packed.modules():
            if isinstance(module, DecoderLayer):
                module.packed = PackedHeadLayer.of(module, arena)
        self.head = cast(RecurrentHead, packed)
        self.logits: LmHead = getattr(packed, "logits", None) or self._target_logits
        if not hasattr(packed, "logits"):
            self.num_parameters += target.vocab_size * target.hidden_size
        self.chain = NativeChain.of(packed, target.native, self.embeddings, (self._cos, self._sin))
        self._target = target

    def lay_out(self, rows: Sequence[PassRow], hidden: Tensor) -> tuple[PassLayout, Tensor]:
        """The layout of rows in the order of their slots, and their states, filled up where it fills up tokens."""
        layout = build_layout(rows, self.slots, self._target.shape, self._target.native)
        filling = layout.token_ids.shape[1] - len(hidden)
        return layout, torch.cat([hidden, hidden[-1:].expand(filling, -1)]) if filling else hidden

    def forward(self, rows: Sequence[PassRow], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """One pass over rows in the order of their slots, with a state ``[T, hidden]`` for each of their tokens.

        Writes keys and values at and past the committed lengths; changes no length.

        Returns:
            the states to feed back and those that :attr:`logits` reads, ``[T, hidden]`` each.
        """
        layout, padded = self.lay_out(rows, hidden)
        rotary = F.embedding(layout.positions, self._cos), F.embedding(layout.positions, self._sin)
        attend = SlotAttention(layout, rotary)
        back, normed = self.head.step(F.embedding(layout.token_ids, self.embeddings), padded[None], attend)
        return back[0, : len(hidden)], normed[0, : len(hidden)]

    def _target_logits(self, normed: Tensor) -> Tensor:
        model: Any = self._target.model
        logits: Tensor = model.get_output_embeddings()(normed)
        return logits[..., : self._target.vocab_size]


@dataclass(frozen=True, slots=True)
class SlotAttention:
    """Attention of a head's layers over its slots."""

    layout: PassLayout
    rotary: tuple[Tensor, Tensor]

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = module(x, self.rotary, layout=self.layout)[0]
        return out


@dataclass(frozen=True, slots=True)
class PackedHeadLayer:
    """A head's layer behind its input in one native call; the bits are those of its modules."""

    entry: LayerEntry
    arena: Arena

    @classmethod
    def of(cls, layer: DecoderLayer, arena: Arena) -> PackedHeadLayer | None:
        """None if a module of the layer has no native kernel."""
        attention, norm, mlp = (cast(Any, m) for m in (layer.self_attn, layer.post_attention_layernorm, layer.mlp))
        entry = layer_entry(attention, norm, mlp)
        return None if entry is None else cls(entry, arena)

    def __call__(self, residual: Tensor, x: Tensor, attend: Any) -> Tensor:  # a SlotAttention
        width = self.entry.width
        return run_layers(self.entry, 1, width, self.arena, residual, attend.layout, attend.rotary, x.contiguous())


def pack(module: nn.Module, native: ctypes.CDLL | None) -> None:
    """Replace a head's modules by packed ones, in place."""
    if isinstance(module, ModelLayer):
        module.config._attn_implementation = ATTENTION_NAME
    for name, child in list(module.named_children()):
        packed = _packed(child, native)
        if packed is None:
            pack(child, native)
        else:
            setattr(module, name, packed)


def _packed(child: nn.Module, native: ctypes.CDLL | None) -> nn.Module | None:
    if isinstance(child, LlamaRMSNorm):
        return PackedRMSNorm(child.weight, child.variance_epsilon, native)
    if isinstance(child, LlamaMLP | Qwen3MLP):
        gate_up = _linear(native, child.gate_proj, child.up_proj)
        return PackedGatedMLP(gate_up, _linear(native, child.down_proj), child.act_fn, native)
    if isinstance(child, HeadAttention):
        q_norm, k_norm = (None if n is None else _packed(n, native) for n in (child.q_norm, child.k_norm))
        qkv = _linear(native, child.q_proj, child.k_proj, child.v_proj)
        out, dim = _linear(native, child.o_proj), child.head_dim
        heads = child.num_heads, child.num_kv_heads, dim
        return PackedAttention(child.layer_idx, qkv, out, *heads, dim**-0.5, None, q_norm, k_norm)
    return _linear(native, child) if isinstance(child, nn.Linear) else None


def _linear(native: ctypes.CDLL | None, *linears: nn.Linear) -> PackedLinear:
    return PackedLinear([m.weight for m in linears], [m.bias for m in linears], native)
