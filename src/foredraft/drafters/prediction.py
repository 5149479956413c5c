"""Predicted outputs: the request brings the text that its answer is expected to be like (OpenAI's ``prediction``).

prediction   def area ( r ) : return 3.14 * r * r
answer       def area ( radius ) : ...
                        ^ left    ^ found again: the next draft is "return 3.14 * r ..."
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from foredraft.config import SpeculativeConfig
from foredraft.drafters.base import Drafter, DraftRow, Offer, chain_draft
from foredraft.types import Draft

LONGEST_SUFFIX = 32
"""Tokens of the answer that are compared to find a place."""
SURE_AFTER = 4
"""Agreeing tokens after which a place is no guess any more."""


class PredictionCursor:
    """Where in a prediction the answer stands.

    While the answer follows the prediction, so does the pointer. When it departs, the pointer stays, and every step
    looks for the longest suffix of the answer at or behind it, the nearest one of several. A place is a guess until
    some tokens agree there; only then does the pointer move, so a wrong guess loses nothing.

    Attributes:
        num_agreeing: tokens before the place where the answer is thought to go on which are those of the answer.
    """

    def __init__(self, prediction: Sequence[int]):
        self._prediction = np.asarray(prediction, dtype=np.int64)
        order = np.argsort(self._prediction, kind="stable")
        tokens, first = np.unique(self._prediction[order], return_index=True)
        self._places = dict(zip(tokens.tolist(), np.split(order, first[1:]), strict=True))
        self._pointer = 0
        self._next: int | None = 0  # where the answer is thought to go on; None: nowhere
        self.num_agreeing = 0

    def advance(self, answer: Sequence[int], num_new: int) -> None:
        """Follow the last ``num_new`` tokens of the answer."""
        for end in range(len(answer) - num_new + 1, len(answer) + 1):
            at = self._next
            if at is not None and at < len(self._prediction) and self._prediction[at] == answer[end - 1]:
                self._next, self.num_agreeing = at + 1, self.num_agreeing + 1
            else:
                self._find(answer[max(0, end - LONGEST_SUFFIX) : end])
            if self._next is not None and self.num_agreeing >= SURE_AFTER:
                self._pointer = self._next

    def continuation(self, num_tokens: int) -> list[int]:
        """Up to ``num_tokens`` tokens of the prediction that come next."""
        if self._next is None:
            return []
        expected: list[int] = self._prediction[self._next : self._next + num_tokens].tolist()
        return expected

    def _find(self, suffix: Sequence[int]) -> None:
        """Go behind the longest match of the end of ``suffix``, the nearest at or behind the pointer."""
        places = self._places.get(suffix[-1], np.empty(0, dtype=np.int64))
        places = places[np.searchsorted(places, self._pointer) :]
        self._next, self.num_agreeing = None, 0
        while len(places):
            self._next, self.num_agreeing = int(places[0]) + 1, self.num_agreeing + 1
            if self.num_agreeing == len(suffix):
                break
            places = places[places >= self.num_agreeing]
            places = places[self._prediction[places - self.num_agreeing] == suffix[-1 - self.num_agreeing]]


class PredictionDrafter(Drafter):
    """Drafts what the request's prediction says comes next; requests without one get no draft. Deterministic."""

    def __init__(self) -> None:
        self._cursors: dict[int, PredictionCursor] = {}
        self._known: dict[int, int] = {}  # tokens of the text that a cursor has seen; the prompt at first

    def offers(self, rows: Sequence[DraftRow]) -> list[Offer]:
        counts = [len(self._continuation(row)) for row in rows]
        cursors = [self._cursors.get(row.sequence_id) for row in rows]
        agreeing = [cursor.num_agreeing if cursor else 0 for cursor in cursors]
        return [Offer(count, match_len, is_free=True) for count, match_len in zip(counts, agreeing, strict=True)]

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        return chain_draft([self._continuation(row) for row in rows])

    def observe(self, sequence_id: int, token_ids: list[int]) -> None:
        if sequence_id in self._cursors:
            num_new = len(token_ids) - self._known[sequence_id]
            self._cursors[sequence_id].advance(token_ids, num_new)
            self._known[sequence_id] = len(token_ids)

    def forget(self, sequence_id: int) -> None:
        self._cursors.pop(sequence_id, None)
        self._known.pop(sequence_id, None)

    def _continuation(self, row: DraftRow) -> list[int]:
        if not row.prediction_token_ids:
            return []
        if row.sequence_id not in self._cursors:
            self._cursors[row.sequence_id] = PredictionCursor(row.prediction_token_ids)
            self._known[row.sequence_id] = len(row.token_ids)
        return self._cursors[row.sequence_id].continuation(row.num_draft_tokens)


def build(speculative: SpeculativeConfig, *_: Any) -> Drafter:
    return PredictionDrafter()
