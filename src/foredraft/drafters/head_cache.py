"""A draft head with its cache, and the target's states that it has not read yet.

    text       c0  c1  c2  c3  c4  c5           c5 was emitted last, its state is not known yet
    states     f0  f1  f2  f3  f4
    rows       c1  c2  c3  c4  c5               row i reads f_i and c_{i+1}; its keys lie at place i
               f0  f1  f2  f3  f4
    draft                          d1  d2       read the head's own states; behind the committed rows, never kept

After each step the target's true states arrive; they wait until there is something to draft, or until there are many.
A step without a draft therefore costs nothing but memory, and when drafting begins again the head catches up first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.heads.native_chain import GivenRows, Noises
from foredraft.heads.runner import HeadRunner
from foredraft.target.layout import PassRow

MOST_WAITING = 256
"""States of a sequence that wait; more are fed at once, all but the last."""
CHUNK = 512


Branches = list[list[list[tuple[int, float]]]]
"""Of each draft, at each place, its likeliest tokens with their probabilities; see ``NativeChain``."""


@dataclass(slots=True)
class _Waiting:
    """States ``[n, layers * hidden]`` of the text's tokens from ``end - count`` to ``end - 1``."""

    end: int
    count: int = 0
    parts: list[Tensor] = field(default_factory=list)

    def take(self, count: int) -> Tensor:
        """The first of them, which wait no more."""
        states = self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)
        self.parts = [states[count:]] if count < self.count else []
        self.count -= count
        return states[:count]


@dataclass(frozen=True, slots=True)
class Nodes:
    """Draft tokens of a sequence to be fed.

    Attributes:
        parents: of all nodes fed since the text, these among them; indices in the order of feeding.
        sources: for each token the row of the last pass whose state it reads, among the rows of its sequence.
    """

    sequence_id: int
    token_ids: list[int]
    parents: list[int]
    sources: list[int]


class HeadCache:
    """Keeps a head's cache in step with the text, and runs its drafts."""

    def __init__(self, runner: HeadRunner):
        self.runner = runner
        self._waiting: dict[int, _Waiting] = {}
        self._back: Tensor | None = None  # states of the last pass
        self._first_row: dict[int, int] = {}  # where in it a sequence's rows begin

    def add(self, sequence_id: int, token_ids: list[int], start: int, features: Tensor) -> None:
        """Take states of committed tokens; behind a gap the head's memory begins anew, what is known is left out."""
        waiting = self._waiting.get(sequence_id)
        if waiting is not None and start < waiting.end:
            start, features = waiting.end, features[waiting.end - start :]
        if waiting is None or waiting.end != start:
            self.forget(sequence_id)
            self.runner.slots.open(sequence_id)
            waiting = self._waiting[sequence_id] = _Waiting(start)
        waiting.parts.append(features.flatten(1))
        waiting.end += len(features)
        waiting.count += len(features)
        if waiting.count > MOST_WAITING:
            self._feed(sequence_id, waiting, token_ids)

    def num_known(self, sequence_id: int) -> int:
        """How many tokens of the text have had their states brought here."""
        waiting = self._waiting.get(sequence_id)
        return 0 if waiting is None else waiting.end

    def num_waiting(self, sequence_id: int) -> int:
        """How many of them have not been read."""
        waiting = self._waiting.get(sequence_id)
        return 0 if waiting is None else waiting.count

    def forget(self, sequence_id: int) -> None:
        if self._waiting.pop(sequence_id, None) is not None:
            self.runner.slots.close(sequence_id)

    @torch.inference_mode()
    def read(self, texts: Sequence[tuple[int, list[int]]]) -> Tensor:
        """Feed what waits of some sequences, given with their texts; logits behind each."""
        rows, states, ends = self._take(texts)
        back, normed = self.runner.forward(rows, states)
        self._note(rows, back[ends])
        return self.runner.logits(normed[[ends[self._first_row[sequence_id]] for sequence_id, _ in texts]])

    @torch.inference_mode()
    def begin(
        self, texts: Sequence[tuple[int, list[int]]], num_steps: int, num_best: int = 1, noises: Noises | None = None
    ) -> Branches:
        """As :meth:`read` and then :meth:`follow` from the likeliest token, in one call."""
        runner = self.runner
        assert runner.chain is not None
        rows, states, ends = self._take(texts)
        slots = runner.slots
        places = [(slots.slot(row.sequence_id), slots.length(row.sequence_id) + len(row.token_ids)) for row in rows]
        slots.reserve(max(place for _, place in places) + num_steps)  # a layout holds for the capacity of the moment
        given = GivenRows(*runner.lay_out(rows, states), torch.tensor(ends))
        back = states.new_empty(len(rows), states.shape[1])
        added = [noises[row.sequence_id] for row in rows] if noises else ()
        found = runner.chain(slots, given, places, [0] * len(rows), back, num_steps, num_best, added)
        self._note(rows, back)
        return [found[self._first_row[sequence_id]] for sequence_id, _ in texts]

    def _take(self, texts: Sequence[tuple[int, list[int]]]) -> tuple[list[PassRow], Tensor, list[int]]:
        """What waits of some sequences: rows in the order of slots, the states beside their tokens, where rows end."""
        rows: list[PassRow] = []
        states: list[Tensor] = []
        ends: list[int] = []
        for sequence_id, token_ids in sorted(texts, key=lambda item: self.runner.slots.slot(item[0])):
            waiting = self._waiting[sequence_id]
            if waiting.count > CHUNK:
                self._feed(sequence_id, waiting, token_ids)
            rows.append(self._row(sequence_id, waiting, token_ids, waiting.count))
            states.append(waiting.take(waiting.count))
            ends.append(len(rows[-1].token_ids) + (ends[-1] if ends else -1))
        return rows, self.runner.head.combine(states[0] if len(states) == 1 else torch.cat(states)), ends

    def _note(self, rows: Sequence[PassRow], back: Tensor) -> None:
        """These rows are committed; ``back`` are the head's states behind them."""
        for row in rows:
            self.runner.slots.commit(row.sequence_id, len(row.token_ids))
        self._back = back
        self._first_row = {row.sequence_id: i for i, row in enumerate(rows)}

    @torch.inference_mode()
    def extend(self, drafts: Sequence[Nodes]) -> Tensor:
        """Feed draft tokens behind the text and the nodes before them; logits behind each, in the order given."""
        assert self._back is not None
        in_order = sorted(drafts, key=lambda nodes: self.runner.slots.slot(nodes.sequence_id))
        sources = [self._first_row[nodes.sequence_id] + source for nodes in in_order for source in nodes.sources]
        rows = [
            PassRow(
                nodes.sequence_id, nodes.token_ids, 0, nodes.parents, num_fed=len(nodes.parents) - len(nodes.token_ids)
            )
            for nodes in in_order
        ]
        self._back, normed = self.runner.forward(rows, self._back[sources])
        first = 0
        for row in rows:
            self._first_row[row.sequence_id] = first
            first += len(row.token_ids)
        if len(drafts) > 1:
            places = [self._first_row[nodes.sequence_id] + i for nodes in drafts for i in range(len(nodes.token_ids))]
            normed = normed[places]
        return self.runner.logits(normed)

    @torch.inference_mode()
    def follow(
        self, drafts: Sequence[tuple[int, list[int]]], num_steps: int, num_best: int = 1, noises: Noises | None = None
    ) -> Branches:
        """Draft on behind the last token of each draft, whose own tokens but the last are fed; one call.

        Args:
            drafts: each a sequence and the tokens of its draft, which is a chain.
        """
        assert self._back is not None
        assert self.runner.chain is not None
        slots = self.runner.slots
        places = [(slots.slot(i), slots.length(i) + len(drawn) - 1) for i, drawn in drafts]
        states = self._back[[self._first_row[i] for i, _ in drafts]]
        last, added = [drawn[-1] for _, drawn in drafts], [noises[i] for i, _ in drafts] if noises else ()
        found = self.runner.chain(slots, None, places, last, states, num_steps, num_best, added)
        self._back, self._first_row = states, {i: row for row, (i, _) in enumerate(drafts)}
        return found

    @torch.inference_mode()
    def _feed(self, sequence_id: int, waiting: _Waiting, token_ids: list[int]) -> None:
        """Feed and commit all that waits but the last, whose logits a draft will want."""
        while waiting.count > 1:
            count = min(CHUNK, waiting.count - 1)
            row = self._row(sequence_id, waiting, token_ids, count)
            self.runner.forward([row], self.runner.head.combine(waiting.take(count)))
            self.runner.slots.commit(sequence_id, count)

    @staticmethod
    def _row(sequence_id: int, waiting: _Waiting, token_ids: list[int], count: int) -> PassRow:
        start = waiting.end - waiting.count
        return PassRow(sequence_id, token_ids[start + 1 : start + 1 + count], 0)
