"""The tensors of the KV cache: slots of one capacity, which grow and shrink together, and their limit.

All slots have the capacity of the longest text, so ``slots x capacity`` is what a limit of bytes is reckoned by.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROWTH = 128
"""Capacities are multiples of this."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Heads and head sizes of one attention layer."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


class KVStorage:
    """Keys and values ``[num_slots, capacity, num_kv_heads, head_dim]`` of each layer.

    Args:
        layers: one shape per attention layer.
        dtype, device: of the stored keys and values.
        max_len: most tokens of a text; scratch space comes on top.

    Attributes:
        max_positions: slots times capacity, at most; None is no limit.
        states: hidden states ``[num_slots, capacity, layers, hidden]`` of the same tokens, or None.
        addresses: of each layer's keys, and of its values, for native code.
    """

    def __init__(self, layers: Sequence[LayerShape], dtype: torch.dtype, device: torch.device, max_len: int):
        self.layers = tuple(layers)
        self.dtype, self.device, self.max_len = dtype, device, max_len
        self.num_slots, self.capacity = 0, 0
        self.max_positions: int | None = None
        self.keys = [self._zeros(0, 0, s.num_kv_heads, s.key_dim) for s in layers]
        self.values = [self._zeros(0, 0, s.num_kv_heads, s.value_dim) for s in layers]
        self.states: Tensor | None = None
        self._views: dict[tuple[int, int, int, int], tuple[Tensor, Tensor]] = {}
        self.resize(1, GROWTH)

    @property
    def allocated_bytes(self) -> int:
        return self.num_slots * self.capacity * self.bytes_per_token

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers, its hidden states included where they are kept."""
        return sum(store[0, 0].numel() for store in self.stores) * self._item_bytes

    @property
    def bytes_per_position(self) -> int:
        """What a limit is divided by: a token's bytes, and those of one tensor more, which is there twice in a copy."""
        largest = max((store[0, 0].numel() for store in self.stores), default=0)
        return self.bytes_per_token + largest * self._item_bytes

    def fits(self, num_sequences: int, num_tokens: int) -> bool:
        """Whether the limit allows so many slots of so many positions."""
        return self.max_positions is None or num_sequences * _rounded(num_tokens) <= self.max_positions

    def size_for(self, num_slots: int, num_tokens: int) -> tuple[int, int]:
        """Slots and capacity for so many slots of so many positions.

        What there is, doubled where that is too small, as far as the limit allows; less where it asks for less. Slots
        beyond ``num_slots`` do not make more of a larger capacity.
        """
        needed, most = _rounded(num_tokens), self.max_positions
        slots, capacity = self.num_slots, self.capacity
        if num_slots > slots:
            slots = max(num_slots, 2 * slots)
        if needed > capacity:
            capacity = max(needed, min(2 * capacity, _rounded(self.max_len + GROWTH)))
            slots = max(num_slots, min(slots, self.num_slots * self.capacity // capacity))
        if most is not None and slots * capacity > most:
            enough = needed <= self.capacity and num_slots * self.capacity <= most
            capacity = self.capacity if enough else needed
            slots = max(num_slots, min(slots, most // capacity))
        return slots, capacity

    def write(self, layer: int, index_T: Tensor, key_TD: Tensor, value_TD: Tensor) -> None:
        """Store keys and values ``[T, heads * head_dim]`` at flat positions ``slot * capacity + position``."""
        self.keys[layer].view(-1, key_TD.shape[1]).index_copy_(0, index_T, key_TD)
        self.values[layer].view(-1, value_TD.shape[1]).index_copy_(0, index_T, value_TD)

    def view(self, layer: int, first: int, last: int, num_keys: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[last - first, heads, num_keys, head_dim]`` of a run of slots, without a copy."""
        at = (layer, first, last, num_keys)
        if at not in self._views:
            if len(self._views) > 64 * len(self.layers):
                self._views.clear()
            self._views[at] = (
                self.keys[layer][first:last, :num_keys].transpose(1, 2),
                self.values[layer][first:last, :num_keys].transpose(1, 2),
            )
        return self._views[at]

    def write_states(self, index_T: Tensor, states_TLH: Tensor) -> None:
        """Store hidden states at flat positions, if states of this kind are kept."""
        if self.states is not None and self.states.shape[2:] == states_TLH.shape[1:]:
            self.states.view(-1, *states_TLH.shape[1:]).index_copy_(0, index_T, states_TLH)

    @property
    def stores(self) -> list[Tensor]:
        """All tensors, ``[num_slots, capacity, ...]`` each."""
        return [*self.keys, *self.values, *([] if self.states is None else [self.states])]

    def copy_entries(self, source: int, to: int, length: int) -> None:
        for store in self.stores:
            store[to, :length] = store[source, :length]

    def move_up(self, slot: int, start: int, path: Sequence[int]) -> None:
        """Let the entries at ``start + path[i]``, ascending, follow each other from ``start`` on."""
        first = next((i for i, place in enumerate(path) if place != i), len(path))
        if self.device.type != "cpu" and first < len(path):
            moved = torch.tensor(path[first:], device=self.device) + start
            for store in self.stores:
                store[slot, start + first : start + len(path)] = store[slot, moved]
            return
        for to in range(first, len(path)):  # no place is written that has still to be read
            for store in self.stores:
                size = store.stride(1) * store.element_size()
                base = store.data_ptr() + (slot * self.capacity + start) * size
                ctypes.memmove(base + to * size, base + path[to] * size, size)

    def swap_entries(self, a: int, b: int, a_len: int, b_len: int) -> None:
        for store in self.stores:
            held = store[a, :a_len].clone()
            store[a, :b_len] = store[b, :b_len]
            store[b, :a_len] = held

    @property
    def _item_bytes(self) -> int:
        return torch.empty((), dtype=self.dtype).element_size()

    @torch.inference_mode(False)  # plain tensors: they are written in and outside of inference mode
    def resize(self, num_slots: int, capacity: int) -> None:
        """Keep what fits of the entries; the rest of the storage is zeros."""
        self._views.clear()  # they would keep the old tensors alive
        for stores in (self.keys, self.values):
            for i, old in enumerate(stores):  # frees one before the next is made: the peak is one tensor, not the cache
                stores[i] = self._grown(old, num_slots, capacity)
                del old
        if self.states is not None:
            self.states = self._grown(self.states, num_slots, capacity)
        self.num_slots, self.capacity = num_slots, capacity
        self.addresses = _addresses(self.keys), _addresses(self.values)

    def _grown(self, old: Tensor, num_slots: int, capacity: int) -> Tensor:
        new = self._zeros(num_slots, capacity, *old.shape[2:])
        slots, places = min(num_slots, len(old)), min(capacity, old.shape[1])
        new[:slots, :places] = old[:slots, :places]
        return new

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


def _addresses(tensors: list[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _rounded(num_tokens: int) -> int:
    return -(-num_tokens // GROWTH) * GROWTH
