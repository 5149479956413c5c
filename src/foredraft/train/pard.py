"""PARD in training (An et al., 2504.18583): a small draft model that also learns to fill in masks.

It begins as ``draft`` does, with some of the target's layers, and is taught the same laws; behind every prefix that is
kept stand masks as well, so that one pass drafts several tokens. How the rows lie and which are dropped is told at the
top of :mod:`foredraft.heads.pard`; a depth that is kept less often counts less.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.heads.pard import IGNORED, ParallelRows, parallel_rows, save_pard
from foredraft.target.features import AFTER_NORM
from foredraft.train.batches import Batch
from foredraft.train.draft import DraftTrainee, check_target, feature_layers, smaller_model
from foredraft.train.options import TrainOptions
from foredraft.train.trainee import TrainTarget, TrainTexts, soft_cross_entropy, target_law, taught_tokens
from foredraft.train.vocabulary import mask_token

__all__ = ["PardTrainee", "check_target", "feature_layers", "make"]


def make(target: TrainTarget, texts: TrainTexts, options: TrainOptions) -> PardTrainee:
    mask = mask_token(texts.token_counts(), target.embeddings, target.always_drafted)
    model = smaller_model(target, options.num_layers)
    return PardTrainee(model, taught_tokens(target, texts, options), target, mask, options)


class PardTrainee(DraftTrainee):
    """A parallel draft model in training.

    Args:
        mask: id of the token that stands for a mask.
    """

    def __init__(self, model: Any, taught: Tensor, target: TrainTarget, mask: int, options: TrainOptions):
        super().__init__(model, taught, target)
        self._mask, self._num_places, self._keep = mask, options.num_places, options.step_decay

    def forward(self, batch: Batch, num_steps: int, generator: torch.Generator | None) -> Tensor:
        draw = generator or torch.Generator().manual_seed(0)
        rows = parallel_rows(batch.labels, self._mask, self._num_places, keep=self._keep, generator=draw)
        texts, at = (rows.labels != IGNORED).nonzero(as_tuple=True)
        head = self.model.get_output_embeddings().weight
        law = target_law(batch.states(AFTER_NORM)[texts, rows.places[at]].float(), head, self.taught)
        logits = self._states_of(rows, batch)[texts, at] @ head[self.taught].T
        return soft_cross_entropy(logits, law)

    def guesses(self, batch: Batch, num_tokens: int) -> Tensor:
        guesses = batch.token_ids.new_full((*batch.token_ids.shape, num_tokens), -1)
        num_places = min(num_tokens, self._num_places)
        rows = parallel_rows(batch.labels, self._mask, num_places, keep=1.0)
        states, head = self._states_of(rows, batch), self.model.get_output_embeddings()
        begins, is_right = rows.places - rows.depths + 1, batch.is_label.clone()  # of each round, so far
        for depth in range(num_places):
            texts, at = (is_right[:, begins] & (rows.depths == depth)).nonzero(as_tuple=True)
            said = head(states[texts, at]).argmax(-1)
            guesses[texts, begins[at], depth] = said
            is_right = torch.zeros_like(is_right)
            is_right[texts, begins[at]] = said == batch.token_ids[texts, rows.places[at] + 1]
        return guesses

    def save(self, path: Path) -> None:
        model = copy.deepcopy(self.model).cpu().to(self._dtype)
        save_pard(model, path, self._mask, self._num_places, self._tokenizer)

    def _states_of(self, rows: ParallelRows, batch: Batch) -> Tensor:
        """Behind the norm, ``[B, N, H]``."""
        states: Tensor = self.model.base_model(
            input_ids=rows.input_ids(batch.token_ids),
            position_ids=rows.positions,
            attention_mask=rows.attention_mask,
            use_cache=False,
        ).last_hidden_state
        return states
