"""Decoder layers of the Llama kind, as many as lie behind each other, in one native call.

    a layer      norm | qkv | rotate, store | attend | out, add | norm | gate, up | silu | down, add
    a pass       one call for layers 0 .. 29, which notes the states that are wanted on its way

The call takes the steps of the packed modules in the same order, so its bits are theirs. What it saves is Python's
and torch's share of a step, half of a pass of few tokens, and the wait of threads for each other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.target.features import AFTER_NORM
from foredraft.target.layout import PassLayout
from foredraft.target.packed import NativeProduct, PackedAttention, PackedGatedMLP, PackedRMSNorm

_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class LayerEntry(ctypes.Structure):
    """``Layer`` of ``native/layers.cpp``."""

    _fields_ = (
        *((name, _POINTER) for name in ("input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "out", "out_bias")),
        *((name, _POINTER) for name in ("post_norm", "gate_up", "gate_up_bias", "down", "down_bias")),
        *(
            (name, _SIZE)
            for name in ("index", "inputs", "hidden", "query_heads", "kv_heads", "dim", "inner", "window", "rotary")
        ),
        *((name, _FLOAT) for name in ("input_eps", "head_eps", "post_eps", "scaling")),
    )

    @property
    def width(self) -> int:
        """The most numbers that a token has in a step."""
        return int(max(self.hidden, (self.query_heads + 2 * self.kv_heads) * self.dim, 2 * self.inner))


class Arena:
    """Memory that every pass writes anew. It grows by doubling."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.bfloat16)

    def at(self, num_elements: int) -> int:
        """Where so many elements are."""
        if num_elements > len(self._memory):
            self._memory = torch.empty(max(num_elements, 2 * len(self._memory)), dtype=torch.bfloat16)
        return self._memory.data_ptr()


class PackedLayer(nn.Module):
    """A decoder layer as one native call; step by step where a pass wants to know what its attention sees.

    Args:
        layer: of packed modules, as :func:`describe_layer` found it.
        arena: shared by the layers of a model.
    """

    def __init__(self, layer: nn.Module, entry: LayerEntry, arena: Arena):
        super().__init__()
        self.layer, self.entry, self.arena = layer, entry, arena
        self.attention_type = getattr(layer, "attention_type", None)

    def forward(self, hidden_states: Tensor, *, layout: PassLayout, **options: Any) -> Tensor:
        if layout.native is None or layout.queries is not None:
            out: Tensor = self.layer(hidden_states, layout=layout, **options)
            return out
        return run_layers(self.entry, 1, self.entry.width, self.arena, hidden_states, layout, **options)


class RotaryTable:
    """A model's rotary positions, looked up where they depend on nothing but the position."""

    def __init__(self, module: nn.Module):
        self._module = module
        self._looks_up = getattr(module, "rope_type", None) in ("default", "linear", "llama3", "yarn")
        self._tables: tuple[Tensor, Tensor] | None = None

    def __call__(self, hidden: Tensor, positions: Tensor, max_len: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[1, T, dims]`` of ``positions [1, T]``, all below ``max_len``."""
        if not self._looks_up:
            cos, sin = self._module(hidden, position_ids=positions)
            return cos, sin
        if self._tables is None or len(self._tables[0]) < max_len:
            cos, sin = self._module(hidden, position_ids=torch.arange(max_len, device=positions.device)[None])
            self._tables = cos[0], sin[0]
        cos_table, sin_table = self._tables
        return F.embedding(positions, cos_table), F.embedding(positions, sin_table)


class LayerStack:
    """The pass of a model whose layers are packed: they in as few calls as possible, and little around them.

    Embeddings, rotary positions, layers, norm and head, as transformers' models of the Llama kind have them. Whether
    the model does no more than that is for the caller to find out by its logits. Layers with hooks run one by one.

    Args:
        list_name: of the model's list of layers.
        layers: others to run in their place.
    """

    def __init__(self, model: nn.Module, list_name: str, layers: Sequence[nn.Module] = ()):
        any_model: Any = model
        base: Any = model.get_submodule(list_name.rpartition(".")[0])
        self._embeddings, self._head = any_model.get_input_embeddings(), any_model.get_output_embeddings()
        self._rotary, self._norm = RotaryTable(base.rotary_emb), base.norm
        self._layers = list(layers or base.layers)
        packed = [layer if isinstance(layer, PackedLayer) else None for layer in self._layers]
        self._table = (LayerEntry * len(packed))(*(LayerEntry() if p is None else p.entry for p in packed))
        self._width = max((p.entry.width for p in packed if p is not None), default=0)
        self._arena = next((p.arena for p in packed if p is not None), Arena())

    def __call__(self, layout: PassLayout) -> Tensor:
        """Logits ``[num_logits (padded), vocab]``."""
        hidden = self._embeddings(layout.token_ids)
        _note(layout, 0, hidden)
        rotary = self._rotary(hidden, layout.positions, layout.slots.max_len)
        hidden = self._norm(self._through_layers(hidden, rotary, layout))
        _note(layout, AFTER_NORM, hidden)
        logits: Tensor = self._head(hidden[0, layout.logits_index])
        return logits

    def _through_layers(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], layout: PassLayout) -> Tensor:
        in_one_call = layout.native is not None and layout.queries is None

        def is_joined(at: int) -> bool:
            return in_one_call and _is_unobserved(self._layers[at])

        for joined, group in groupby(range(len(self._layers)), is_joined):
            places = list(group)
            if joined:
                hidden = self._joined(places, hidden, rotary, layout)
                continue
            for place in places:
                hidden = self._layers[place](hidden, position_embeddings=rotary, layout=layout)
                _note(layout, place + 1, hidden)
        return hidden

    def _joined(self, places: list[int], hidden: Tensor, rotary: tuple[Tensor, Tensor], layout: PassLayout) -> Tensor:
        """Consecutive layers in one call."""
        first, count = places[0], len(places)
        entries = ctypes.byref(self._table, first * ctypes.sizeof(LayerEntry))
        wanted = sorted({number for number in layout.wanted_states if first < number <= first + count})
        states = hidden.new_empty(hidden.shape[1], len(wanted), hidden.shape[2])
        noted = [number - first for number in wanted], states
        hidden = run_layers(entries, count, self._width, self._arena, hidden, layout, rotary, noted=noted)
        if layout.hidden_states is not None:
            layout.hidden_states.update(zip(wanted, states.unbind(1), strict=True))
        return hidden


def describe_layer(layer: nn.Module) -> LayerEntry | None:
    """A layer for the native call, if it is made of the packed modules that have native kernels, and of no others.

    Whether it puts them together as Llama does is not known by that.
    """
    norms = [child for child in layer.children() if isinstance(child, PackedRMSNorm)]
    attention = next((child for child in layer.children() if isinstance(child, PackedAttention)), None)
    mlp = next((child for child in layer.children() if isinstance(child, PackedGatedMLP)), None)
    if attention is None or mlp is None or len(norms) != 2 or len(list(layer.children())) != 4:
        return None
    before, behind = norms
    entry = layer_entry(attention, behind, mlp)
    if entry is not None:
        entry.input_norm, entry.input_eps = before.weight_at, before.eps_value
    return entry


def layer_entry(attention: PackedAttention, behind: PackedRMSNorm, mlp: PackedGatedMLP) -> LayerEntry | None:
    """A layer whose attention reads what it is given, for there is no norm before it; None if a step has no kernel."""
    kernels = [linear.kernel for linear in (attention.qkv, attention.out, mlp.gate_up, mlp.down)]
    qkv, out, gate_up, down = (kernel if isinstance(kernel, NativeProduct) else None for kernel in kernels)
    if qkv is None or out is None or gate_up is None or down is None:
        return None
    head_norms = attention.native_norms
    if mlp.native is None or head_norms is None or attention.head_dim % 32 or attention.head_dim > 256:
        return None
    q_norm, k_norm = head_norms
    return LayerEntry(
        None, qkv.weight_at, qkv.bias_at, q_norm and q_norm.weight_at, k_norm and k_norm.weight_at,
        out.weight_at, out.bias_at, behind.weight_at, gate_up.weight_at, gate_up.bias_at, down.weight_at, down.bias_at,
        attention.layer_idx, qkv.num_inputs, out.num_outputs, attention.num_heads, attention.num_kv_heads,
        attention.head_dim, down.num_inputs, attention.window or 0, attention.rotary,
        0.0, q_norm.eps_value if q_norm else 0.0, behind.eps_value, attention.scaling,
    )  # fmt: skip


def _note(layout: PassLayout, number: int, hidden: Tensor) -> None:
    """Keep a state that the pass was asked for."""
    if layout.hidden_states is not None and number in layout.wanted_states:
        layout.hidden_states[number] = hidden[0]


def _is_unobserved(layer: nn.Module) -> bool:
    return isinstance(layer, PackedLayer) and not layer._forward_hooks and not layer._forward_pre_hooks


def run_layers(
    entries: Any,
    num_layers: int,
    width: int,
    arena: Arena,
    hidden_states: Tensor,
    layout: PassLayout,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    given: Tensor | None = None,
    noted: tuple[list[int], Tensor] | None = None,
    **_: Any,
) -> Tensor:
    """States ``[1, T, hidden]`` behind ``num_layers`` layers.

    Args:
        entries: of the layers, one behind the other.
        width: of the widest of them.
        given: what the first one's attention reads, ``[1, T, inputs]`` contiguous; None is the norm of the states.
        noted: ascending, how many of the layers have run where the states are to be noted, and ``[T, n, hidden]`` for
            them.
    """
    assert layout.native is not None
    out = hidden_states.clone(memory_format=torch.contiguous_format)
    num_tokens, keys_and_values = out.shape[1], layout.slots.addresses
    rotary = [table.to(torch.bfloat16).contiguous() for table in position_embeddings or ()]
    cos, sin = [table.data_ptr() for table in rotary] or (None, None)
    numbers, states = (torch.tensor(noted[0]), noted[1]) if noted and noted[0] else (None, None)
    layout.native.foredraft_layers_bf16(
        ctypes.byref(entries) if isinstance(entries, LayerEntry) else entries, out.data_ptr(),
        _address(given), arena.at(3 * num_tokens * width), cos, sin,
        layout.write_index.data_ptr(), *keys_and_values, layout.rows.data_ptr(), layout.positions.data_ptr(),
        layout.paths.data_ptr(), _address(numbers), _address(states), num_layers, num_tokens, width, len(layout.rows),
        layout.paths.shape[1], layout.slots.capacity, 0 if numbers is None else len(numbers), torch.get_num_threads(),
    )  # fmt: skip
    return out


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
