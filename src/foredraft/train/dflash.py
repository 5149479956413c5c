"""DFlash in training (Chen et al., 2602.06036): blocks of masks behind anchors that are drawn anew in each update.

Each place of a block learns the law that the target had for it, later ones with less weight. So many blocks are drawn
that they have as many rows as the texts, and the loss is that of a block behind every label, as the draw estimates it.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3Config

from foredraft.heads.dflash import IGNORED, DFlashConfig, DFlashHead, block_labels, choose_anchors
from foredraft.heads.dflash_format import default_target_layers, save_dflash
from foredraft.target.features import AFTER_NORM
from foredraft.train.batches import Batch
from foredraft.train.options import TrainOptions
from foredraft.train.scaled import ScaledTrainee, begin_with_targets_head, head_vocabulary, layer_options
from foredraft.train.trainee import TrainTarget, TrainTexts, soft_cross_entropy, target_law
from foredraft.train.vocabulary import mask_token

NUM_READ = 3
"""Layers of the target that are read."""
BLOCKS_AT_ONCE = 64
"""Of each text, when all that would be drafted is measured."""


def feature_layers(num_layers: int) -> tuple[int, ...]:
    return (*_read(num_layers), AFTER_NORM)


def make(target: TrainTarget, texts: TrainTexts, options: TrainOptions) -> DFlashTrainee:
    config = target.model.config.get_text_config()
    known = {"head_dim": config.hidden_size // config.num_attention_heads, **layer_options(target)}
    layers = _read(config.num_hidden_layers)

    def head_config(draft_vocab_size: int) -> DFlashConfig:
        return DFlashConfig(
            layer=Qwen3Config(**known, num_hidden_layers=options.num_layers, tie_word_embeddings=False),
            block_size=options.num_places + 1,
            mask_token_id=mask_token(texts.token_counts(), target.embeddings, target.always_drafted),
            target_vocab_size=config.vocab_size,
            target_hidden_size=config.hidden_size,
            feature_layers=layers,
            is_causal=(False,) * options.num_layers,
            windows=(None,) * options.num_layers,
            draft_vocab_size=draft_vocab_size,
        )

    vocabulary = head_vocabulary(lambda size: DFlashHead(head_config(size)), target, texts, options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        head = DFlashHead(head_config(len(vocabulary)))
    head.set_vocabulary(vocabulary)
    begin_with_targets_head(head, target)
    return DFlashTrainee(head, target, texts.scales(layers), options)


class DFlashTrainee(ScaledTrainee):
    """A DFlash head in training."""

    def forward(self, batch: Batch, num_steps: int, generator: torch.Generator | None) -> Tensor:
        states, block_size = self.states(batch, generator), self.head.config.block_size
        num_anchors = max(1, batch.token_ids.shape[1] // block_size)
        draw = generator or torch.Generator().manual_seed(0)
        anchors = choose_anchors(batch.is_label, num_anchors, draw)
        labels = self.head.draft_ids(block_labels(batch.labels, anchors, block_size))
        texts, blocks, at = (labels != IGNORED).nonzero(as_tuple=True)
        said_at = anchors[texts, blocks] + at
        law = target_law(batch.states(AFTER_NORM)[texts, said_at], self.target_head, self._token_ids)
        hidden = self.head.hidden_of(states, batch.token_ids, anchors, self.embeddings)
        logits = self.head.lm_head(hidden[texts, blocks, at])
        of_blocks = soft_cross_entropy(logits, law * self._decay ** at[:, None])
        return of_blocks * (batch.is_label.sum() / anchors.numel())

    def guesses(self, batch: Batch, num_tokens: int) -> Tensor:
        guesses = batch.token_ids.new_full((*batch.token_ids.shape, num_tokens), -1)
        num_places = min(num_tokens, self.head.config.block_size - 1)
        states = self.states(batch)
        before_labels = batch.is_label[:, 1:].any(0).nonzero()[:, 0]
        for anchors in before_labels.split(BLOCKS_AT_ONCE):
            of_each = anchors.expand(len(states), -1)
            hidden = self.head.hidden_of(states, batch.token_ids, of_each, self.embeddings)[:, :, :num_places]
            guesses[:, anchors + 1, :num_places] = self._token_ids[self.head.lm_head(hidden).argmax(-1)]
        return guesses

    def save(self, path: Path) -> None:
        head = copy.deepcopy(self.head).cpu()
        each = self.scales.cpu().repeat_interleave(head.config.target_hidden_size)
        with torch.no_grad():
            head.fc.weight /= each
        save_dflash(head.to(self._dtype), path, self._verifier)

    @property
    def _token_ids(self) -> Tensor:
        token_ids: Tensor = self.head.token_ids
        return token_ids


def _read(num_layers: int) -> tuple[int, ...]:
    """As the reference code does for a head of three layers; distinct layers that exist for shallow targets."""
    if num_layers <= 5:
        return tuple(sorted({0, num_layers // 2, num_layers}))
    return tuple(layer + 1 for layer in default_target_layers(num_layers, NUM_READ))
