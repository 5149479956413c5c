"""Modules that compute what a model's own modules compute, in fewer and faster operations.

On a CPU the weights of linear layers are packed once into the block layout of oneDNN; elsewhere they stay as
they are. Projections of the same input are fused. Each class says what it stands for; ``lowering`` decides
where it may be used and checks that the result is the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.target.attention import attend, native_attention, rotate_and_store, runs_native
from foredraft.target.layout import PassLayout

PACK_BATCH = 64
"""Batch size for which oneDNN chooses the block layout; it serves passes of 2 to some hundred tokens."""
NATIVE_BLOCK = 32
"""Outputs of a block in the layout of ``native/linear.cpp``."""


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` for one or several weights of the same input, side by side.

    Args:
        weights: ``[out_i, in]`` each; they are copied, so the originals can be freed.
        biases: ``[out_i]`` or None each.
        native: the kernels of :mod:`foredraft.target.native_build`, or None for torch's own.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], native: ctypes.CDLL | None):
        super().__init__()
        weight = torch.cat([w.detach() for w in weights]) if len(weights) > 1 else weights[0].detach()
        bias = _joined_bias(weights, biases)
        self.out_features, self.in_features = weight.shape
        self.kernel: Callable[[Tensor], Tensor]
        if native is not None and weight.dtype == torch.bfloat16 and self.in_features % 2 == 0:
            self.kernel = NativeProduct(weight, bias, native)
        elif weight.device.type == "cpu" and _can_pack(weight.dtype):
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_BATCH)
            self.kernel = lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        else:
            self.kernel = lambda x: F.linear(x, weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(x)


class NativeProduct:
    """A product by ``native/linear.cpp``: weights as ``[out / 32, in / 2, 32, 2]``, padded with zeros."""

    def __init__(self, weight: Tensor, bias: Tensor | None, native: ctypes.CDLL):
        self.num_outputs, self.num_inputs = weight.shape
        blocks = -(-self.num_outputs // NATIVE_BLOCK)
        padded = weight.new_zeros(blocks * NATIVE_BLOCK, self.num_inputs)
        padded[: self.num_outputs] = weight
        by_block = padded.view(blocks, NATIVE_BLOCK, self.num_inputs // 2, 2)
        self.weight = by_block.transpose(1, 2).contiguous()
        self.bias = None if bias is None else bias.float()
        self.weight_at = self.weight.data_ptr()
        self.bias_at = None if self.bias is None else self.bias.data_ptr()
        self.function = native.foredraft_linear_bf16

    def __call__(self, x: Tensor) -> Tensor:
        if x.stride(-1) != 1 or (x.dim() > 2 and not x.is_contiguous()):
            x = x.contiguous()
        num_rows = x.numel() // self.num_inputs
        y = x.new_empty(*x.shape[:-1], self.num_outputs)
        self.function(
            x.data_ptr(),
            self.weight_at,
            self.bias_at,
            y.data_ptr(),
            num_rows,
            self.num_outputs,
            self.num_inputs,
            x.stride(-2),
            torch.get_num_threads(),
        )
        return y


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _joined_bias(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [w.new_zeros(w.shape[0]) if b is None else b.detach() for w, b in zip(weights, biases, strict=True)]
    )


class PackedRMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, in float32 and rounded once."""

    def __init__(self, weight: Tensor, eps: float, native: ctypes.CDLL | None = None):
        super().__init__()
        self.weight = weight.detach().float()
        self.eps = torch.tensor(eps, dtype=torch.float32, device=weight.device)
        self.native, self.eps_value, self.weight_at = native, eps, self.weight.data_ptr()

    def forward(self, x: Tensor) -> Tensor:
        if self.native is not None and x.dtype == torch.bfloat16:
            x = x.contiguous()
            y, width = torch.empty_like(x), x.shape[-1]
            self.native.foredraft_rms_norm_bf16(
                x.data_ptr(),
                self.weight_at,
                y.data_ptr(),
                x.numel() // width,
                width,
                width,
                self.eps_value,
                torch.get_num_threads(),
            )
            return y
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self.eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
        out = torch.empty_like(x)
        return torch.mul(torch.mul(x, scale), self.weight, out=out)


class PackedGatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))`` with gate and up in one product."""

    def __init__(
        self,
        gate_up: PackedLinear,
        down: PackedLinear,
        act: Callable[[Tensor], Tensor],
        native: ctypes.CDLL | None = None,
    ):
        super().__init__()
        self.gate_up, self.down, self.act = gate_up, down, act
        self.native = native if "silu" in type(act).__name__.lower() else None

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up(x)
        if self.native is not None and x.dtype == torch.bfloat16:
            product = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
            width = product.shape[-1]
            self.native.foredraft_silu_mul_bf16(
                gate_up.data_ptr(), product.data_ptr(), product.numel() // width, width, torch.get_num_threads()
            )
            return cast(Tensor, self.down(product))
        gate, up = gate_up.chunk(2, -1)
        out: Tensor = self.down(self.act(gate).mul_(up))
        return out


class PackedAttention(nn.Module):
    """Self-attention of the Llama kind: fused q/k/v, optional per-head norms of q and k, rotary positions.

    ``rotary`` False ignores the positions (layers without them, as SmolLM3 has).
    """

    def __init__(
        self,
        layer_idx: int,
        qkv: PackedLinear,
        out: PackedLinear,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scaling: float,
        window: int | None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        rotary: bool = True,
    ):
        super().__init__()
        self.layer_idx, self.qkv, self.out = layer_idx, qkv, out
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scaling, self.window, self.rotary = scaling, window, rotary
        self.q_norm, self.k_norm = q_norm, k_norm

    @property
    def native_norms(self) -> tuple[PackedRMSNorm | None, PackedRMSNorm | None] | None:
        """The norms of q and k as the native kernel takes them; None if it cannot."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is None and k_norm is None:
            return None, None
        if not isinstance(q_norm, PackedRMSNorm) or not isinstance(k_norm, PackedRMSNorm) or q_norm.native is None:
            return None
        return (q_norm, k_norm) if q_norm.eps_value == k_norm.eps_value else None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        *,
        layout: PassLayout,
        **_: Any,
    ) -> tuple[Tensor, None]:
        num_qk = self.num_heads + self.num_kv_heads
        position_embeddings = position_embeddings if self.rotary else None
        qkv = self.qkv(hidden_states)[0].view(-1, num_qk + self.num_kv_heads, self.head_dim)
        norms = self.native_norms
        if layout.native is not None and norms is not None and runs_native(qkv, qkv):
            query = rotate_and_store(self.layer_idx, qkv, position_embeddings, layout, self.num_heads, *norms)
            out = native_attention(self.layer_idx, query, layout, self.scaling, window=self.window)
            return self.out(out.flatten(1)[None]), None
        qk, value = qkv[:, :num_qk], qkv[:, num_qk:]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat([self.q_norm(qk[:, : self.num_heads]), self.k_norm(qk[:, self.num_heads :])], 1)
        if position_embeddings is not None:
            qk = rotate(qk, *position_embeddings)
        out = attend(
            self.layer_idx,
            qk[:, : self.num_heads],
            qk[:, self.num_heads :],
            value,
            layout,
            scaling=self.scaling,
            window=self.window,
        )
        return self.out(out.flatten(1)[None]), None


def rotate(heads_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of all heads, ``x * cos + rotate_half(x) * sin`` (RoFormer, eq. 34).

    ``cos`` and ``sin`` are ``[1, T, D]`` with the two halves equal, as Hugging Face models make them.
    """
    half = heads_THD.shape[-1] // 2
    left, right = heads_THD[..., :half], heads_THD[..., half:]
    cos, sin = cos[0, :, None], sin[0, :, None]
    out = heads_THD * cos
    out[..., :half].addcmul_(right, sin[..., :half], value=-1)
    out[..., half:].addcmul_(left, sin[..., half:])
    return out
