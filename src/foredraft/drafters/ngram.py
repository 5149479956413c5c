"""Prompt lookup: propose what followed the last words when they stood here before (Saxena 2023).

... return [row for row in rows if row]   ...   return [row
                        ^ continuation          ^ suffix, also found here
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any

from foredraft.config import SpeculativeConfig
from foredraft.drafters.base import Drafter, DraftRow, Offer, chain_draft
from foredraft.types import Draft

LONGEST_MATCH = 16
"""Agreeing tokens that are counted."""
COPY_RATES = (0.12, 0.30, 0.52, 0.65, 0.85)
"""Chance that a copied token is right behind 0, 1, 2, 3 and more agreeing tokens (SmolLM2-135M-Instruct on code edits,
summaries and stories; docs/log.md)."""


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

    def continuation(self, num_tokens: int) -> tuple[list[int], int]:
        """Up to ``num_tokens`` tokens that followed the longest known suffix; empty if there is none.

        With them the number of tokens before that agree there, beyond ``max_n`` too; 0 if it is a single one that
        stood at several places.
        """
        tokens = self._tokens
        for n in range(min(self.max_n, len(tokens) - 1), self.min_n - 1, -1):
            gram = tuple(tokens[-n:])
            at = self._latest.get(gram)
            if at is not None:
                if at + num_tokens > len(tokens):
                    at = self._earliest[gram]
                unclear = n == 1 and self._latest[gram] != self._earliest[gram]
                return tokens[at : at + num_tokens], 0 if unclear else self._match_len(at, n)
        return [], 0

    def _match_len(self, at: int, known: int) -> int:
        """How many tokens before ``at`` are the last ones of the text, at least ``known``."""
        tokens = self._tokens
        longest = min(at, LONGEST_MATCH)
        while known < longest and tokens[at - 1 - known] == tokens[-1 - known]:
            known += 1
        return known


def copy_probs(match_len: int, num_tokens: int) -> list[float]:
    """Chance that tokens 1 .. ``num_tokens`` of a copy are all accepted; each accepted one is one more that agrees."""
    rates = (COPY_RATES[min(match_len + i, len(COPY_RATES) - 1)] for i in range(num_tokens))
    return list(accumulate(rates, mul))


class NGramDrafter(Drafter):
    """Drafts from the sequence's own text. Deterministic; state per sequence only."""

    def __init__(self, prompt_lookup_min: int, prompt_lookup_max: int):
        self._range = (prompt_lookup_min, prompt_lookup_max)
        self._indexes: dict[int, NGramIndex] = {}

    def offers(self, rows: Sequence[DraftRow]) -> list[Offer]:
        return [Offer(len(tokens), match_len, is_free=True) for tokens, match_len in map(self._find, rows)]

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        found = [self._find(row) for row in rows]
        path_probs = [copy_probs(match_len, len(tokens)) for tokens, match_len in found]
        return chain_draft([tokens for tokens, _ in found], path_probs=path_probs)

    def _find(self, row: DraftRow) -> tuple[list[int], int]:
        index = self._indexes.setdefault(row.sequence_id, NGramIndex(*self._range))
        index.extend(row.token_ids)
        return index.continuation(row.num_draft_tokens) if row.num_draft_tokens else ([], 0)

    def forget(self, sequence_id: int) -> None:
        self._indexes.pop(sequence_id, None)


def build(speculative: SpeculativeConfig, *_: Any) -> Drafter:
    return NGramDrafter(speculative.prompt_lookup_min, speculative.prompt_lookup_max)
