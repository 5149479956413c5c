"""How the rows of one pass lie in the flat token axis, and what attention needs to know of them.

All rows of a pass are laid end to end in one sequence of T tokens, so linear layers do no padding.

    tokens    [ r0 r0 | r1 | r2 r2 r2 | prompt prompt prompt ... ]

A draft that branches lies in the slot node by node behind the pending tokens. A node's position is that of its
depth, shared by all nodes of the depth; it attends to the text before the tree and to its own ancestors.

    pending a | draft b, c (children of a), d (child of b)
    place     10 | 11 12 13
    position  10 | 11 11 12
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from foredraft.target.segments import LaidRow, Segment, build_segments, most_keys, runs
from foredraft.target.slots import KVSlots


@dataclass(frozen=True, kw_only=True, slots=True)
class PassShape:
    """The shapes to which passes keep so that a row's bits depend on nothing but its own past.

    Attributes:
        min_tokens: a pass holds at least this many tokens (one token runs another kernel).
        min_queries: no sequence enters attention with fewer queries.
        key_block: attention reads keys in multiples of this, or in the smaller ``short_keys``.
        short_keys: lengths below ``key_block`` that give the same bits.
    """

    min_tokens: int = 2
    min_queries: int = 2
    key_block: int = 512
    short_keys: tuple[int, ...] = (128, 256)

    def num_keys(self, needed: int) -> int:
        """The number of keys to read when ``needed`` are."""
        for size in self.short_keys:
            if needed <= size:
                return size
        return -(-needed // self.key_block) * self.key_block


@dataclass(frozen=True, slots=True)
class PassRow:
    """One sequence's part of a pass: its next tokens, and for how many of the last ones logits are wanted.

    ``parents`` says that the last ``len(parents)`` tokens are a tree: of each the index of its parent among them, a
    smaller one, or -1 for a child of the token before the tree. ``position_offset`` is how many tokens of the text the
    slot lacks: positions are by so much larger than places. It is for chains. ``num_fed`` says that so many of the
    tree's first nodes lie in the slot already, from passes since the last commit; all tokens are then nodes.
    """

    sequence_id: int
    token_ids: list[int]
    num_logits: int
    parents: Sequence[int] = ()
    position_offset: int = 0
    num_fed: int = 0


@dataclass(frozen=True)
class PassLayout:
    """Everything that the layers of one pass share.

    ``rows`` is ``[num_rows, 6]``: first token, number of tokens, slot, place of the first token, first position of
    the draft tree and its first row in ``paths``, or -1 for a chain. ``paths [nodes, depth]`` holds for each node of
    a tree the places of its ancestors and its own. ``queries``, if it is there, gets each layer's queries
    ``[T, query_heads, D]`` and their scale; ``hidden_states`` likewise the states ``[T, hidden]`` of tapped layers,
    those of ``wanted_states`` at least.
    """

    slots: KVSlots
    shape: PassShape
    native: ctypes.CDLL | None
    token_ids: Tensor
    positions: Tensor
    write_index: Tensor
    logits_index: Tensor
    num_logits: int
    rows: Tensor
    paths: Tensor
    laid: list[LaidRow]
    queries: dict[int, tuple[Tensor, float]] | None = None
    hidden_states: dict[int, Tensor] | None = None
    wanted_states: tuple[int, ...] = ()

    @cached_property
    def segments(self) -> list[Segment]:
        """The runs of slots, for attention by torch's own kernels."""
        return build_segments(self.laid, self.shape, self.slots.device)


def build_layout(
    rows: Sequence[PassRow], slots: KVSlots, shape: PassShape, native: ctypes.CDLL | None = None
) -> PassLayout:
    """Lay out ``rows`` in the order of their slots; logits keep the order of ``rows``.

    A pass of fewer than ``shape.min_tokens`` tokens is filled up with copies of its last token at the
    positions that follow; they land in scratch space.
    """
    laid = [_laid(row, slots) for row in rows]
    ends = _place(laid, shape.min_tokens)
    in_order = sorted(laid, key=lambda row: row.slot)
    slots.reserve(max(shape.num_keys(most_keys(run, shape)) for run in runs(in_order)))
    num_logits = sum(row.num_logits for row in rows)
    logits = [i for row, end in zip(rows, ends, strict=True) for i in range(end - row.num_logits, end)]
    logits += logits[-1:] * (shape.min_tokens - num_logits)
    top = slots.max_len - 1
    tokens = [token for row in in_order for token in row.tokens]
    positions = [min(position + row.position_offset, top) for row in in_order for position in row.positions]
    index = [slots.capacity * row.slot + place for row in in_order for place in row.places]
    flat = torch.tensor([tokens, positions, index], device=slots.device)
    about: list[list[int]] = []
    paths: list[list[int]] = []
    for row in in_order:
        first_path = len(paths) if row.parents else -1
        about.append([row.offset, len(row.tokens), row.slot, row.places.start, row.tree_start, first_path])
        paths += row.paths
    depth = max(map(len, paths), default=0)
    padded = [path + [0] * (depth - len(path)) for path in paths]
    return PassLayout(
        slots=slots,
        shape=shape,
        native=native,
        token_ids=flat[0:1],
        positions=flat[1:2],
        write_index=flat[2],
        logits_index=torch.tensor(logits, dtype=torch.int64, device=slots.device),
        num_logits=num_logits,
        rows=torch.tensor(about),
        paths=torch.tensor(padded, dtype=torch.int64).reshape(len(paths), depth),
        laid=in_order,
    )


def _laid(row: PassRow, slots: KVSlots) -> LaidRow:
    """A row at its slot; a draft that is a chain goes on behind what was fed of it, like text."""
    slot, start, tokens = slots.slot(row.sequence_id), slots.length(row.sequence_id), list(row.token_ids)
    if is_chain(row.parents):
        return LaidRow(slot, start + row.num_fed, tokens, [], row.position_offset)
    assert not row.position_offset, "trees lie behind a whole text"
    assert not row.num_fed or len(tokens) + row.num_fed == len(row.parents), "text behind a draft"
    return LaidRow(slot, start, tokens, list(row.parents), num_fed=row.num_fed)


def is_chain(parents: Sequence[int]) -> bool:
    return list(parents) == list(range(-1, len(parents) - 1))


def _place(laid: list[LaidRow], min_tokens: int) -> list[int]:
    """Set the rows' offsets, fill up the last one; returns where each row's own tokens end."""
    offset = 0
    for row in sorted(laid, key=lambda row: row.slot):
        row.offset = offset
        offset += len(row.tokens)
    ends = [row.offset + len(row.tokens) for row in laid]
    if offset < min_tokens:
        max(laid, key=lambda row: row.slot).fill_up(min_tokens - offset)
    return ends
