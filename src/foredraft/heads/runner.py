"""A head packed for drafting: its layers over slots of its own, as fast as the target's."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from foredraft.heads.layers import Attend, HeadAttention, rotary_table
from foredraft.target.forward import TargetModel
from foredraft.target.layout import PassRow, build_layout
from foredraft.target.packed import PackedAttention, PackedGatedMLP, PackedLinear, PackedRMSNorm
from foredraft.target.slots import KVSlots
from foredraft.target.storage import LayerShape


class RecurrentHead(Protocol):
    """A head that drafts token by token from its own states; shapes as in ``heads.eagle3``."""

    def combine(self, features: Tensor) -> Tensor: ...
    def step(self, embeddings: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]: ...
    def logits(self, normed: Tensor) -> Tensor: ...


class HeadRunner:
    """Runs a recurrent head over rows of tokens and states.

    Args:
        head: its module; it is copied.
        layer: configuration of its decoder layers.
        target: whose kernels, device and embeddings are used.

    Attributes:
        slots: keys and values of rows that read the target's states; a row's place is that of its state in the text.
        num_parameters: read a step.
    """

    def __init__(self, head: nn.Module, layer: Any, target: TargetModel):
        packed = copy.deepcopy(head).to(dtype=target.dtype, device=target.device).requires_grad_(False).eval()
        own = getattr(packed, "embed_tokens", None)
        any_target: Any = target.model
        self.embeddings: Tensor = (own or any_target.get_input_embeddings()).weight.detach()
        self.num_parameters = sum(p.numel() for name, p in packed.named_parameters() if "embed_tokens" not in name)
        attentions = [module for module in packed.modules() if isinstance(module, HeadAttention)]
        shapes = [LayerShape(module.num_kv_heads, module.head_dim, module.head_dim) for module in attentions]
        self.slots = KVSlots(shapes, target.dtype, target.device, target.max_model_len)
        cos, sin = rotary_table(layer, target.max_model_len)
        self._cos, self._sin = (table.to(target.device, target.dtype) for table in (cos, sin))
        pack(packed, target.native)
        self.head = cast(RecurrentHead, packed)
        self._target = target

    def forward(self, rows: Sequence[PassRow], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """One pass over rows in the order of their slots, with a state ``[T, hidden]`` for each of their tokens.

        Writes keys and values at and past the committed lengths; changes no length.

        Returns:
            the states to feed back and those that ``head.logits`` reads, ``[T, hidden]`` each.
        """
        layout = build_layout(rows, self.slots, self._target.shape, self._target.native)
        filling = layout.token_ids.shape[1] - len(hidden)
        padded = torch.cat([hidden, hidden[-1:].expand(filling, -1)]) if filling else hidden
        rotary = F.embedding(layout.positions, self._cos), F.embedding(layout.positions, self._sin)

        def attend(module: nn.Module, x: Tensor) -> Tensor:
            out: Tensor = module(x, rotary, layout=layout)[0]
            return out

        back, normed = self.head.step(F.embedding(layout.token_ids, self.embeddings), padded[None], attend)
        return back[0, : len(hidden)], normed[0, : len(hidden)]


def pack(module: nn.Module, native: ctypes.CDLL | None) -> None:
    """Replace a head's modules by packed ones, in place."""
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
