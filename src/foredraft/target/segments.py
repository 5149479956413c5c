"""Attention by torch's own kernels: runs of neighbouring slots, padded to one query length, with masks.

tokens    [ r0 r0 | r1 | r2 r2 r2 | prompt prompt prompt ... ]
segments  [  slots 0..2, query length 3  ][ slot 3 alone     ]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from foredraft.target.layout import PassShape

LONG_ROW = 32
"""Rows with more tokens than this (prompts) get a segment of their own."""


@dataclass(slots=True)
class LaidRow:
    """A row in its place: ``tree_start`` is the place and position of the first node of its tree.

    ``num_fed`` nodes of the tree were fed by earlier passes. Positions are those of a slot that holds the whole text;
    ``position_offset`` is what they fall short of otherwise.
    """

    slot: int
    start: int
    tokens: list[int]
    parents: list[int]
    position_offset: int = 0
    offset: int = 0
    num_fed: int = 0

    @property
    def tree_start(self) -> int:
        return self.start + self.num_fed + len(self.tokens) - len(self.parents)

    @property
    def paths(self) -> list[list[int]]:
        """Per node the places of its ancestors and its own."""
        paths: list[list[int]] = []
        for node, parent in enumerate(self.parents):
            paths.append([*(paths[parent] if parent >= 0 else ()), self.tree_start + node])
        return paths

    @property
    def places(self) -> range:
        first = self.start + self.num_fed
        return range(first, first + len(self.tokens))

    @property
    def positions(self) -> list[int]:
        if not self.parents:
            return list(self.places)
        depths = [len(path) - 1 for path in self.paths[self.num_fed :]]
        return [*range(self.start, self.tree_start), *(self.tree_start + depth for depth in depths)]

    def fill_up(self, num_tokens: int) -> None:
        """Repeat the last token at the positions that follow."""
        self.tokens += self.tokens[-1:] * num_tokens
        if self.parents:
            last = len(self.parents) - 1
            self.parents += range(last, last + num_tokens)


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
    trees: list[TreeMask]
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
            for tree in self.trees:
                tree.hide(hidden, window)
            mask = torch.zeros((), dtype=dtype, device=keys.device).expand(hidden.shape)
            mask = mask.masked_fill(hidden, float("-inf")).expand(-1, 1, -1, group, -1)
            self.masks[key] = mask.reshape(self.num_rows, 1, self.num_queries * group, self.num_keys)
        return self.masks[key]


@dataclass(frozen=True, slots=True)
class TreeMask:
    """What the nodes of one row see of each other: ``is_ancestor [nodes of the pass, all nodes]``."""

    row: int
    first_query: int
    start: int
    depths: Tensor
    is_ancestor: Tensor

    def hide(self, hidden: Tensor, window: int | None) -> None:
        """Write the part of ``hidden [rows, 1, queries, 1, keys]`` that belongs to the tree."""
        among = ~self.is_ancestor
        num_queries, num_nodes = among.shape
        if window is not None:
            among = among | (self.depths[None, :] <= self.depths[-num_queries:, None] - window)
        queries, keys = (
            slice(self.first_query, self.first_query + num_queries),
            slice(self.start, self.start + num_nodes),
        )
        hidden[self.row, 0, queries, 0, keys] = among


def build_segments(rows: list[LaidRow], shape: PassShape, device: torch.device) -> list[Segment]:
    """The segments of rows in the order of their slots."""
    return [_segment(run, shape, device) for run in runs(rows)]


def runs(rows: list[LaidRow]) -> list[list[LaidRow]]:
    """Rows that share a segment."""
    found: list[list[LaidRow]] = []
    for row in rows:
        last = found[-1][-1] if found else None
        if last and max(len(last.tokens), len(row.tokens)) <= LONG_ROW and last.slot + 1 == row.slot:
            found[-1].append(row)
        else:
            found.append([row])
    return found


def most_keys(run: list[LaidRow], shape: PassShape) -> int:
    """Keys that a run's longest row needs when it is padded to the queries of the widest."""
    return max(row.places.start for row in run) + max(shape.min_queries, max(len(row.tokens) for row in run))


def _segment(run: list[LaidRow], shape: PassShape, device: torch.device) -> Segment:
    widths = [len(row.tokens) for row in run]
    num_queries = max(shape.min_queries, max(widths))
    positions = [row.positions for row in run]
    for row_positions in positions:
        row_positions += range(row_positions[-1] + 1, row_positions[-1] + 1 + num_queries - len(row_positions))
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
        num_keys=shape.num_keys(most_keys(run, shape)),
        query_positions=torch.tensor(positions, device=device),
        gather=gather,
        scatter=scatter,
        trees=[_tree_mask(i, row, device) for i, row in enumerate(run) if row.parents],
    )


def _tree_mask(index: int, row: LaidRow, device: torch.device) -> TreeMask:
    is_ancestor = torch.zeros(len(row.parents), len(row.parents), dtype=torch.bool)
    for node, path in enumerate(row.paths):
        is_ancestor[node, torch.tensor(path) - row.tree_start] = True
    depths = torch.tensor([len(path) - 1 for path in row.paths], device=device)
    first_query = row.tree_start - row.start
    return TreeMask(index, first_query, row.tree_start, depths, is_ancestor[row.num_fed :].to(device))
