"""A store of texts by a tiny model, to train heads on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.target.features import AFTER_NORM
from foredraft.testing.heads import hidden_states
from foredraft.train.dataset import StoreMeta, Text, TextStore


def tiny_texts(
    model: Any, directory: Path, layers: tuple[int, ...], num_texts: int = 60, length: int = 24, first: int = 0
) -> TextStore:
    """What a model says greedily behind prompts of 2 to 5 random tokens; three pieces, states in bfloat16.

    Args:
        first: number of the first prompt; other numbers are other prompts.
    """
    meta = StoreMeta("tiny", "0" * 16, layers, model.config.hidden_size, model.config.vocab_size, "greedy")
    store = TextStore(directory, meta)
    texts = _texts(model, layers, range(first, first + num_texts), length)
    third = -(-num_texts // 3)
    for start in range(0, num_texts, third):
        store.append(texts[start : start + third])
    return store


def _texts(model: Any, layers: tuple[int, ...], numbers: range, length: int) -> list[Text]:
    """All prompts of a length are answered together; texts with long and short prompts take turns."""
    texts: dict[int, Text] = {}
    for prompt_len in range(2, 6):
        some = [number for number in numbers if 2 + number % 4 == prompt_len]
        draws = [torch.Generator().manual_seed(number) for number in some]
        vocab_size = model.config.vocab_size
        prompts = torch.stack([torch.randint(0, vocab_size, (prompt_len,), generator=draw) for draw in draws])
        with torch.no_grad():
            options = {"max_new_tokens": length, "do_sample": False, "pad_token_id": 0}
            tokens = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
        states = all_states(model, tokens, layers)[:, :-1].bfloat16()
        for number, token_ids, features in zip(some, tokens, states, strict=True):
            texts[number] = Text(token_ids, prompt_len, features, "general", number)
    return [texts[number] for number in numbers]


def all_states(model: Any, token_ids: Tensor, layers: tuple[int, ...]) -> Tensor:
    """As :func:`hidden_states`, with ``AFTER_NORM`` among the layers if it is wanted."""
    states = hidden_states(model, token_ids, tuple(layer for layer in layers if layer != AFTER_NORM) or (0,))
    states = states.unflatten(-1, (-1, model.config.hidden_size))
    with torch.no_grad():
        after_norm = model.model(token_ids).last_hidden_state
    others = iter(states.unbind(2))
    return torch.cat([after_norm if layer == AFTER_NORM else next(others) for layer in layers], -1)
