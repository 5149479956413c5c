"""The target drafts for itself: what ``early_exit``, ``layer_skip`` and ``sparse_kv`` have in common.

    slot   [ committed text | last, d1, d2 ...      ]
                              drafted with some of the layers; the target's pass overwrites it

The layers that draft see the keys and values that the whole model left of the text, so there is no cache of their own
and no prompt to feed. A step that ends a prompt drafts nothing: the prompt's end is not in the cache yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from foredraft.drafters.autoregressive import AutoregressiveDrafter, Chain
from foredraft.drafters.base import DraftRow
from foredraft.target.forward import TargetModel
from foredraft.target.layout import PassRow
from foredraft.target.slots import KVSlots
from foredraft.types import Draft


class SelfDrafter(AutoregressiveDrafter):
    """Drafts with the target's weights when all but the last token of a text is in the target's cache.

    Args:
        forward: one pass of the drafting model; as :meth:`TargetModel.forward`.
        slots: where it keeps its keys and values; between steps nothing of a draft is left there.
    """

    def __init__(self, target: TargetModel, forward: Callable[[Sequence[PassRow]], Tensor], slots: KVSlots):
        super().__init__(target.vocab_size)
        self._text_slots, self._forward, self._slots = target.slots, forward, slots
        self._max_len = target.max_model_len
        self._starts: dict[int, int] = {}  # lengths before the draft under way

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        draft = super().propose(rows)
        for sequence_id, start in self._starts.items():
            self._slots.truncate(sequence_id, start)
        self._starts.clear()
        return draft

    def _room(self, row: DraftRow, text: list[int]) -> int:
        if self._text_slots.length(row.sequence_id) != len(text) - 1:
            return 0
        return max(0, min(row.num_draft_tokens, self._max_len - len(text)))

    def _catch_up(self, sequence_id: int, text: list[int]) -> None:
        """The target's cache is that of the drafting layers too."""

    def _next_logits(self, chains: list[Chain]) -> Tensor:
        """Feed the last token of each text with its draft; the slots run ahead until the draft is complete."""
        passes = []
        for chain in chains:
            key, tokens = chain.row.sequence_id, [*chain.text[-1:], *chain.token_ids]
            self._starts.setdefault(key, self._slots.length(key))
            offset = len(chain.text) + len(chain.token_ids) - 1 - self._slots.length(key)
            passes.append(PassRow(key, tokens[-1:], 1, (), offset))
        logits = self._forward(passes)
        for part in passes:
            self._slots.commit(part.sequence_id, 1)
        return logits
