"""An MLP speculator in training (Wertheimer et al., 2404.19124, section 3): all steps at once, on the target's law.

It begins as the target's own embeddings and head around projections that let states through. Learnt are the rows of
its head for frequent tokens; those of others are 0, and so many logits of 0 are in the law that it is taught.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.heads.mlp import MlpConfig, MlpSpeculator, of_step, save_mlp
from foredraft.target.features import AFTER_NORM
from foredraft.train.batches import Batch
from foredraft.train.options import TrainOptions
from foredraft.train.trainee import TrainTarget, TrainTexts, parameter_groups, soft_cross_entropy, taught_tokens
from foredraft.train.unrolled import UnrolledTrainee

MUCH_SOFTER = 0.08


def feature_layers(num_layers: int) -> tuple[int, ...]:
    return (AFTER_NORM,)


def make(target: TrainTarget, texts: TrainTexts, options: TrainOptions) -> MlpTrainee:
    vocab_size, size = target.embeddings.shape
    speculator = MlpSpeculator(
        MlpConfig(
            hidden_size=size,
            inner_size=size,
            vocab_size=vocab_size,
            num_steps=options.num_heads,
            tie_weights=options.tie_weights,
            scale_input=True,
        )
    )
    trainee = MlpTrainee(speculator, target, texts, options)
    start_from_target(trainee, target)
    return trainee


class MlpTrainee(UnrolledTrainee):
    """An MLP speculator in training."""

    taught: Tensor

    def __init__(self, speculator: MlpSpeculator, target: TrainTarget, texts: TrainTexts, options: TrainOptions):
        super().__init__(speculator, target, texts.scales((AFTER_NORM,)), options)
        self.register_buffer("taught", taught_tokens(target, texts, options))

    @property
    def token_ids(self) -> Tensor:
        return self.taught

    def logits(self, states: Tensor, step: int) -> Tensor:
        weight: Any = of_step(self.head.head, step).weight
        return F.linear(states, weight[self.taught])

    def loss(self, states: Tensor, step: int, law: Tensor, true: Tensor) -> Tensor:
        logits = self.logits(states, step)
        others = math.log(max(len(self.embeddings) - len(self.taught), 1e-9))  # so many times a logit of 0
        logits = torch.cat([logits, logits.new_full((len(logits), 1), others)], -1)
        return soft_cross_entropy(logits, F.pad(law, (0, 1)))

    def best(self, states: Tensor, step: int, labels: Tensor) -> Tensor:
        best = self.logits(states, step).max(-1)
        return torch.where(best.values > 0.0, self.taught[best.indices], -1)  # else one whose row is 0

    def forward(self, batch: Batch, num_steps: int, generator: torch.Generator | None) -> Tensor:
        return super().forward(batch, self.head.config.num_steps, generator)

    def guesses(self, batch: Batch, num_tokens: int) -> Tensor:
        guesses = super().guesses(batch, min(num_tokens, self.head.config.num_steps))
        return F.pad(guesses, (0, num_tokens - guesses.shape[-1]), value=-1)

    def parameter_groups(self, options: TrainOptions) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = parameter_groups(self, self.head.head.parameters(), options)
        return groups

    def save(self, path: Path) -> None:
        save_mlp(copy.deepcopy(self.head).cpu().to(self._dtype), path)


@torch.no_grad()
def start_from_target(trainee: MlpTrainee, target: TrainTarget) -> None:
    """Let each step begin as the target's head on the state before it.

    Much softer than that: GELU takes a state's negative half away, and what it cancelled stays.
    """
    speculator, size = trainee.head, trainee.head.config.inner_size
    embeddings, lm_head = target.embeddings.float(), target.lm_head.float()
    for embedding in speculator.emb:
        embedding.weight.copy_(embeddings * (size * embeddings.square().mean()).rsqrt())
    for projection in speculator.proj:
        projection.weight.copy_(torch.eye(size))
    for head in speculator.head:
        head.weight.zero_()
        head.weight[trainee.taught] = MUCH_SOFTER * trainee.scales * lm_head[trainee.taught]
