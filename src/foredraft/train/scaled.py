"""What heads have in common in training that read the target's states.

The states are divided by a fixed scale for each layer, so that one learning rate fits all of them; the scales go into
the weights when the head is written, and the engine knows nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.train.batches import Batch
from foredraft.train.options import TrainOptions
from foredraft.train.trainee import Trainee, TrainTarget, TrainTexts, parameter_groups
from foredraft.train.vocabulary import default_size, draft_vocabulary

SOFTER = 0.4
"""Of the target's logits, with which a head begins that says at first what the target says one place before."""

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


class ScaledTrainee(Trainee):
    """A head that reads states divided by their scales, which are found in the texts.

    Args:
        head: with ``config.feature_layers``.
        scales: of the states of each layer that the head reads, ``[layers]``.
    """

    scales: Tensor
    embeddings: Tensor
    target_head: Tensor

    def __init__(self, head: Any, target: TrainTarget, scales: Tensor, options: TrainOptions):
        super().__init__()
        self.head = head
        self._verifier, self._dtype = target.verifier, target.embeddings.dtype
        self._noise, self._dropout, self._decay = options.noise, options.dropout, options.step_decay
        self.register_buffer("scales", scales)
        self.register_buffer("embeddings", target.embeddings, persistent=False)
        self.register_buffer("target_head", target.lm_head, persistent=False)

    def states(self, batch: Batch, generator: torch.Generator | None = None) -> Tensor:
        """What the head reads, ``[B, S, layers * H]``, with noise and gaps if there is a generator of them."""
        states = batch.states(*self.head.config.feature_layers).float()
        states = states / self.scales.repeat_interleave(states.shape[-1] // len(self.scales))
        if generator is not None and self._noise:
            states = states + self._noise * torch.randn(states.shape, generator=generator).to(states)
        if generator is not None and self._dropout:
            kept = torch.rand(states.shape, generator=generator).to(states) >= self._dropout
            states = states * kept / (1.0 - self._dropout)
        return states

    def parameter_groups(self, options: TrainOptions) -> list[dict[str, Any]]:
        own: Any = getattr(self.head, "lm_head", None)
        groups: list[dict[str, Any]] = parameter_groups(self, own.parameters() if own else (), options)
        return groups


def layer_options(target: TrainTarget) -> dict[str, Any]:
    """Of a decoder layer of the target's sizes, in transformers' names."""
    config = target.model.config.get_text_config()
    return {name: getattr(config, name) for name in LAYER_OPTIONS if getattr(config, name, None) is not None}


def head_vocabulary(
    head_of: Callable[[int], nn.Module], target: TrainTarget, texts: TrainTexts, options: TrainOptions
) -> Tensor:
    """Tokens that a head can draft, ascending: the most frequent ones, by default as many as keep the head small.

    Args:
        head_of: makes a head with a draft vocabulary of so many tokens.
    """
    size, config = options.draft_vocab_size, target.model.config.get_text_config()
    if size is None:
        with torch.device("meta"):
            num_parameters = sum(parameter.numel() for parameter in head_of(1).parameters())
        size = default_size(num_parameters, config.hidden_size, config.vocab_size)
    return draft_vocabulary(texts.token_counts(), size, target.always_drafted)


@torch.no_grad()
def begin_with_targets_head(head: Any, target: TrainTarget) -> None:
    """Let a head with a draft vocabulary begin with the target's norm and projection; with softer logits, since at
    first they are those of the wrong place."""
    head.lm_head.weight.copy_(target.lm_head[head.token_ids])
    norm = getattr(target.model.base_model, "norm", None)
    if norm is not None and norm.weight.shape == head.norm.weight.shape:
        head.norm.weight.copy_(SOFTER * norm.weight)
