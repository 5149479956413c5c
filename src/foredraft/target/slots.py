"""The KV cache: one slot a sequence, lengths changed only by commit, everything past a length is scratch.

    keys[layer], values[layer]: [num_slots, capacity, num_kv_heads, head_dim]

             0 ............. length-1 | length ...... | ........ capacity-1
    slot 0   [ committed tokens       | draft, padding (scratch)           ]
    slot 1   [ committed tokens    | scratch                               ]

A pass writes at and past ``length``; what is not committed is overwritten by the next pass, so rejection
needs no work. Sequences in use always fill the slots ``0 .. num_open-1``: closing one moves the last into
the hole, so a batch reads the cache as a view and never gathers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.errors import RequestError

GROWTH = 512


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Heads and head sizes of one attention layer."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


class KVSlots:
    """Preallocated, growing key/value storage for the sequences of one model.

    Args:
        layers: one shape per attention layer.
        dtype, device: of the stored keys and values.
        max_len: most tokens a sequence may hold; scratch space for padding comes on top.

    Attributes:
        scratch_of: the model that wrote last past a sequence's length, as it says itself.
    """

    def __init__(self, layers: Sequence[LayerShape], dtype: torch.dtype, device: torch.device, max_len: int):
        self.layers = tuple(layers)
        self.dtype, self.device, self.max_len = dtype, device, max_len
        self.num_slots, self.capacity = 0, 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._lengths: list[int] = []
        self._owners: list[int] = []
        self._slot_of: dict[int, int] = {}
        self.scratch_of: dict[int, object] = {}
        self._views: dict[tuple[int, int, int, int], tuple[Tensor, Tensor]] = {}
        self._resize(1, GROWTH)

    # -- which sequences are here ----------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        return len(self._owners)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers."""
        size = torch.empty((), dtype=self.dtype).element_size()
        return sum(s.num_kv_heads * (s.key_dim + s.value_dim) for s in self.layers) * size

    @property
    def allocated_bytes(self) -> int:
        return self.num_slots * self.capacity * self.bytes_per_token

    def open(self, sequence_id: int) -> None:
        """Give a sequence an empty slot, growing the storage if none is free."""
        if sequence_id in self._slot_of:
            raise RequestError(f"sequence {sequence_id} already has a slot")
        if self.num_open == self.num_slots:
            self._resize(self.num_slots * 2, self.capacity)
        self._slot_of[sequence_id] = self.num_open
        self._owners.append(sequence_id)
        self._lengths.append(0)

    def close(self, sequence_id: int) -> None:
        """Free a sequence's slot; the last slot moves into the hole."""
        hole, last = self._slot_of.pop(sequence_id), self.num_open - 1
        self.scratch_of.pop(sequence_id, None)
        if hole != last:
            length = self._lengths[last]
            for store in (*self.keys, *self.values):
                store[hole, :length] = store[last, :length]
            self._lengths[hole] = length
            self._owners[hole] = self._owners[last]
            self._slot_of[self._owners[hole]] = hole
            self.scratch_of.pop(self._owners[hole], None)
        self._lengths.pop()
        self._owners.pop()

    def slot(self, sequence_id: int) -> int:
        return self._slot_of[sequence_id]

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._slot_of

    # -- lengths: commit and rollback ------------------------------------------------------------------

    def length(self, sequence_id: int) -> int:
        """Committed tokens of a sequence."""
        return self._lengths[self._slot_of[sequence_id]]

    def commit(self, sequence_id: int, num_tokens: int, path: Sequence[int] = ()) -> None:
        """Keep the next ``num_tokens`` that the last pass wrote, and of the draft behind them the entries ``path``.

        Args:
            path: indices of accepted draft tokens, ascending; they are moved up to follow each other.
        """
        slot = self._slot_of[sequence_id]
        draft_start = self._lengths[slot] + num_tokens
        length = draft_start + len(path)
        if num_tokens < 0 or length > self.max_len:
            raise ValueError(
                f"commit of {num_tokens} + {len(path)} tokens would give sequence {sequence_id} a length of {length}; "
                f"it must stay within [{self._lengths[slot]}, {self.max_len}]"
            )
        self._lengths[slot] = length
        if list(path) != list(range(len(path))):
            moved = torch.tensor(path, device=self.device) + draft_start
            for store in (*self.keys, *self.values):
                store[slot, draft_start:length] = store[slot, moved]

    def truncate(self, sequence_id: int, length: int) -> int:
        """Roll a sequence back to ``length`` committed tokens, which is returned; 0 empties it."""
        slot = self._slot_of[sequence_id]
        if not 0 <= length <= self._lengths[slot]:
            raise ValueError(
                f"cannot cut sequence {sequence_id} to {length} tokens: it holds {self._lengths[slot]}; "
                f"use a length in [0, {self._lengths[slot]}]"
            )
        self._lengths[slot] = length
        return length

    def append(self, sequence_id: int, entries: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Store and commit keys and values ``[n, heads, head_dim]`` per layer that come from elsewhere."""
        slot, start, count = self._slot_of[sequence_id], self.length(sequence_id), len(entries[0][0])
        self.reserve(start + count)
        for keys, values, (key, value) in zip(self.keys, self.values, entries, strict=True):
            keys[slot, start : start + count] = key
            values[slot, start : start + count] = value
        self.commit(sequence_id, count)

    # -- storage ---------------------------------------------------------------------------------------

    def reserve(self, num_tokens: int) -> None:
        """Make room for ``num_tokens`` positions in every slot."""
        if num_tokens > self.capacity:
            needed = -(-num_tokens // GROWTH) * GROWTH
            limit = -(-(self.max_len + GROWTH) // GROWTH) * GROWTH
            self._resize(self.num_slots, max(needed, min(self.capacity * 2, limit)))

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

    def read(self, sequence_id: int) -> list[tuple[Tensor, Tensor]]:
        """The committed keys and values of a sequence, ``[length, heads, head_dim]`` per layer."""
        slot, length = self._slot_of[sequence_id], self.length(sequence_id)
        return [(k[slot, :length], v[slot, :length]) for k, v in zip(self.keys, self.values, strict=True)]

    def check_integrity(self) -> None:
        """Assert the invariants of the book-keeping (used by tests and the soak run)."""
        assert len(self._owners) == len(self._lengths) == len(self._slot_of) <= self.num_slots
        assert all(self._slot_of[owner] == slot for slot, owner in enumerate(self._owners))
        assert all(0 <= length <= self.max_len for length in self._lengths)

    @torch.inference_mode(False)  # plain tensors: they are written in and outside of inference mode
    def _resize(self, num_slots: int, capacity: int) -> None:
        old_keys, old_values = self.keys, self.values
        self.keys = [
            self._grown(old_keys, i, s.num_kv_heads, s.key_dim, num_slots, capacity) for i, s in enumerate(self.layers)
        ]
        self.values = [
            self._grown(old_values, i, s.num_kv_heads, s.value_dim, num_slots, capacity)
            for i, s in enumerate(self.layers)
        ]
        self.num_slots, self.capacity = num_slots, capacity
        self._views.clear()

    def _grown(self, old: list[Tensor], layer: int, heads: int, dim: int, num_slots: int, capacity: int) -> Tensor:
        new = torch.zeros(num_slots, capacity, heads, dim, dtype=self.dtype, device=self.device)
        if old:
            new[: self.num_slots, : self.capacity] = old[layer]
            old[layer] = new  # frees the old layer at once: the peak is one layer, not the whole cache
        return new
