"""A small draft model in training: some layers of the target between the target's own embeddings and head.

It is taught the target's law behind every token (distillation, Hinton et al., 1503.02531; for drafting Zhou et
al., 2310.08461), which needs no draft of its own, so all places of a text are learnt in one pass. Embeddings, norm and
head stay the target's. Written as an ordinary folder of transformers, for ``method="draft_model"`` and other engines.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.errors import UnsupportedModelError
from foredraft.target.features import AFTER_NORM
from foredraft.target.kinds import describe
from foredraft.train.batches import Batch
from foredraft.train.options import TrainOptions
from foredraft.train.trainee import (
    Trainee,
    TrainTarget,
    TrainTexts,
    parameter_groups,
    soft_cross_entropy,
    target_law,
    taught_tokens,
)


def feature_layers(num_layers: int) -> tuple[int, ...]:
    return (AFTER_NORM,)


def make(target: TrainTarget, texts: TrainTexts, options: TrainOptions) -> DraftTrainee:
    return DraftTrainee(smaller_model(target, options.num_layers), taught_tokens(target, texts, options), target)


def check_target(target: TrainTarget) -> None:
    if not isinstance(getattr(target.model.base_model, "layers", None), nn.ModuleList):
        raise UnsupportedModelError(f"{describe(target.model)} has no list of layers to make a smaller model of")


def smaller_model(target: TrainTarget, num_layers: int) -> Any:
    """A float32 copy of the target with some of its layers."""
    layers = target.model.base_model.layers
    chosen = spread(len(layers), num_layers)
    base = target.model.base_model
    kept = base.layers
    base.layers = nn.ModuleList()  # so that the copy does not begin with all of them
    try:
        model = copy.deepcopy(target.model)
    finally:
        base.layers = kept
    model.base_model.layers = nn.ModuleList(copy.deepcopy(layers[i]) for i in chosen)
    for place, layer in enumerate(model.base_model.layers):
        layer.self_attn.layer_idx = place
    config = model.config.get_text_config()
    config.num_hidden_layers = len(chosen)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in chosen]
    return model.float()


def spread(num_layers: int, wanted: int) -> list[int]:
    """The first and the last layer, and others evenly between; one is the first."""
    wanted = min(wanted, num_layers)
    return sorted({round(i * (num_layers - 1) / max(1, wanted - 1)) for i in range(wanted)})


class DraftTrainee(Trainee):
    """A draft model in training; only its layers learn.

    Args:
        taught: tokens whose laws are compared, ``[tokens]``.
    """

    taught: Tensor

    def __init__(self, model: Any, taught: Tensor, target: TrainTarget):
        super().__init__()
        self.model = model.requires_grad_(False).train()
        model.base_model.layers.requires_grad_(True)
        self._dtype, self._tokenizer = target.embeddings.dtype, target.tokenizer
        self.register_buffer("taught", taught)

    def forward(self, batch: Batch, num_steps: int, generator: torch.Generator | None) -> Tensor:
        rows, places = batch.places()
        head = self.model.get_output_embeddings().weight
        law = target_law(batch.states(AFTER_NORM)[rows, places - 1].float(), head, self.taught)
        logits = self._states(batch)[rows, places - 1] @ head[self.taught].T
        return soft_cross_entropy(logits, law)

    def guesses(self, batch: Batch, num_tokens: int) -> Tensor:
        guesses = batch.token_ids.new_full((*batch.token_ids.shape, num_tokens), -1)
        rows, places = batch.places()
        said = self.model.get_output_embeddings()(self._states(batch)[rows, places - 1]).argmax(-1)
        for step in range(num_tokens):
            starts = places - step
            guesses[rows[starts >= 0], starts[starts >= 0], step] = said[starts >= 0]
        return guesses

    def parameter_groups(self, options: TrainOptions) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = parameter_groups(self, (), options)
        return groups

    def save(self, path: Path) -> None:
        copy.deepcopy(self.model).cpu().to(self._dtype).save_pretrained(path)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(path)

    def _states(self, batch: Batch) -> Tensor:
        """Behind the norm, ``[B, S, H]``; padding lies on the right, where no token looks."""
        states: Tensor = self.model.base_model(input_ids=batch.token_ids, use_cache=False).last_hidden_state
        return states
