"""Tiny parallel drafters for tiny models: random ones, and ones trained for a second on what the model says."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config

from foredraft.heads.dflash import DFlashConfig, DFlashHead, block_labels, block_loss
from foredraft.heads.pard import IGNORED, parallel_rows
from foredraft.testing.heads import hidden_states

PROMPT_LEN, NUM_SAID = 24, 8


def dflash_config(model: Any, num_layers: int = 1, **changes: Any) -> DFlashConfig:
    """A head for a two-layer target; the last token stands for the mask."""
    size = model.config.vocab_size
    layer = Qwen3Config(
        hidden_size=model.config.hidden_size,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=size,
        max_position_embeddings=256,
    )
    options: dict[str, Any] = {
        "layer": layer,
        "block_size": 9,
        "mask_token_id": size - 1,
        "target_vocab_size": size,
        "target_hidden_size": model.config.hidden_size,
        "feature_layers": (1, 2),
        "is_causal": (False,) * num_layers,
        "windows": (None,) * num_layers,
    }
    return DFlashConfig(**{**options, **changes})


def dflash_head(config: DFlashConfig, seed: int = 0, scale: float = 4.0) -> DFlashHead:
    """A random head; of the tokens behind 5 every third is left out, as far as the draft vocabulary asks for it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = DFlashHead(config)
    for parameter in head.parameters():
        if parameter.dim() > 1:
            parameter.data *= scale  # so that one token more or less in the text shows in what is drafted
    if config.draft_vocab_size is not None:
        left_out = set(range(5, config.target_vocab_size, 3)[: config.target_vocab_size - config.draft_vocab_size])
        head.set_vocabulary(torch.tensor([i for i in range(config.target_vocab_size) if i not in left_out]))
    return head.eval().requires_grad_(False)


def trained_dflash(model: Any, num_updates: int = 60, **changes: Any) -> DFlashHead:
    """A head that has learnt what a model says behind each token; it lacks a quarter of the vocabulary."""
    size = model.config.vocab_size
    head = dflash_head(dflash_config(model, **{"draft_vocab_size": 3 * size // 4, **changes}), scale=1.0)
    texts = _said(model)
    features = hidden_states(model, texts, head.config.feature_layers)
    embeddings, output = model.get_input_embeddings().weight, model.lm_head.weight
    generator = torch.Generator().manual_seed(1)
    head.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(num_updates):
        start = int(torch.randint(0, PROMPT_LEN - 1, (), generator=generator))  # contexts of every length
        anchors = torch.full((len(texts), 1), PROMPT_LEN - 1 - start)
        logits = head(features[:, start:], texts[:, start:], anchors, embeddings, output)
        labels = head.draft_ids(block_labels(texts[:, start:], anchors, head.config.block_size))
        loss = block_loss(logits, labels, gamma=4.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.eval().requires_grad_(False)


def trained_pard(model: Any, num_tokens: int = 8, num_updates: int = 25) -> Any:
    """A copy of a model that has learnt to fill in masks, the last token of the vocabulary."""
    drafter = copy.deepcopy(model).requires_grad_(True).train()
    texts, mask = _said(model)[:64], model.config.vocab_size - 1
    labels = texts.clone()
    labels[:, :PROMPT_LEN] = IGNORED
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    for _ in range(num_updates):
        rows = parallel_rows(labels, mask, num_tokens, generator=generator)
        out = drafter(input_ids=rows.input_ids(texts), position_ids=rows.positions, attention_mask=rows.attention_mask)
        loss = F.cross_entropy(out.logits.flatten(0, 1), rows.labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval().requires_grad_(False)


def _said(model: Any) -> Tensor:
    """Random tokens and what a model says behind them, ``[4 V, PROMPT_LEN + NUM_SAID]``."""
    size, generator = model.config.vocab_size, torch.Generator().manual_seed(0)
    prompts = torch.randint(0, size, (4 * size, PROMPT_LEN), generator=generator)
    every = torch.ones_like(prompts)
    options = {"max_new_tokens": NUM_SAID, "do_sample": False, "pad_token_id": 0}
    texts: Tensor = model.generate(prompts, attention_mask=every, **options)
    return texts
