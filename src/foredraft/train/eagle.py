"""EAGLE-1 in training (Li et al., 2401.15077, section 3.2): the target's next state, and the law that follows from it.

Smooth L1 distance of states, and a tenth of the cross-entropy with the target's law. The paper unrolls one step; more
steps are those of HASS (Zhang et al., 2408.15766), where a head also learns from states that it has guessed. EAGLE-2
is the same head under other trees.

States, true and guessed ones, are divided by their scale, of which the layer without a norm knows nothing: written are
weights that do the same to states as they are.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.heads.eagle import EagleConfig, EagleHead
from foredraft.heads.eagle_format import save_eagle
from foredraft.target.features import AFTER_NORM
from foredraft.train.options import TrainOptions
from foredraft.train.trainee import TrainTarget, TrainTexts, soft_cross_entropy
from foredraft.train.unrolled import SharedHeadTrainee, llama_layer, pass_state_through

TOKEN_WEIGHT = 0.1


def feature_layers(num_layers: int) -> tuple[int, ...]:
    return (AFTER_NORM,)


def make(target: TrainTarget, texts: TrainTexts, options: TrainOptions) -> EagleTrainee:
    layer = llama_layer(target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        head = EagleHead(EagleConfig(layer=layer, vocab_size=layer.vocab_size))
    pass_state_through(head.fc)
    return EagleTrainee(head, target, texts, options)


class EagleTrainee(SharedHeadTrainee):
    """An EAGLE-1 head in training."""

    def logits(self, states: Tensor, step: int) -> Tensor:
        return super().logits(states * self.scales, step)

    def whole_logits(self, states: Tensor) -> Tensor:
        return super().whole_logits(states * self.scales)

    def loss(self, states: Tensor, step: int, law: Tensor, true: Tensor) -> Tensor:
        distance = F.smooth_l1_loss(states.float(), true, reduction="none").mean(-1).sum()
        return distance + TOKEN_WEIGHT * soft_cross_entropy(self.logits(states, step), law)

    def save(self, path: Path) -> None:
        head = copy.deepcopy(self.head).cpu()
        multiply_states(head, float(self.scales))
        save_eagle(head.to(self._dtype), path, self._verifier, num_tokens=4)


@torch.no_grad()
def multiply_states(head: EagleHead, by: float) -> None:
    """Let a head give ``by * h`` for ``by * f`` where it gave h for f; but for the norm's epsilon that is exact."""
    layer: Any = head.layers[0]
    head.fc.weight[:, : head.fc.out_features] *= by
    for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
        projection.weight /= by
    layer.self_attn.o_proj.weight *= by
    layer.mlp.down_proj.weight *= by
