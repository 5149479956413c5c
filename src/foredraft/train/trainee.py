"""What the training loop needs to know of a draft module; a method is a file that says it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.target.loader import LoadedModel
from foredraft.train.batches import Batch
from foredraft.train.dataset import TextStore
from foredraft.train.options import TrainOptions
from foredraft.train.vocabulary import TAUGHT, draft_vocabulary


@dataclass(frozen=True, slots=True)
class TrainTarget:
    """The target as training sees it.

    Attributes:
        model: of transformers, on the CPU.
        name: what the user wrote.
        always_drafted: tokens that every draft vocabulary has: those that end a text, and the marks of a chat.
    """

    model: Any
    name: str
    always_drafted: tuple[int, ...]
    tokenizer: Any = None

    @classmethod
    def of(cls, loaded: LoadedModel) -> TrainTarget:
        tokenizer: Any = loaded.tokenizer
        template = str(getattr(tokenizer, "chat_template", None) or "")
        special = [] if tokenizer is None else zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        marks = {token_id for text, token_id in special if text in template}
        return cls(loaded.model, loaded.name, tuple(sorted(marks | set(loaded.eos_token_ids))), tokenizer)

    @property
    def embeddings(self) -> Tensor:
        """``[V, H]``."""
        weight: Tensor = self.model.get_input_embeddings().weight.detach()
        return weight

    @property
    def lm_head(self) -> Tensor:
        """``[V, H]``."""
        weight: Tensor = self.model.get_output_embeddings().weight.detach()
        return weight

    @property
    def verifier(self) -> dict[str, Any]:
        """How checkpoints name the target."""
        return {"name_or_path": self.name, "architectures": list(self.model.config.architectures or [])}


@dataclass(frozen=True, slots=True)
class TrainTexts:
    """The texts of a run: some of a store's, which may have grown since.

    Attributes:
        kept, held: indices of those to train on, and to measure on.
    """

    store: TextStore
    kept: list[int]
    held: list[int]

    def token_counts(self) -> Tensor:
        """How often each token occurs in the answers that are trained on, ``[V]``."""
        counts = torch.zeros(self.store.meta.vocab_size, dtype=torch.int64)
        for i in self.kept:
            answer = self.store.token_ids(i)[self.store.num_prompt_tokens(i) :]
            counts += torch.bincount(answer, minlength=len(counts))
        return counts

    def scales(self, layers: tuple[int, ...], most_texts: int = 64) -> Tensor:
        """The median over tokens of the states' root mean square, ``[len(layers)]``.

        A median, because a text's first token is an attention sink with a state hundreds of times as large.
        """
        of_layer = [self.store.meta.layers.index(layer) for layer in layers]
        sizes = [
            self.store[i]
            .features.unflatten(1, (len(self.store.meta.layers), -1))[:, of_layer]
            .float()
            .square()
            .mean(-1)
            for i in self.kept[:most_texts]
        ]
        return torch.cat(sizes).sqrt().median(0).values


class Trainee(nn.Module, ABC):
    """A draft module in training. Its parameters are what is trained; what it needs of the target are buffers that are
    not saved."""

    @abstractmethod
    def forward(self, batch: Batch, num_steps: int, generator: torch.Generator | None) -> Tensor:
        """The loss, summed over the batch's labels; the loop divides by their number.

        Args:
            num_steps: how far to unroll, for heads that read their own states.
            generator: of noise; None adds none.
        """

    @abstractmethod
    def guesses(self, batch: Batch, num_tokens: int) -> Tensor:
        """Draft tokens ``[B, S, num_tokens]``, -1 where there is none.

        At place n stands the draft of a round that begins with n tokens committed: its first token is the guess at
        the token at place n, and each further one may see the true tokens before it, since it counts only if the
        draft agreed with them; behind a guess that the text does not have, anything may stand. The state of the
        token at n - 1 is not known yet.
        """

    @abstractmethod
    def parameter_groups(self, options: TrainOptions) -> list[dict[str, Any]]:
        """For the optimizer, each with its highest learning rate ``lr``."""

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write the head as the engine reads it."""

    def measure(self, batches: Iterable[Batch]) -> None:
        """Find out on held-out texts what is saved with the head; most heads have nothing of the kind."""


def parameter_groups(module: nn.Module, head_parameters: Iterable[nn.Parameter], options: TrainOptions) -> Any:
    """The groups of a module whose projections to the vocabulary learn slower; only matrices decay."""
    of_head = {id(parameter) for parameter in head_parameters}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            rate = options.head_learning_rate if id(parameter) in of_head else options.learning_rate
            decay = options.weight_decay if parameter.dim() > 1 else 0.0
            groups.setdefault((rate, decay), []).append(parameter)
    return [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in groups.items()]


def taught_tokens(target: TrainTarget, texts: TrainTexts, options: TrainOptions) -> Tensor:
    """Tokens whose laws are compared where a head drafts any token, ``[tokens]``: comparing all would take too long."""
    return draft_vocabulary(texts.token_counts(), options.draft_vocab_size or TAUGHT, target.always_drafted)


def soft_cross_entropy(logits: Tensor, law: Tensor) -> Tensor:
    """Summed over rows: -sum law log softmax(logits); both ``[N, V]``, the law of a distribution."""
    return -(law * torch.log_softmax(logits.float(), -1)).sum()


@torch.no_grad()
def target_law(after_norm: Tensor, lm_head: Tensor, token_ids: Tensor) -> Tensor:
    """What the target says behind states ``[N, H]``, restricted to some tokens and renormalised, ``[N, tokens]``."""
    rows = lm_head[token_ids]
    return torch.softmax(F.linear(after_norm.to(rows), rows).float(), -1)
