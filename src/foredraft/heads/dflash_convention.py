"""Whether a DFlash head reads the layers that it was trained on: z-lab's ids and speculators' differ by one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foredraft.heads.convention import TEXT, states_of, warn_of_better
from foredraft.heads.dflash import DFlashHead
from foredraft.target.forward import TargetModel

NUM_PLACES = 2
"""Places of a block that are compared."""


def check_layers(head: DFlashHead, target: TargetModel, tokenizer: Any, name: str) -> dict[str, float]:
    """Warn if the head would predict clearly better from the layers next to those that its files name.

    Returns:
        the share of right guesses by layers, the checkpoint's own under ``as read``; empty without a tokenizer.
    """
    if tokenizer is None:
        return {}
    tokens = tokenizer(TEXT)["input_ids"][: min(target.max_model_len - 1, 128)]
    own, num_layers = head.config.feature_layers, len(target.layers)
    choices = {"as read": list(own)} | {
        f"each layer id {'higher' if shift > 0 else 'lower'} by one": [layer + shift for layer in own]
        for shift in (-1, 1)
        if min(own) + shift >= 0 and max(own) + shift <= num_layers
    }
    wanted = sorted({layer for layers in choices.values() for layer in layers})
    states, said = states_of(target, tokens, tuple(wanted))
    scores = {
        choice: _agreement(head, states[:, [wanted.index(layer) for layer in layers]].flatten(1), tokens, said, target)
        for choice, layers in choices.items()
    }
    warn_of_better(name, scores)
    return scores


@torch.no_grad()
def _agreement(head: DFlashHead, features: Tensor, tokens: Sequence[int], said: Tensor, target: TargetModel) -> float:
    """The share of places at which the head's guess is the target's."""
    model: Any = target.model
    device = features.device
    variant = copy.deepcopy(head).float().to(device)
    anchors = torch.arange(1, len(tokens) - NUM_PLACES, device=device)
    text = torch.tensor([tokens], device=device)
    embeddings = model.get_input_embeddings().weight.float()
    said_of = variant.hidden_of(features[None], text, anchors[None], embeddings)[0, :, :NUM_PLACES]
    output = variant.lm_head if head.config.draft_vocab_size else model.get_output_embeddings()
    dtype = torch.float32 if head.config.draft_vocab_size else target.dtype
    guesses = output(said_of.flatten(0, 1).to(dtype)).argmax(-1).view(len(anchors), -1)
    if variant.token_ids is not None:
        guesses = variant.token_ids[guesses]
    answers = torch.stack([said[anchors + place] for place in range(guesses.shape[1])], 1)
    return float((guesses == answers).float().mean())
