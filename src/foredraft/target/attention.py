"""Attention over the KV slots, as the function that Hugging Face models call.

The query heads that share a key/value head are folded into the query axis, so one kernel call reads each key
once. What a model asks for beyond plain attention (score soft-capping, attention sinks) takes the explicit
path; anything unknown is refused by name.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from foredraft.errors import UnsupportedModelError
from foredraft.target.layout import PassLayout
from foredraft.target.segments import Segment

ATTENTION_NAME = "foredraft"
_HARMLESS = {
    "dropout",
    "position_ids",
    "is_causal",
    "use_cache",
    "output_attentions",
    "cache",
    "position_embeddings",
    "return_dict",
    "output_hidden_states",
    "logits_to_keep",
    "past_key_values",
    "num_items_in_batch",
    "output_router_logits",
    "target_dtype",
}


def register_attention() -> None:
    """Make ``attn_implementation="foredraft"`` known to transformers. May be called again."""
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    """Masks come from the pass layout."""


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: PassLayout,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend in the signature of transformers' attention functions.

    Args:
        query: ``[1, query_heads, T, head_dim]``; key and value likewise with their heads.
        layout: the pass; reaches this function as an extra keyword argument of the model's forward.
        softcap: cap of the scores (Gemma 2); s_aux: attention sinks per head (gpt-oss).

    Returns:
        ``[1, T, query_heads, value_dim]`` and no weights.

    Raises:
        UnsupportedModelError: the model passes an option that changes attention and is not known here.
    """
    unknown = [name for name, option in options.items() if name not in _HARMLESS and option is not None]
    if unknown:
        raise UnsupportedModelError(
            f"{type(module).__name__} asks its attention for {', '.join(sorted(unknown))}, "
            "which foredraft does not know; use this model with another engine"
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    out_THD = attend(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        layout,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        window=sliding_window,
        sinks=s_aux,
    )
    return out_THD[None], None


def attend(
    layer: int,
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    layout: PassLayout,
    *,
    scaling: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write the pass's keys and values into the slots and attend; returns ``[T, query_heads, value_dim]``."""
    if torch.compiler.is_compiling():  # the operator of ``compiled`` calls this function again, with the pass
        hidden = torch.ops.foredraft.attend
        return cast(Tensor, hidden(query_THD, key_THD, value_THD, layer, scaling, softcap, window, sinks))
    layout.slots.write(layer, layout.write_index, key_THD.flatten(1), value_THD.flatten(1))
    if layout.native is not None and runs_native(query_THD, value_THD):
        return native_attention(layer, query_THD, layout, scaling, softcap, window, sinks)
    _note_queries(layer, query_THD, layout, scaling)
    outputs = []
    for segment in layout.segments:
        folded = _fold(query_THD, segment, key_THD.shape[1])
        group = query_THD.shape[1] // key_THD.shape[1]
        last_slot = segment.first_slot + segment.num_rows
        keys, values = layout.slots.view(layer, segment.first_slot, last_slot, segment.num_keys)
        mask = segment.mask(window, group, query_THD.dtype)
        if softcap is None and sinks is None:
            attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling)
        else:
            attended = _explicit(folded, keys, values, mask, scaling, softcap, sinks)
        outputs.append(_unfold(attended, segment, group))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def runs_native(query_THD: Tensor, value_THD: Tensor) -> bool:
    dim = query_THD.shape[2]
    return query_THD.dtype == torch.bfloat16 and dim == value_THD.shape[2] and dim % 32 == 0 and dim <= 256


def native_attention(
    layer: int,
    query_THD: Tensor,
    layout: PassLayout,
    scaling: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention by ``native/attention.cpp``: every query over exactly its own keys, which are in the slots."""
    _note_queries(layer, query_THD, layout, scaling)
    if query_THD.stride(2) != 1 or query_THD.stride(1) != query_THD.shape[2]:
        query_THD = query_THD.contiguous()
    keys, values = layout.slots.keys[layer], layout.slots.values[layer]
    sinks = None if sinks is None else sinks.float().contiguous()
    out = torch.empty(query_THD.shape, dtype=query_THD.dtype)
    layout.native.foredraft_attention_bf16(  # type: ignore[union-attr]
        query_THD.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(), layout.rows.data_ptr(),
        layout.positions.data_ptr(), layout.paths.data_ptr(), None if sinks is None else sinks.data_ptr(),
        len(layout.rows), layout.paths.shape[1], query_THD.stride(0), keys.stride(0), query_THD.shape[1],
        keys.shape[2], keys.shape[3], window or 0, scaling, softcap or 0.0, torch.get_num_threads(),
    )  # fmt: skip
    return out


def _note_queries(layer: int, query_THD: Tensor, layout: PassLayout, scaling: float) -> None:
    if layout.queries is not None:
        layout.queries[layer] = (query_THD, scaling)


def rotate_and_store(
    layer: int,
    qkv_THD: Tensor,
    cos_sin: tuple[Tensor, Tensor] | None,
    layout: PassLayout,
    num_heads: int,
    q_norm: Any = None,
    k_norm: Any = None,
) -> Tensor:
    """Rotate queries and keys, put keys and values into the slots; returns the queries ``[T, heads, D]``.

    Args:
        qkv_THD: ``[T, query heads + 2 * kv heads, D]`` bf16, contiguous.
        cos_sin: ``[1, T, D]`` each, or None for a layer without positions.
        q_norm, k_norm: packed norms of the heads before they are rotated, both or none.
    """
    num_tokens, num_all, dim = qkv_THD.shape
    keys, values = layout.slots.keys[layer], layout.slots.values[layer]
    query = qkv_THD.new_empty(num_tokens, num_heads, dim)
    cos, sin = (None, None) if cos_sin is None else (t.to(qkv_THD.dtype).contiguous() for t in cos_sin)
    layout.native.foredraft_rotate_store_bf16(  # type: ignore[union-attr]
        qkv_THD.data_ptr(), None if cos is None else cos.data_ptr(), None if sin is None else sin.data_ptr(),
        q_norm and q_norm.weight_at, k_norm and k_norm.weight_at, layout.write_index.data_ptr(), query.data_ptr(),
        keys.data_ptr(), values.data_ptr(), num_tokens, num_heads, (num_all - num_heads) // 2, dim,
        q_norm.eps_value if q_norm else 0.0, torch.get_num_threads(),
    )  # fmt: skip
    return query


def _fold(query_THD: Tensor, segment: Segment, num_kv_heads: int) -> Tensor:
    """``[T, query_heads, D]`` to ``[rows, kv_heads, num_queries * group, D]``."""
    if segment.gather is not None:
        query = query_THD.index_select(0, segment.gather)
    else:
        query = query_THD[segment.first_token : segment.last_token]
    rows, width = segment.num_rows, segment.num_queries
    query = query.view(rows, width, num_kv_heads, -1, query_THD.shape[-1])
    return query.transpose(1, 2).reshape(rows, num_kv_heads, -1, query_THD.shape[-1])


def _unfold(attended: Tensor, segment: Segment, group: int) -> Tensor:
    """``[rows, kv_heads, num_queries * group, D]`` to ``[tokens of the segment, query_heads, D]``."""
    rows, heads, _, dim = attended.shape
    out = attended.view(rows, heads, segment.num_queries, group, dim).transpose(1, 2)
    out = out.reshape(rows * segment.num_queries, heads * group, dim)
    return out if segment.scatter is None else out.index_select(0, segment.scatter)


def _explicit(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention written out, for scores that are capped or that share their softmax with a sink."""
    scores = torch.matmul(query, keys.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    if sinks is None:
        return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype), values)
    rows, heads, queries, _ = scores.shape
    per_query = (
        sinks.to(scores.dtype).view(1, heads, 1, -1).expand(rows, heads, queries // (sinks.numel() // heads), -1)
    )
    joined = torch.cat([scores, per_query.reshape(rows, heads, queries, 1)], -1)
    probs = torch.softmax(joined - joined.amax(-1, keepdim=True), -1)[..., :-1]
    return torch.matmul(probs, values)
