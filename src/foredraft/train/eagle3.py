"""EAGLE-3 in training (Li et al., 2503.01840, section 3): training-time test against the target's own law.

The states that it reads are divided by a fixed scale for each layer, so that one learning rate fits all of them; the
scales go into ``fc`` when the head is written, and the engine knows nothing of them.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from foredraft.heads.eagle3 import Eagle3Config, Eagle3Head
from foredraft.heads.eagle3_format import default_feature_layers, save_eagle3
from foredraft.target.features import AFTER_NORM
from foredraft.train.batches import Batch
from foredraft.train.options import TrainOptions
from foredraft.train.trainee import Trainee, TrainTarget, TrainTexts, parameter_groups, soft_cross_entropy, target_law
from foredraft.train.vocabulary import default_size, draft_vocabulary

SOFTER = 0.4
LAYER_OPTIONS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "vocab_size",
)


def feature_layers(num_layers: int) -> tuple[int, ...]:
    return (*_read(num_layers), AFTER_NORM)


def make(target: TrainTarget, texts: TrainTexts, options: TrainOptions) -> Eagle3Trainee:
    config = target.model.config.get_text_config()
    known = {name: getattr(config, name) for name in LAYER_OPTIONS if getattr(config, name, None) is not None}
    layers = _read(config.num_hidden_layers)

    def head_config(draft_vocab_size: int) -> Eagle3Config:
        return Eagle3Config(
            layer=LlamaConfig(**known, num_hidden_layers=1, tie_word_embeddings=False),
            draft_vocab_size=draft_vocab_size,
            target_vocab_size=config.vocab_size,
            target_hidden_size=config.hidden_size,
            feature_layers=layers,
        )

    size = options.draft_vocab_size
    if size is None:
        with torch.device("meta"):
            body = Eagle3Head(head_config(1))
        size = default_size(sum(p.numel() for p in body.parameters()), config.hidden_size, config.vocab_size)
    vocabulary = draft_vocabulary(texts.token_counts(), size, target.always_drafted)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        head = Eagle3Head(head_config(len(vocabulary)))
    head.set_vocabulary(vocabulary)
    scales = texts.scales(layers)
    start_from_target(head, target)
    return Eagle3Trainee(head, target, scales, options)


class Eagle3Trainee(Trainee):
    """An EAGLE-3 head in training.

    Args:
        scales: of the states of each layer that the head reads, ``[layers]``.
    """

    scales: Tensor
    embeddings: Tensor
    target_head: Tensor

    def __init__(self, head: Eagle3Head, target: TrainTarget, scales: Tensor, options: TrainOptions):
        super().__init__()
        self.head = head
        self._verifier, self._dtype = target.verifier, target.embeddings.dtype
        self._noise, self._dropout, self._decay = options.noise, options.dropout, options.step_decay
        self.register_buffer("scales", scales)
        self.register_buffer("embeddings", target.embeddings, persistent=False)
        self.register_buffer("target_head", target.lm_head, persistent=False)

    def forward(self, batch: Batch, num_steps: int, generator: torch.Generator | None) -> Tensor:
        states = self._scaled(batch)
        if generator is not None and self._noise:
            states = states + self._noise * torch.randn(states.shape, generator=generator).to(states)
        if generator is not None and self._dropout:
            kept = torch.rand(states.shape, generator=generator).to(states) >= self._dropout
            states = states * kept / (1.0 - self._dropout)
        rows, places = batch.places(first=2)
        can_draft = self.head.t2d[batch.token_ids[rows, places]]
        rows, places = rows[can_draft], places[can_draft]
        law = target_law(batch.states(AFTER_NORM)[rows, places - 1], self.target_head, self.head.token_ids)
        loss = states.new_zeros(())
        for step, normed in enumerate(self.head.unroll_states(states, batch.token_ids, self.embeddings, num_steps)):
            reached = places >= 2 + step
            logits = self.head.logits(normed[rows[reached], places[reached] - 2 - step])
            loss = loss + self._decay**step * soft_cross_entropy(logits, law[reached])
        return loss

    def guesses(self, batch: Batch, num_tokens: int) -> Tensor:
        guesses = batch.token_ids.new_full((*batch.token_ids.shape, num_tokens), -1)
        rows, places = batch.places(first=2)
        unrolled = self.head.unroll_states(self._scaled(batch), batch.token_ids, self.embeddings, num_tokens)
        for step, normed in enumerate(unrolled):
            best = self.head.logits(normed[rows, places - 2]).argmax(-1)
            guesses[rows, places, step] = self.head.token_ids[best]
        return guesses

    def parameter_groups(self, options: TrainOptions) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = parameter_groups(self, self.head.lm_head.parameters(), options)
        return groups

    def save(self, path: Path) -> None:
        head = copy.deepcopy(self.head).cpu()
        each = self.scales.cpu().repeat_interleave(head.config.target_hidden_size)
        with torch.no_grad():
            head.fc.weight /= each
        save_eagle3(head.to(self._dtype), path, self._verifier, num_tokens=4)

    def _scaled(self, batch: Batch) -> Tensor:
        states = batch.states(*self.head.config.feature_layers).float()
        return states / self.scales.repeat_interleave(self.head.config.target_hidden_size)


@torch.no_grad()
def start_from_target(head: Eagle3Head, target: TrainTarget) -> None:
    """Let a head begin with what leads from the highest state that it reads to the target's vocabulary.

    The state goes through as it is, into the target's norm and head, with softer logits, since at first they are those
    of the wrong place. The decoder layer begins at random: in trials of 50 updates that learnt faster than the
    target's last layer. Longer ones were not compared.
    """
    size = head.config.layer.hidden_size
    head.fc.weight[:, -size:] += torch.eye(size)
    head.lm_head.weight.copy_(target.lm_head[head.token_ids])
    norm = getattr(target.model.base_model, "norm", None)
    if norm is not None and norm.weight.shape == head.norm.weight.shape:
        head.norm.weight.copy_(SOFTER * norm.weight)


def _read(num_layers: int) -> tuple[int, ...]:
    """As published heads do, for targets deep enough; distinct layers that exist for shallower ones."""
    wanted = default_feature_layers(num_layers) if num_layers > 5 else (0, num_layers // 2, num_layers)
    return tuple(sorted({max(0, layer) for layer in wanted}))
