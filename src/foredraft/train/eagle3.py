"""EAGLE-3 in training (Li et al., 2503.01840, section 3): training-time test against the target's own law.

The states that it reads are divided by a fixed scale for each layer, so that one learning rate fits all of them; the
scales go into ``fc`` when the head is written, and the engine knows nothing of them.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor

from foredraft.heads.eagle3 import Eagle3Config, Eagle3Head
from foredraft.heads.eagle3_format import default_feature_layers, save_eagle3
from foredraft.target.features import AFTER_NORM
from foredraft.train.options import TrainOptions
from foredraft.train.scaled import begin_with_targets_head, head_vocabulary
from foredraft.train.trainee import TrainTarget, TrainTexts
from foredraft.train.unrolled import UnrolledTrainee, llama_layer, pass_state_through


def feature_layers(num_layers: int) -> tuple[int, ...]:
    return (*_read(num_layers), AFTER_NORM)


def make(target: TrainTarget, texts: TrainTexts, options: TrainOptions) -> Eagle3Trainee:
    config = target.model.config.get_text_config()
    layers = _read(config.num_hidden_layers)

    def head_config(draft_vocab_size: int) -> Eagle3Config:
        return Eagle3Config(
            layer=llama_layer(target),
            draft_vocab_size=draft_vocab_size,
            target_vocab_size=config.vocab_size,
            target_hidden_size=config.hidden_size,
            feature_layers=layers,
        )

    vocabulary = head_vocabulary(lambda size: Eagle3Head(head_config(size)), target, texts, options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        head = Eagle3Head(head_config(len(vocabulary)))
    head.set_vocabulary(vocabulary)
    start_from_target(head, target)
    return Eagle3Trainee(head, target, texts.scales(layers), options)


class Eagle3Trainee(UnrolledTrainee):
    """An EAGLE-3 head in training."""

    @property
    def token_ids(self) -> Tensor:
        ids: Tensor = self.head.token_ids
        return ids

    def can_learn(self, token_ids: Tensor) -> Tensor:
        can_draft: Tensor = self.head.t2d[token_ids]
        return can_draft

    def logits(self, states: Tensor, step: int) -> Tensor:
        out: Tensor = self.head.logits(states)
        return out

    def save(self, path: Path) -> None:
        head = copy.deepcopy(self.head).cpu()
        each = self.scales.cpu().repeat_interleave(head.config.target_hidden_size)
        with torch.no_grad():
            head.fc.weight /= each
        save_eagle3(head.to(self._dtype), path, self._verifier, num_tokens=4)


def start_from_target(head: Eagle3Head, target: TrainTarget) -> None:
    """Let a head begin with what leads from the highest state that it reads to the target's vocabulary.

    The state goes through as it is, into the target's norm and head. The decoder layer begins at random: in trials of
    50 updates that learnt faster than the target's last layer. Longer ones were not compared.
    """
    pass_state_through(head.fc)
    begin_with_targets_head(head, target)


def _read(num_layers: int) -> tuple[int, ...]:
    """As published heads do, for targets deep enough; distinct layers that exist for shallower ones."""
    wanted = default_feature_layers(num_layers) if num_layers > 5 else (0, num_layers // 2, num_layers)
    return tuple(sorted({max(0, layer) for layer in wanted}))
