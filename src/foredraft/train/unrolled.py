"""What heads have in common that read the target's state and then states of their own: EAGLE, MTP, MLP speculator.

In training each is unrolled from all places of a text at once: step j, row i reads the text's token i + 1 + j and is
compared with the law that the target had behind it, for token i + 2 + j (``heads.recurrent``).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig

from foredraft.target.features import AFTER_NORM
from foredraft.train.batches import Batch
from foredraft.train.options import TrainOptions
from foredraft.train.scaled import ScaledTrainee, layer_options
from foredraft.train.trainee import TrainTarget, TrainTexts, soft_cross_entropy, target_law, taught_tokens


class UnrolledTrainee(ScaledTrainee):
    """A head that is unrolled in training, by its ``unroll_states``."""

    @property
    @abstractmethod
    def token_ids(self) -> Tensor:
        """Tokens whose laws are compared, ``[tokens]``."""

    @abstractmethod
    def logits(self, states: Tensor, step: int) -> Tensor:
        """Of :attr:`token_ids`, ``[N, tokens]``, from what the head's ``unroll_states`` gave at a step, ``[N, H]``."""

    def best(self, states: Tensor, step: int, labels: Tensor) -> Tensor:
        """What the engine drafts, ``[N]``, right where it is the label ``[N]``."""
        return self.token_ids[self.logits(states, step).argmax(-1)]

    def loss(self, states: Tensor, step: int, law: Tensor, true: Tensor) -> Tensor:
        """Summed over rows.

        Args:
            law: of :attr:`token_ids`, ``[N, tokens]``.
            true: the target's states that it came from, divided by the first scale, ``[N, H]``.
        """
        return soft_cross_entropy(self.logits(states, step), law)

    def can_learn(self, token_ids: Tensor) -> Tensor:
        """Which labels ``[N]`` teach something."""
        return torch.ones_like(token_ids, dtype=torch.bool)

    def forward(self, batch: Batch, num_steps: int, generator: torch.Generator | None) -> Tensor:
        states = self.states(batch, generator)
        rows, places = batch.places(first=2)
        can_learn = self.can_learn(batch.token_ids[rows, places])
        rows, places = rows[can_learn], places[can_learn]
        true = batch.states(AFTER_NORM)[rows, places - 1]
        law = target_law(true, self.target_head, self.token_ids)
        true = true.float() / self.scales[0]
        loss = states.new_zeros(())
        for step, normed in enumerate(self.head.unroll_states(states, batch.token_ids, self.embeddings, num_steps)):
            reached = places >= 2 + step
            guessed = normed[rows[reached], places[reached] - 2 - step]
            loss = loss + self._decay**step * self.loss(guessed, step, law[reached], true[reached])
        return loss

    def guesses(self, batch: Batch, num_tokens: int) -> Tensor:
        guesses = batch.token_ids.new_full((*batch.token_ids.shape, num_tokens), -1)
        rows, places = batch.places(first=2)
        unrolled = self.head.unroll_states(self.states(batch), batch.token_ids, self.embeddings, num_tokens)
        labels = F.pad(batch.token_ids, (0, num_tokens))
        for step, normed in enumerate(unrolled):
            guesses[rows, places, step] = self.best(normed[rows, places - 2], step, labels[rows, places + step])
        return guesses


class SharedHeadTrainee(UnrolledTrainee):
    """A head on the state that the target's lm_head reads, which it uses too.

    Args:
        texts: in which the tokens were counted that are taught.
    """

    taught: Tensor

    def __init__(self, head: Any, target: TrainTarget, texts: TrainTexts, options: TrainOptions):
        super().__init__(head, target, texts.scales((AFTER_NORM,)), options)
        self.register_buffer("taught", taught_tokens(target, texts, options))

    @property
    def token_ids(self) -> Tensor:
        return self.taught

    def logits(self, states: Tensor, step: int) -> Tensor:
        return F.linear(states, self.target_head[self.taught].to(states))

    def best(self, states: Tensor, step: int, labels: Tensor) -> Tensor:
        """Guesses that are right among the taught tokens are made once more among all of them."""
        best = super().best(states, step, labels)
        right = best == labels
        best[right] = self.whole_logits(states[right]).argmax(-1)
        return best

    def whole_logits(self, states: Tensor) -> Tensor:
        """Of all tokens, ``[N, V]``."""
        return F.linear(states, self.target_head.to(states))


def llama_layer(target: TrainTarget) -> LlamaConfig:
    """The configuration of one Llama layer of the target's sizes."""
    return LlamaConfig(**layer_options(target), num_hidden_layers=1, tie_word_embeddings=False)


@torch.no_grad()
def pass_state_through(linear: torch.nn.Linear) -> None:
    """Let a projection that reads a state last begin with that state as it is."""
    size = linear.out_features
    linear.weight[:, -size:] += torch.eye(size)
