"""The same number of draft tokens in every step."""

from __future__ import annotations

from collections.abc import Sequence


class FixedPolicy:
    """Plans ``num_draft_tokens`` for every sequence, as far as there is room."""

    def __init__(self, num_draft_tokens: int):
        self.num_draft_tokens = num_draft_tokens

    def plan(self, rooms: Sequence[int]) -> list[int]:
        """Draft lengths for sequences that may still emit ``rooms`` tokens each.

        One place is left for the token that verification always adds.
        """
        return [max(0, min(self.num_draft_tokens, room - 1)) for room in rooms]
