"""Prompt lookup: propose what followed the last words when they stood here before (Saxena 2023).

... return [row for row in rows if row]   ...   return [row
                        ^ continuation          ^ suffix, also found here
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foredraft.config import SpeculativeConfig
from foredraft.drafters.base import Drafter, DraftRow, chain_draft
from foredraft.types import Draft


class NGramIndex:
    """Where each n-gram of a growing text ends, for all n from ``min_n`` to ``max_n``.

    The longest suffix that occurred before wins. It is copied from its latest place if enough tokens follow
    there, else from its earliest. A step costs a few dictionary look-ups whatever the length.
    """

    def __init__(self, min_n: int, max_n: int):
        self.min_n, self.max_n = min_n, max_n
        self._tokens: list[int] = []
        self._indexed = 0
        self._latest: dict[tuple[int, ...], int] = {}
        self._earliest: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens of the text beyond those already known.

        The n-grams that end with the last token are left out until a token follows them, so a suffix never
        finds itself.
        """
        self._tokens.extend(token_ids[len(self._tokens) :])
        for end in range(self._indexed + 1, len(self._tokens)):
            for n in range(self.min_n, min(self.max_n, end) + 1):
                gram = tuple(self._tokens[end - n : end])
                self._latest[gram] = end
                self._earliest.setdefault(gram, end)
        self._indexed = max(self._indexed, len(self._tokens) - 1)

    def continuation(self, num_tokens: int) -> list[int]:
        """Up to ``num_tokens`` tokens that followed the longest known suffix; empty if there is none."""
        tokens = self._tokens
        for n in range(min(self.max_n, len(tokens) - 1), self.min_n - 1, -1):
            gram = tuple(tokens[-n:])
            at = self._latest.get(gram)
            if at is not None:
                if at + num_tokens > len(tokens):
                    at = self._earliest[gram]
                return tokens[at : at + num_tokens]
        return []


class NGramDrafter(Drafter):
    """Drafts from the sequence's own text. Deterministic; state per sequence only."""

    instant = True

    def __init__(self, prompt_lookup_min: int, prompt_lookup_max: int):
        self._range = (prompt_lookup_min, prompt_lookup_max)
        self._indexes: dict[int, NGramIndex] = {}

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        drafts = []
        for row in rows:
            index = self._indexes.setdefault(row.sequence_id, NGramIndex(*self._range))
            index.extend(row.token_ids)
            drafts.append(index.continuation(row.num_draft_tokens) if row.num_draft_tokens else [])
        return chain_draft(drafts)

    def forget(self, sequence_id: int) -> None:
        self._indexes.pop(sequence_id, None)


def build(speculative: SpeculativeConfig, *_: Any) -> Drafter:
    return NGramDrafter(speculative.prompt_lookup_min, speculative.prompt_lookup_max)
