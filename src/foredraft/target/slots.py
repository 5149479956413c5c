"""The KV cache: one slot a sequence, lengths changed only by commit, everything past a length is scratch.

    keys[layer], values[layer]: [num_slots, capacity, num_kv_heads, head_dim]

             0 ............. length-1 | length ...... | ........ capacity-1
    slot 0   [ committed tokens       | draft, padding (scratch)           ]    in use
    slot 1   [ committed tokens    | scratch                               ]    in use
    slot 2   [ text of an ended sequence  |                                ]    retained
    slot 3   [                                                             ]    free

A pass writes at and past ``length``; what is not committed is overwritten by the next pass, so rejection
needs no work. Sequences in use always fill the slots ``0 .. num_open-1``: closing one moves the last into
the hole, so a batch reads the cache as a view and never gathers it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from foredraft.errors import RequestError
from foredraft.target.retained import SHORTEST, RetainedTexts, common_prefix
from foredraft.target.storage import KVStorage, LayerShape

RETAINED_SHARE = 4
"""The storage grows for retained texts up to one part in so many of its limit; beyond that they live in what it has."""


class KVSlots(KVStorage):
    """Preallocated, growing key/value storage for the sequences of one model.

    Args:
        layers: one shape per attention layer.
        dtype, device: of the stored keys and values.
        max_len: most tokens a sequence may hold; scratch space for padding comes on top.

    Attributes:
        scratch_of: the model that wrote last past a sequence's length, as it says itself.
        max_retained: how many texts of ended sequences are kept at most; see :meth:`limit`.
    """

    def __init__(self, layers: Sequence[LayerShape], dtype: torch.dtype, device: torch.device, max_len: int):
        self.max_retained = 0
        self._lengths: list[int] = []
        self._owners: list[int] = []
        self._slot_of: dict[int, int] = {}
        self._retained = RetainedTexts()
        self.scratch_of: dict[int, object] = {}
        super().__init__(layers, dtype, device, max_len)

    # -- which sequences are here ----------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        return len(self._owners)

    @property
    def num_retained(self) -> int:
        return len(self._retained)

    def open(self, sequence_id: int) -> None:
        """Give a sequence an empty slot.

        If none is free the storage grows, or the oldest retained text leaves.
        """
        if sequence_id in self._slot_of:
            raise RequestError(f"sequence {sequence_id} already has a slot")
        slot, taken = self.num_open, self.num_open + self.num_retained
        if taken >= self.num_slots and self._must_drop:
            self._retained.drop(self._retained.oldest)
        elif taken >= self.num_slots:
            self.make_room(taken + 1, 1)
        if slot in self._retained:
            self._move_retained(slot)
        self._adopt(sequence_id, 0)

    def open_with_prefix(self, sequence_id: int, text: list[int], running: Mapping[int, list[int]]) -> int:
        """Open a slot with the entries of the longest prefix of a text that is cached, if it is worth it.

        Args:
            text: all but its last token is looked for, so at least one is left to feed.
            running: texts of open sequences.

        Returns:
            the length of the prefix.
        """
        wanted = text[:-1] if self.max_retained else []
        source, longest = self._retained.longest_match(wanted)
        donor = None
        for other, known in running.items():
            if self.length(other) > longest and known[: longest + 1] == wanted[: longest + 1]:
                longest = common_prefix(known[: self.length(other)], wanted)
                donor = other
        if longest < SHORTEST:
            self.open(sequence_id)
            return 0
        if donor is not None:
            self.open(sequence_id)
            self.copy_entries(self.slot(donor), self.slot(sequence_id), longest)
            self._lengths[-1] = longest
            return longest
        known = self._retained[source]
        self._retained.touch(source)
        if longest == len(known) or (self._must_drop and self.num_retained == 1):
            self._take_over(sequence_id, source, longest)
        else:
            self.open(sequence_id)
            self.copy_entries(self._retained.slot_of(known), self.slot(sequence_id), longest)
            self._lengths[-1] = longest
        return longest

    def close(self, sequence_id: int) -> None:
        """Free a sequence's slot; the last slot moves into the hole."""
        self._leave(sequence_id, 0)

    def retain(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        """Close a sequence, but keep the entries of its text for :meth:`open_with_prefix` until the room is needed.

        Args:
            token_ids: the text that was given out; entries of other tokens are not kept.
        """
        text = list(token_ids[: self.length(sequence_id)])
        covered = [slot for slot in self._retained if self._retained[slot][: len(text)] == text]
        if covered:
            self._retained.touch(covered[0])
        if covered or not self.max_retained or len(text) < SHORTEST:
            self.close(sequence_id)
            return
        for slot in self._retained:
            if text[: len(self._retained[slot])] == self._retained[slot]:
                self._retained.drop(slot)
        self._retained.add(self._leave(sequence_id, len(text)), text)
        while self.num_retained > self.max_retained:
            self._retained.drop(self._retained.oldest)

    def drop_retained(self) -> None:
        """Forget the texts of ended sequences."""
        for slot in self._retained:
            self._retained.drop(slot)

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
        self.move_up(slot, draft_start, path)

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

    # -- room ------------------------------------------------------------------------------------------

    def limit(self, max_bytes: int | None, max_retained: int) -> None:
        """Set how large the storage may grow, and how many texts of ended sequences are kept in it.

        The limit holds for what is kept in reserve or retained; what is opened and reserved is given in any case.
        """
        self.max_positions = None if max_bytes is None else max_bytes // self.bytes_per_position
        self.max_retained = max_retained
        while self.num_retained > max_retained:
            self._retained.drop(self._retained.oldest)
        self.make_room(self.num_open, 1)

    def make_room(self, num_sequences: int, num_tokens: int) -> None:
        """Storage for so many open sequences of so many positions, and some in reserve where the limit allows it.

        Where it does not, retained texts leave and capacity that nobody needs is given back.
        """
        longest = max(num_tokens, *self._lengths, 1)
        num_slots, capacity = self.size_for(max(num_sequences, self.num_open, 1), longest)
        if (num_slots, capacity) == (self.num_slots, self.capacity):
            return
        for slot in self._retained:
            if len(self._retained[slot]) > capacity:
                self._retained.drop(slot)
        while self.num_open + self.num_retained > num_slots:
            self._retained.drop(self._retained.oldest)
        for slot in self._retained:
            if slot >= num_slots:
                self._move_retained(slot)
        self.resize(num_slots, capacity)

    def reserve(self, num_tokens: int) -> None:
        """Make room for ``num_tokens`` positions in every slot in use."""
        if num_tokens > self.capacity:
            self.make_room(self.num_open, num_tokens)

    def read(self, sequence_id: int) -> list[tuple[Tensor, Tensor]]:
        """The committed keys and values of a sequence, ``[length, heads, head_dim]`` per layer."""
        slot, length = self._slot_of[sequence_id], self.length(sequence_id)
        return [(k[slot, :length], v[slot, :length]) for k, v in zip(self.keys, self.values, strict=True)]

    @torch.inference_mode(False)  # as for the rest of the storage
    def keep_states(self, num_layers: int, hidden_size: int) -> None:
        """From now on keep the hidden states of so many layers with the entries of each token."""
        if self.states is None or self.states.shape[2:] != (num_layers, hidden_size):
            self.drop_retained()
            self.states = self._zeros(self.num_slots, self.capacity, num_layers, hidden_size)

    def read_states(self, sequence_id: int) -> Tensor | None:
        """The hidden states ``[length, layers, hidden]`` of a sequence's committed tokens, if they are kept."""
        slot = self._slot_of[sequence_id]
        return None if self.states is None else self.states[slot, : self._lengths[slot]].clone()

    def check_integrity(self) -> None:
        """Assert the invariants of the book-keeping (used by tests and the soak run)."""
        assert len(self._owners) == len(self._lengths) == len(self._slot_of)
        assert all(self._slot_of[owner] == slot for slot, owner in enumerate(self._owners))
        assert all(0 <= length <= min(self.max_len, self.capacity) for length in self._lengths)
        free = [slot for slot in range(self.num_open, self.num_slots) if slot not in self._retained]
        assert self.num_open + self.num_retained + len(free) == self.num_slots
        assert all(SHORTEST <= len(self._retained[slot]) <= self.capacity for slot in self._retained)
        assert self.num_retained <= self.max_retained
        assert self.allocated_bytes == sum(store.numel() * store.element_size() for store in self.stores)
        assert self.max_positions is None or self.num_slots * self.capacity <= self.max_positions

    # -- moving entries and slots ----------------------------------------------------------------------

    @property
    def _must_drop(self) -> bool:
        """No slot is free, and retained texts leave rather than that the storage grows."""
        retained, taken = self.num_retained, self.num_open + self.num_retained
        full = self.max_positions is not None and (taken + 1) * self.capacity > self.max_positions // RETAINED_SHARE
        return taken >= self.num_slots and retained > 0 and (full or retained >= self.max_retained)

    def _adopt(self, sequence_id: int, length: int) -> None:
        """The first slot behind those in use becomes a sequence's own."""
        self._slot_of[sequence_id] = self.num_open
        self._owners.append(sequence_id)
        self._lengths.append(length)

    def _take_over(self, sequence_id: int, source: int, length: int) -> None:
        """Open a sequence with the entries of a retained text, which is one no more."""
        self._retained.drop(source)
        slot = self.num_open
        if slot in self._retained:
            self.swap_entries(source, slot, length, len(self._retained[slot]))
            self._retained.rename(slot, source)
        elif slot != source:
            self.copy_entries(source, slot, length)
        self._adopt(sequence_id, length)

    def _leave(self, sequence_id: int, num_kept: int) -> int:
        """End a sequence; returns the slot that is then behind those in use, with its first entries in it."""
        hole, last = self._slot_of.pop(sequence_id), self.num_open - 1
        self.scratch_of.pop(sequence_id, None)
        if hole != last:
            length = self._lengths[last]
            if num_kept:
                self.swap_entries(hole, last, num_kept, length)
            else:
                self.copy_entries(last, hole, length)
            self._lengths[hole] = length
            self._owners[hole] = self._owners[last]
            self._slot_of[self._owners[hole]] = hole
            self.scratch_of.pop(self._owners[hole], None)
        self._lengths.pop()
        self._owners.pop()
        return last

    def _move_retained(self, slot: int) -> None:
        """To the first free slot."""
        free = next(i for i in range(self.num_open, self.num_slots) if i not in self._retained)
        self.copy_entries(slot, free, len(self._retained[slot]))
        self._retained.rename(slot, free)
