"""Tiny models whose every output is known, as real transformers models.

All are float32, on the CPU, in evaluation mode and with transformers' own eager attention, so the model itself
is the reference and :func:`target_for` makes the engine's copy of it. Nothing here touches torch's global
random state.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

from foredraft.target.attention import ATTENTION_NAME, register_attention
from foredraft.target.forward import TargetModel
from foredraft.target.wrap import wrap_model
from foredraft.testing.reference import smallest_greedy_gap

VOCAB_SIZE = 64
IMPOSSIBLE = -1e4
"""A logit whose probability is exactly 0 in float32."""
SCRIPT_BONUS = 50.0
GUARD_PROMPTS = ([1, 2, 3], [10], [10, 11], [7, 8, 9, 10, 7, 8], list(range(20, 37)))
GUARD_TOKENS = 40
SMALLEST_GAP = 1e-3


def tiny_config(**changes: Any) -> LlamaConfig:
    """Llama of vocabulary 64, hidden size 64, 2 layers; a wide initial range, or else logits are flat."""
    options: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "initializer_range": 0.4,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return LlamaConfig(**{**options, **changes}, attn_implementation="eager")


def tiny_model(seed: int = 0, *, context: float = 1.0, **changes: Any) -> LlamaForCausalLM:
    """A random Llama without near-ties.

    Args:
        seed: of the weights. Where the two best logits come closer than 1e-3 on the greedy path of a few
            prompts, the next seed of the same series is taken.
        context: scales what attention and MLP add. The output of 1.0 hardly repeats itself; that of 0.01
            falls into loops of some tokens and out of them again, as copying drafters need it.
        changes: options of the configuration.
    """
    return _scaled_llama(_seed_without_near_ties(seed, context, **changes), context, **changes)


def _scaled_llama(seed: int, context: float, **changes: Any) -> LlamaForCausalLM:
    model = random_model(LlamaForCausalLM, tiny_config(**changes), seed)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight *= context
        layer.mlp.down_proj.weight *= context
    return model


@functools.cache
def _seed_without_near_ties(seed: int, context: float, **changes: Any) -> int:
    for tried in range(seed, seed + 20_000, 1000):
        model = _scaled_llama(tried, context, **changes)
        prompts = [[token % model.config.vocab_size for token in prompt] for prompt in GUARD_PROMPTS]
        if all(smallest_greedy_gap(model, prompt, GUARD_TOKENS) > SMALLEST_GAP for prompt in prompts):
            return tried
    raise AssertionError(f"no model without near-ties in the series of seed {seed}; widen initializer_range")


def tiny_mamba(seed: int = 0, *, context: float = 1.0, **changes: Any) -> Mamba2ForCausalLM:
    """A random Mamba 2 of the same sizes: a state that cannot be cut, scanned in chunks of 8 tokens.

    Args:
        context: scales what the layers add, as in :func:`tiny_model`.
        changes: options of the configuration.
    """
    options: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "initializer_range": 0.4,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    model = random_model(Mamba2ForCausalLM, Mamba2Config(**{**options, **changes}), seed)
    for layer in model.backbone.layers:
        layer.mixer.out_proj.weight *= context
    return model


def random_model(kind: type[Any], config: Any, seed: int) -> Any:
    """A model of a transformers class with weights from a seed, ready to be a reference."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(config).float().eval().requires_grad_(False)


def noisy_copy(model: Any, noise: float = 0.03, seed: int = 0) -> Any:
    """A copy to draft with: each weight matrix gets Gaussian noise of ``noise`` times its own deviation.

    Of a :func:`tiny_model`, 0.03 gets about half of its drafts accepted, 0.2 one in twenty.
    """
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in twin.parameters():
        if parameter.dim() > 1:
            parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return twin


def bigram_model(table: Tensor | Sequence[Sequence[float]], vocab_size: int = VOCAB_SIZE) -> LlamaForCausalLM:
    """A Llama whose logits after token i are row i of ``table``, whatever stands before (relative error 1e-6).

    Attention and MLP add nothing, so the cache is real in shape but without influence: for cases about
    sampling and processors, not about the cache. Ids beyond the table never occur and are never emitted.

    Args:
        table: ``[V, V]`` logits, for instance log-probabilities; -inf stands for never.
    """
    logits = torch.as_tensor(table, dtype=torch.float32).clamp(min=IMPOSSIBLE)
    hidden = -(-max(vocab_size, 32) // 32) * 32
    model = random_model(
        LlamaForCausalLM,
        tiny_config(
            vocab_size=vocab_size,
            hidden_size=hidden,
            num_hidden_layers=1,
            intermediate_size=16,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            rms_norm_eps=1e-12,
            max_position_embeddings=4096,
        ),
        seed=0,
    )
    layer = model.model.layers[0]
    for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
        nn.init.zeros_(weight)
    nn.init.eye_(model.model.embed_tokens.weight)
    head = torch.full((vocab_size, vocab_size), IMPOSSIBLE)
    head[: len(logits), : len(logits)] = logits
    nn.init.zeros_(model.lm_head.weight)
    model.lm_head.weight[:, :vocab_size] = head.T / hidden**0.5
    return model


def constant_bigram(logits: Sequence[float], vocab_size: int = VOCAB_SIZE) -> LlamaForCausalLM:
    """A bigram model with the same logits after every token."""
    return bigram_model(torch.tensor([list(logits)] * len(logits)), vocab_size)


class ScriptedLlama(LlamaForCausalLM):  # type: ignore[misc]
    """A Llama that says what a script has at each absolute position, read from the position ids it is given.

    A slip of positions by one therefore shows in the output at once.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        empty = torch.zeros(config.max_position_embeddings, config.vocab_size)
        self.register_buffer("bonus", empty)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> Any:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        out = super().forward(input_ids=input_ids, position_ids=position_ids, logits_to_keep=logits_to_keep, **options)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        out.logits += self.bonus[position_ids[:, kept]]
        return out


def scripted_model(
    script: Sequence[int], prompt_len: int, *, vocab_size: int = VOCAB_SIZE, seed: int = 0
) -> ScriptedLlama:
    """A model that continues any prompt of ``prompt_len`` tokens with ``script``, then with itself."""
    model: ScriptedLlama = random_model(ScriptedLlama, tiny_config(vocab_size=vocab_size), seed)
    for offset, token in enumerate(script):
        model.bonus[prompt_len - 1 + offset, token] = SCRIPT_BONUS
    return model


def target_for(
    model: Any, *, max_model_len: int | None = None, packed: bool = True, dtype: torch.dtype = torch.float32
) -> TargetModel:
    """The engine's own copy of a transformers model; the model itself is left as it is."""
    register_attention()
    twin = copy.deepcopy(model).to(dtype)
    twin.config._attn_implementation = ATTENTION_NAME
    limit = max_model_len or int(twin.config.get_text_config().max_position_embeddings)
    return wrap_model(twin, limit, packed=packed)
