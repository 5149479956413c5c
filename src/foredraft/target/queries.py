"""What the last tokens of a prompt attend with, noted in the target's own passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.target.layout import PassLayout, PassRow


class QueryLog:
    """The attention queries of the last tokens that were fed of each sequence, until they are taken.

    Args:
        num_tokens: how many tokens' queries are kept of a sequence.
    """

    def __init__(self, num_tokens: int):
        self.num_tokens = num_tokens
        self._held: dict[int, list[Tensor] | None] = {}

    def note(self, rows: Sequence[PassRow], layout: PassLayout) -> None:
        """Take the queries of a pass that has run; of a draft's tokens none."""
        assert layout.queries is not None
        by_slot = {layout.slots.slot(row.sequence_id): row for row in rows}
        for laid in layout.laid:
            row = by_slot[laid.slot]
            held = self._held.get(row.sequence_id, [])
            if held is None:
                continue
            end = laid.offset + len(row.token_ids) - max(0, row.num_logits - 1)
            start = max(laid.offset, end - self.num_tokens)
            new = [layout.queries[layer] for layer in range(len(layout.queries))]
            parts = [query[start:end] * scaling for query, scaling in new]
            if held and end - start < self.num_tokens:
                parts = [torch.cat([old, part])[-self.num_tokens :] for old, part in zip(held, parts, strict=True)]
            self._held[row.sequence_id] = parts

    def take(self, sequence_id: int) -> list[Tensor] | None:
        """Per layer ``[at most num_tokens, query_heads, D]``, scaled as for the softmax; noted no more, given once."""
        held = self._held.get(sequence_id)
        self._held[sequence_id] = None
        return held

    def forget(self, sequence_id: int) -> None:
        self._held.pop(sequence_id, None)
