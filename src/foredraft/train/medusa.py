"""Medusa in training (Cai et al., 2401.10774, section 2.2.1, Medusa-1): heads on a target that stays as it is.

Head i stands i + 2 places before its label and learns the law that the target had for it. Behind the training the tree
is chosen: how often the r-th best guess of head i is right, measured on held-out texts, and then the nodes whose paths
are most often right (section 2.3.3).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.tree import grow_tree
from foredraft.heads.medusa import MedusaConfig, MedusaHeads, save_medusa
from foredraft.target.features import AFTER_NORM
from foredraft.train.batches import Batch
from foredraft.train.options import TrainOptions
from foredraft.train.trainee import Trainee, TrainTarget, TrainTexts, parameter_groups, soft_cross_entropy, target_law
from foredraft.train.vocabulary import default_size, draft_vocabulary

NUM_RANKS = 10
NUM_NODES = 64


def feature_layers(num_layers: int) -> tuple[int, ...]:
    return (AFTER_NORM,)


def make(target: TrainTarget, texts: TrainTexts, options: TrainOptions) -> MedusaTrainee:
    config = target.model.config.get_text_config()
    hidden_size, vocab_size = config.hidden_size, config.vocab_size
    num_heads = options.num_heads
    size = options.draft_vocab_size
    if size is None:
        size = default_size(num_heads * hidden_size * (hidden_size + 1), hidden_size, vocab_size, num_heads)
    vocabulary = draft_vocabulary(texts.token_counts(), size, target.always_drafted)
    heads = MedusaHeads(
        MedusaConfig(
            num_heads=num_heads,
            num_layers=1,
            hidden_size=hidden_size,
            draft_vocab_size=len(vocabulary),
            has_token_map=True,
        )
    )
    assert heads.token_map is not None
    heads.token_map.copy_(vocabulary)
    with torch.no_grad():
        for block, lm_head in zip(heads.blocks, heads.lm_heads, strict=True):
            for layer in block.layers:  # type: ignore[union-attr]
                torch.nn.init.zeros_(layer.bias)
            lm_head.weight.copy_(target.lm_head[vocabulary])  # type: ignore[operator]
    return MedusaTrainee(heads, target, options)


class MedusaTrainee(Trainee):
    """Medusa heads in training; they begin as the target's own head, each looking further ahead."""

    target_head: Tensor

    def __init__(self, heads: MedusaHeads, target: TrainTarget, options: TrainOptions):
        super().__init__()
        self.heads = heads
        self._dtype, self._vocab_size = target.embeddings.dtype, len(target.embeddings)
        self._decay = options.step_decay
        self.register_buffer("target_head", target.lm_head, persistent=False)

    @property
    def draft_ids(self) -> Tensor:
        """The id that the heads have for each token of the target, ``[V]``; -1 for those that they lack."""
        token_ids = self.heads.token_map
        assert token_ids is not None
        draft_ids = token_ids.new_full((self._vocab_size,), -1)
        draft_ids[token_ids] = torch.arange(len(token_ids), device=token_ids.device)
        return draft_ids

    def forward(self, batch: Batch, num_steps: int, generator: torch.Generator | None) -> Tensor:
        states = batch.states(AFTER_NORM).float()
        assert self.heads.token_map is not None
        rows, places = batch.places(first=2)
        can_draft = self.draft_ids[batch.token_ids[rows, places]] >= 0
        rows, places = rows[can_draft], places[can_draft]
        law = target_law(states[rows, places - 1], self.target_head, self.heads.token_map)
        loss = states.new_zeros(())
        for head in range(self.heads.config.num_heads):
            reached = places >= 2 + head
            logits = self.heads(states[rows[reached], places[reached] - 2 - head], head)
            loss = loss + self._decay**head * soft_cross_entropy(logits, law[reached])
        return loss

    def guesses(self, batch: Batch, num_tokens: int) -> Tensor:
        assert self.heads.token_map is not None
        guesses = batch.token_ids.new_full((*batch.token_ids.shape, num_tokens), -1)
        rows, places = batch.places(first=2)
        known = batch.states(AFTER_NORM).float()[rows, places - 2]
        for head in range(min(num_tokens, self.heads.config.num_heads)):
            guesses[rows, places, head] = self.heads.token_map[self.heads(known, head).argmax(-1)]
        return guesses

    def parameter_groups(self, options: TrainOptions) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = parameter_groups(self, self.heads.lm_heads.parameters(), options)
        return groups

    def measure(self, batches: Iterable[Batch]) -> None:
        choices = choose_tree(self.rank_accuracies(batches), NUM_NODES)
        self.heads.config = replace(self.heads.config, choices=tuple(choices))

    @torch.no_grad()
    def rank_accuracies(self, batches: Iterable[Batch]) -> list[list[float]]:
        """How often each head's r-th best guess is the text's token, ``[heads][ranks]``."""
        num_heads, num_ranks = self.heads.config.num_heads, min(NUM_RANKS, self.heads.config.draft_vocab_size)
        draft_ids = self.draft_ids
        right, seen = torch.zeros(num_heads, num_ranks), torch.zeros(num_heads, 1)
        for batch in batches:
            states = batch.states(AFTER_NORM).float()
            for head in range(num_heads):
                rows, places = batch.places(first=2 + head)
                best = self.heads(states[rows, places - 2 - head], head).topk(num_ranks).indices
                labels = draft_ids[batch.token_ids[rows, places]]
                right[head] += (best == labels[:, None]).sum(0).cpu()
                seen[head] += len(labels)
        rates: list[list[float]] = (right / seen.clamp(min=1)).tolist()
        return rates

    def save(self, path: Path) -> None:
        save_medusa(copy.deepcopy(self.heads).cpu().to(self._dtype), path, self._vocab_size)


def choose_tree(accuracies: list[list[float]], num_nodes: int) -> list[tuple[int, ...]]:
    """The paths of a tree, best first: each names the rank that it takes of every head on its way.

    Args:
        accuracies: ``[heads][ranks]``; heads are taken to be right independently of each other.
    """

    def expand(path: tuple[int, ...]) -> Iterable[tuple[int, float, tuple[int, ...]]]:
        if len(path) < len(accuracies):
            for rank, accuracy in enumerate(accuracies[len(path)]):
                if accuracy > 0.0:
                    yield rank, accuracy, (*path, rank)

    root: tuple[int, ...] = ()
    return grow_tree(root, expand, num_nodes).states
