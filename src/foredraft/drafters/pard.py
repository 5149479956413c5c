"""PARD (An et al., 2504.18583): a draft model that fills in masks; see :mod:`foredraft.heads.pard`.

fed      c(m) .. c(n-1)  M  M  M        what the cache lacks of the text, and masks
kept     c(m) .. c(n-1)                 the masks' entries are scratch, and overwritten by the next pass
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters.base import Drafter, DraftRow
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.parallel import ParallelDrafter, ParallelTreeDrafter, places_of_draft
from foredraft.drafters.vocabulary import check_same_vocabulary
from foredraft.errors import IncompatibleDrafterError
from foredraft.heads.pard import mask_token_of
from foredraft.target.forward import TargetModel
from foredraft.target.kinds import describe
from foredraft.target.layout import PassRow
from foredraft.target.load import load_target


class PardDrafter(ParallelDrafter, DraftModelDrafter):
    """Drafts chains.

    Args:
        model: the parallel draft model with its own slots.
        vocab_size: of the target.
        num_places: how far it looks ahead.

    Raises:
        IncompatibleDrafterError: the draft model folds what it is fed into a state, masks too.
    """

    def __init__(self, model: TargetModel, vocab_size: int, mask_token_id: int, num_places: int):
        if not model.supports_trees:
            raise IncompatibleDrafterError(
                f"{describe(model.model)} keeps a state that cannot be cut, so masks cannot be fed to it and dropped; "
                "use a draft model of attention layers"
            )
        super().__init__(model, vocab_size)
        self.num_places = num_places
        self._mask = mask_token_id

    def _room(self, row: DraftRow, text: list[int]) -> int:
        return min(super()._room(row, text), self.num_places)

    def _run(self, rows: list[DraftRow], counts: list[int]) -> Tensor:
        new = {row.sequence_id: row.token_ids[len(self._fed[row.sequence_id]) :] for row in rows}
        logits = self.model.forward(
            [
                PassRow(row.sequence_id, [*new[row.sequence_id], *[self._mask] * (count - 1)], count)
                for row, count in zip(rows, counts, strict=True)
            ]
        )
        for sequence_id, tokens in new.items():
            self.model.slots.commit(sequence_id, len(tokens))
            self._fed[sequence_id] += tokens
        return self._fit(logits)


class PardTreeDrafter(ParallelTreeDrafter, PardDrafter):
    """Drafts trees."""

    def __init__(self, model: TargetModel, vocab_size: int, mask_token_id: int, num_places: int, width: int):
        super().__init__(model, vocab_size, mask_token_id, num_places)
        self.width, self.depth = width, num_places


def build(speculative: SpeculativeConfig, config: EngineConfig, target: TargetModel, tokenizer: Any) -> Drafter:
    assert speculative.model is not None
    draft, loaded = load_target(speculative.model, config)
    check_same_vocabulary(tokenizer, loaded.tokenizer, target.vocab_size, draft.vocab_size, speculative.model)
    mask = mask_token_of(loaded.model.config, loaded.path, draft.vocab_size)
    num_places = places_of_draft(speculative, "pard", getattr(loaded.model.config, "para_num", None))
    drafter: PardDrafter
    if speculative.tree_width == 1:
        drafter = PardDrafter(draft, target.vocab_size, mask, num_places)
    else:
        drafter = PardTreeDrafter(draft, target.vocab_size, mask, num_places, speculative.tree_width)
    drafter.cost = draft.num_parameters / target.num_parameters
    return drafter
