"""Tiny draft heads for tiny models: random ones, and ones trained for a second on what the model says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig

from foredraft.heads.eagle3 import Eagle3Config, Eagle3Head
from foredraft.heads.medusa import MedusaConfig, MedusaHeads
from foredraft.heads.recurrent import StateHead
from foredraft.testing.drafters import RecordingDrafter

NUM_STEPS = 3


def layer_config(config: Any, **changes: Any) -> LlamaConfig:
    """A layer configuration for a target's."""
    options: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": 256,
    }
    return LlamaConfig(**{**options, **changes})


def eagle3_config(model: Any, **changes: Any) -> Eagle3Config:
    """A head for a two-layer target that lacks a quarter of the vocabulary."""
    size = model.config.vocab_size
    options: dict[str, Any] = {
        "layer": layer_config(model.config),
        "draft_vocab_size": 3 * size // 4,
        "target_vocab_size": size,
        "target_hidden_size": model.config.hidden_size,
        "feature_layers": (0, 1, 2),
    }
    return Eagle3Config(**{**options, **changes})


def eagle3_head(config: Eagle3Config, seed: int = 0, scale: float = 4.0) -> Eagle3Head:
    """A random head; of the tokens behind 5 every third is left out, as far as the draft vocabulary asks for it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Eagle3Head(config)
    for parameter in head.parameters():
        if parameter.dim() > 1:
            parameter.data *= scale  # so that one token more or less in the text shows in what is drafted
    left_out = config.target_vocab_size - config.draft_vocab_size
    missing = set(range(5, config.target_vocab_size, 3)[:left_out])
    head.set_vocabulary(torch.tensor([i for i in range(config.target_vocab_size) if i not in missing]))
    return head.eval().requires_grad_(False)


def hidden_states(model: Any, token_ids: Tensor, layers: tuple[int, ...]) -> Tensor:
    """``[B, S, layers * hidden]`` by transformers, the last layer's before the norm; AFTER_NORM is behind it."""
    before_norm: list[Tensor] = []
    last: Any = model.model.layers[-1]
    handle = last.register_forward_hook(lambda module, args, out: before_norm.append(out))
    with torch.no_grad():
        states = list(model.model(token_ids, output_hidden_states=True).hidden_states)
    handle.remove()
    states = [*states[:-1], before_norm[0], states[-1]]
    return torch.cat([states[layer] for layer in layers], -1)


def unrolled(head: Any, model: Any, features: Tensor, token_ids: Tensor, num_steps: int) -> Iterator[Tensor]:
    """Logits of each step with the embeddings of a model and, for heads without one of their own, its lm_head."""
    inputs = features, token_ids, model.get_input_embeddings().weight.detach(), num_steps
    steps: Iterator[Tensor] = (
        head.unroll(*inputs, model.get_output_embeddings()) if isinstance(head, StateHead) else head.unroll(*inputs)
    )
    return steps


def train_head(head: Any, model: Any, num_updates: int = 60, num_steps: int = NUM_STEPS) -> None:
    """Teach a head what a model says behind random texts."""
    generator = torch.Generator().manual_seed(1)
    head.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(num_updates):
        texts = torch.randint(0, model.config.vocab_size, (24, 24), generator=generator)
        with torch.no_grad():
            said = model(texts).logits.argmax(-1)
        features = hidden_states(model, texts, head.config.feature_layers)
        loss = torch.zeros(())
        for step, logits in enumerate(unrolled(head, model, features, texts, num_steps)):
            labels = said[:, 1 + step :]
            labels = head.draft_ids(labels) if isinstance(head, Eagle3Head) else labels
            loss = loss + F.cross_entropy(logits[:, : labels.shape[1]].flatten(0, 1), labels.flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    head.eval().requires_grad_(False)


def trained_eagle3(model: Any, num_updates: int = 60, **changes: Any) -> Eagle3Head:
    """A head that has learnt what a model says behind random texts; nearly half of its first guesses are right for a
    :func:`tiny_model` with little context."""
    head = eagle3_head(eagle3_config(model, **changes), scale=1.0)
    train_head(head, model, num_updates)
    return head


def trained_medusa(model: Any, num_heads: int = 4, num_updates: int = 40) -> MedusaHeads:
    """Heads that have learnt what a model says behind each token; they draft all tokens but the last three."""
    size = model.config.vocab_size - 3
    config = MedusaConfig(
        num_heads=num_heads,
        num_layers=1,
        hidden_size=model.config.hidden_size,
        draft_vocab_size=size,
        has_token_map=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        heads = MedusaHeads(config)
    with torch.no_grad():
        prompts = torch.arange(model.config.vocab_size)[:, None]
        texts = model.generate(prompts, max_new_tokens=12, do_sample=False, pad_token_id=0)
        states = model.model(texts).last_hidden_state
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-2)
    for _ in range(num_updates):
        loss = torch.zeros(())
        for head in range(num_heads):
            labels = texts[:, 2 + head :].clone()
            labels[labels >= size] = -1
            logits = heads(states[:, : labels.shape[1]], head)
            loss = loss + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return heads.eval().requires_grad_(False)


def draft_logits(model: Any, head: Any, text: list[int], path: list[int]) -> Tensor:
    """A head's logits ``[len(path) + 1, draft vocabulary]`` behind a text and a draft, as it is trained."""
    tokens = torch.tensor([text + path])
    features = hidden_states(model, tokens, head.config.feature_layers)
    features[:, len(text) - 1 :] = 9.0  # unknown when the draft is made
    with torch.no_grad():
        return torch.stack([s[0, len(text) - 2] for s in unrolled(head, model, features, tokens, len(path) + 1)])


def draft_tokens(head: Any, ids: Tensor) -> list[int]:
    """The target's tokens of ids that a head drafts."""
    tokens: list[int] = (head.token_ids[ids] if isinstance(head, Eagle3Head) else ids).tolist()
    return tokens


def check_chains(recorder: RecordingDrafter, model: Any, head: Any) -> int:
    """Assert that each draft of a recorder is what unrolling the head gives; returns how many there were."""
    checked = 0
    for texts, draft in zip(recorder.texts, recorder.drafts, strict=True):
        for text, tokens, count in zip(texts, draft.token_ids.tolist(), draft.num_draft_tokens, strict=True):
            if count:
                best = draft_logits(model, head, text, tokens[: count - 1]).argmax(-1)
                assert draft_tokens(head, best) == tokens[:count]
                checked += 1
    return checked
