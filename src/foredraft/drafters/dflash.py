"""DFlash (Chen et al., 2602.06036): a head that fills a block of masks; see :mod:`foredraft.heads.dflash`.

text      c0 .. c(n-2)  c(n-1)  M  M  M
entries   f0 .. f(n-2)                      made of the target's states, which wait until there is something to draft
block                   c(n-1)  M  M  M     read anew in each draft
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters.base import Drafter, DraftRow
from foredraft.drafters.parallel import ParallelDrafter, ParallelTreeDrafter, places_of_draft
from foredraft.heads.block_runner import BlockRunner
from foredraft.heads.checkpoint import read_head
from foredraft.heads.dflash_convention import check_layers
from foredraft.heads.dflash_format import read_dflash
from foredraft.target.forward import TargetModel

MOST_WAITING = 256
"""States of a sequence that wait; more become entries at once."""


@dataclass(slots=True)
class _Waiting:
    """States ``[n, layers * hidden]`` of the text's tokens before ``end`` that are no entries yet."""

    end: int
    parts: list[Tensor] = field(default_factory=list)


class DFlashDrafter(ParallelDrafter):
    """Drafts chains.

    A row drafts once the states of all of its text but the last token have come; the step that ends a prompt drafts
    nothing. Behind a gap in the states the head's memory begins anew.

    Args:
        vocab_size: of the target.
        num_places: how far it looks ahead.
    """

    def __init__(self, runner: BlockRunner, vocab_size: int, num_places: int):
        token_ids = runner.head.token_ids
        super().__init__(vocab_size, token_ids)
        self.feature_layers = runner.config.feature_layers
        self.runner, self.num_places = runner, num_places
        self._waiting: dict[int, _Waiting] = {}

    def observe_features(self, sequence_id: int, token_ids: list[int], start: int, features: Tensor) -> None:
        waiting = self._waiting.get(sequence_id)
        if waiting is None or waiting.end != start:
            self.forget(sequence_id)
            self.runner.slots.open(sequence_id)
            waiting = self._waiting[sequence_id] = _Waiting(start)
        waiting.parts.append(features.flatten(1))
        waiting.end += len(features)
        if sum(map(len, waiting.parts)) > MOST_WAITING:
            self._catch_up_all([sequence_id])

    def forget(self, sequence_id: int) -> None:
        if self._waiting.pop(sequence_id, None) is not None:
            self.runner.slots.close(sequence_id)

    def num_unread(self, row: DraftRow) -> int:
        waiting = self._waiting.get(row.sequence_id)
        return 0 if waiting is None else sum(map(len, waiting.parts))

    def _room(self, row: DraftRow, text: list[int]) -> int:
        waiting = self._waiting.get(row.sequence_id)
        if waiting is None or waiting.end != len(text) - 1:
            return 0
        return max(0, min(row.num_draft_tokens, self.num_places, self.runner.max_len - len(text)))

    def _catch_up(self, sequence_id: int, text: list[int]) -> None:
        """What waits becomes entries for all rows at once."""

    def _run(self, rows: list[DraftRow], counts: list[int]) -> Tensor:
        self._catch_up_all([row.sequence_id for row in rows])
        anchors = [(row.sequence_id, row.token_ids[-1], count) for row, count in zip(rows, counts, strict=True)]
        return self.runner.fill(anchors)

    def _catch_up_all(self, sequence_ids: list[int]) -> None:
        waiting = [(sequence_id, self._waiting[sequence_id].parts) for sequence_id in sequence_ids]
        parts = [(sequence_id, torch.cat(states)) for sequence_id, states in waiting if states]
        if parts:
            self.runner.add(parts)
        for _, states in waiting:
            states.clear()


class DFlashTreeDrafter(ParallelTreeDrafter, DFlashDrafter):
    """Drafts trees (DDTree, 2604.12989)."""

    def __init__(self, runner: BlockRunner, vocab_size: int, num_places: int, width: int):
        super().__init__(runner, vocab_size, num_places)
        self.width, self.depth = width, num_places


def build(speculative: SpeculativeConfig, config: EngineConfig, target: TargetModel, tokenizer: Any) -> Drafter:
    assert speculative.model is not None
    files = read_head(speculative.model, config.cache_dir)
    head = read_dflash(files, target.hidden_size, target.vocab_size, len(target.layers))
    runner = BlockRunner(head, target)
    check_layers(head, target, tokenizer, speculative.model)
    num_places = places_of_draft(speculative, "dflash", head.config.block_size - 1)
    drafter: DFlashDrafter
    if speculative.tree_width == 1:
        drafter = DFlashDrafter(runner, target.vocab_size, num_places)
    else:
        drafter = DFlashTreeDrafter(runner, target.vocab_size, num_places, speculative.tree_width)
    drafter.cost = runner.num_parameters / target.num_parameters
    return drafter
