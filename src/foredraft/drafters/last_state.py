"""Heads that look ahead from the last state that is known, without a cache: Medusa and the MLP speculator.

text      c0 .. c(n-2) c(n-1)          the state of c(n-2) is known, and c(n-1) was emitted from it
"""

from __future__ import annotations

from torch import Tensor

from foredraft.drafters.autoregressive import AutoregressiveDrafter
from foredraft.drafters.base import DraftRow


class LastStateDrafter(AutoregressiveDrafter):
    """Keeps the last state of each text.

    Args:
        vocab_size, token_ids: as for :class:`AutoregressiveDrafter`.
        num_steps: most tokens of a draft.
        max_len: most tokens of a text.
        feature_layers: the one whose states are kept.
    """

    def __init__(
        self,
        vocab_size: int,
        token_ids: Tensor | None,
        num_steps: int,
        max_len: int,
        feature_layers: tuple[int, ...],
    ):
        super().__init__(vocab_size, token_ids)
        self.num_steps, self.feature_layers = num_steps, feature_layers
        self._max_len = max_len
        self._last: dict[int, tuple[int, Tensor]] = {}  # the last state of each text, and how many there were

    def observe_features(self, sequence_id: int, token_ids: list[int], start: int, features: Tensor) -> None:
        self._last[sequence_id] = start + len(features), features[-1, 0]

    def forget(self, sequence_id: int) -> None:
        self._last.pop(sequence_id, None)

    def _room(self, row: DraftRow, text: list[int]) -> int:
        known, _ = self._last.get(row.sequence_id, (0, None))
        if not known or known != len(text) - 1:
            return 0
        return max(0, min(row.num_draft_tokens, self.num_steps, self._max_len - len(text)))

    def _catch_up(self, sequence_id: int, text: list[int]) -> None:
        """There is no cache."""
