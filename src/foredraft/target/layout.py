"""How the rows of one pass lie in the flat token axis, and what attention needs to know of them.

All rows of a pass are laid end to end in one sequence of T tokens, so linear layers do no padding. Attention
works on segments: runs of neighbouring slots, padded to one query length.

    tokens    [ r0 r0 | r1 | r2 r2 r2 | prompt prompt prompt ... ]
    segments  [  slots 0..2, query length 3  ][ slot 3 alone     ]
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from foredraft.target.slots import KVSlots

LONG_ROW = 32
"""Rows with more tokens than this (prompts) get a segment of their own."""


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
    """One sequence's part of a pass: its next tokens, and for how many of the last ones logits are wanted."""

    sequence_id: int
    token_ids: list[int]
    num_logits: int


@dataclass(slots=True)
class Segment:
    """A run of slots that attention handles at once.

    ``gather`` maps ``[rows * num_queries]`` padded places to tokens, ``scatter`` maps the segment's tokens
    back; both are None where nothing is padded.
    """

    first_slot: int
    num_rows: int
    first_token: int
    last_token: int
    num_queries: int
    num_keys: int
    query_positions: Tensor
    gather: Tensor | None
    scatter: Tensor | None
    masks: dict[tuple[int | None, int, torch.dtype], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
        """Additive mask ``[rows, 1, num_queries * group, num_keys]``: 0 where a query may look, else -inf."""
        key = (window, group, dtype)
        if key not in self.masks:
            keys = torch.arange(self.num_keys, device=self.query_positions.device)
            queries = self.query_positions[:, None, :, None, None]
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            mask = torch.zeros((), dtype=dtype, device=keys.device).expand(hidden.shape)
            mask = mask.masked_fill(hidden, float("-inf")).expand(-1, 1, -1, group, -1)
            self.masks[key] = mask.reshape(self.num_rows, 1, self.num_queries * group, self.num_keys)
        return self.masks[key]


@dataclass(frozen=True)
class PassLayout:
    """Everything that the layers of one pass share.

    ``rows`` is ``[num_rows, 4]``: first token, number of tokens, slot and position of the first token.
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

    @cached_property
    def segments(self) -> list[Segment]:
        """The runs of slots, for attention by torch's own kernels."""
        rows = [_Laid(slot, start, [0] * count, first) for first, count, slot, start in self.rows.tolist()]
        return [_segment(run, self.shape, self.slots.device) for run in _runs(rows)]


@dataclass(slots=True)
class _Laid:
    slot: int
    start: int
    tokens: list[int]
    offset: int = 0


def build_layout(
    rows: Sequence[PassRow], slots: KVSlots, shape: PassShape, native: ctypes.CDLL | None = None
) -> PassLayout:
    """Lay out ``rows`` in the order of their slots; logits keep the order of ``rows``.

    A pass of fewer than ``shape.min_tokens`` tokens is filled up with copies of its last token at the
    positions that follow; they land in scratch space.
    """
    laid = [_Laid(slots.slot(r.sequence_id), slots.length(r.sequence_id), list(r.token_ids)) for r in rows]
    in_slot_order = sorted(laid, key=lambda row: row.slot)
    num_tokens = sum(len(row.tokens) for row in laid)
    num_logits = sum(row.num_logits for row in rows)
    logits: list[int] = []
    wanted = {id(row): source.num_logits for row, source in zip(laid, rows, strict=True)}
    if num_tokens < shape.min_tokens:
        last = in_slot_order[-1]
        padding = shape.min_tokens - num_tokens
        last.tokens += [last.tokens[-1]] * padding
    else:
        last, padding = None, 0
    offset = 0
    for row in in_slot_order:
        row.offset = offset
        offset += len(row.tokens)
    for row in laid:
        end = row.offset + len(row.tokens) - (padding if row is last else 0)
        logits += range(end - wanted[id(row)], end)
    if logits:
        logits += [logits[-1]] * (shape.min_tokens - num_logits)
    slots.reserve(max(shape.num_keys(_most_keys(run, shape)) for run in _runs(in_slot_order)))

    capacity, top = slots.capacity, slots.max_len - 1
    tokens: list[int] = []
    positions: list[int] = []
    index: list[int] = []
    for row in in_slot_order:
        tokens += row.tokens
        end = row.start + len(row.tokens)
        positions += range(row.start, end) if end <= top + 1 else (min(p, top) for p in range(row.start, end))
        index += range(row.slot * capacity + row.start, row.slot * capacity + end)
    flat = torch.tensor([tokens, positions, index], device=slots.device)
    return PassLayout(
        slots=slots,
        shape=shape,
        native=native,
        token_ids=flat[0:1],
        positions=flat[1:2],
        write_index=flat[2],
        logits_index=torch.tensor(logits, dtype=torch.int64, device=slots.device),
        num_logits=num_logits,
        rows=torch.tensor([[row.offset, len(row.tokens), row.slot, row.start] for row in in_slot_order]),
    )


def _runs(rows: list[_Laid]) -> list[list[_Laid]]:
    runs: list[list[_Laid]] = []
    for row in rows:
        short = len(row.tokens) <= LONG_ROW
        if runs and short and len(runs[-1][-1].tokens) <= LONG_ROW and runs[-1][-1].slot + 1 == row.slot:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def _most_keys(run: list[_Laid], shape: PassShape) -> int:
    """Keys that a run's longest row needs when it is padded to the queries of the widest."""
    return max(row.start for row in run) + max(shape.min_queries, max(len(row.tokens) for row in run))


def _segment(run: list[_Laid], shape: PassShape, device: torch.device) -> Segment:
    widths = [len(row.tokens) for row in run]
    num_queries = max(shape.min_queries, max(widths))
    starts = torch.tensor([row.start for row in run], device=device)
    gather = scatter = None
    if any(width != num_queries for width in widths):
        places: list[int] = []
        back: list[int] = []
        for i, row in enumerate(run):
            width = len(row.tokens)
            places += range(row.offset, row.offset + width)
            places += [row.offset + width - 1] * (num_queries - width)
            back += range(i * num_queries, i * num_queries + width)
        gather, scatter = torch.tensor(places, device=device), torch.tensor(back, device=device)
    return Segment(
        first_slot=run[0].slot,
        num_rows=len(run),
        first_token=run[0].offset,
        last_token=run[-1].offset + widths[-1],
        num_queries=num_queries,
        num_keys=shape.num_keys(_most_keys(run, shape)),
        query_positions=starts[:, None] + torch.arange(num_queries, device=device),
        gather=gather,
        scatter=scatter,
    )
