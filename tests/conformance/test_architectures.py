"""Models of many kinds: greedy float32 output of a ragged batch equals transformers' ``generate``, token for token.

Tiny random weights, wide enough that logits are not flat. One prompt is longer than the sliding window of 8, and 32
new tokens carry every sequence across it. Drafts come from n-grams and from an oracle that is right on even places.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers as tf

from foredraft import Engine, SamplingParams, SpeculativeConfig
from foredraft.drafters import Drafter, DraftRow
from foredraft.drafters.base import chain_draft
from foredraft.drafters.early_exit import EarlyExitDrafter
from foredraft.drafters.layer_skip import LayerSkipDrafter
from foredraft.drafters.ngram import NGramDrafter
from foredraft.drafters.none import NoDrafter
from foredraft.drafters.sparse_kv import SparseKVDrafter
from foredraft.errors import UnsupportedModelError
from foredraft.target.forward import TargetModel
from foredraft.types import Draft, Request

VOCAB, NEW_TOKENS, MAX_LEN = 64, 32, 128
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
SMALL_HEADS = {**COMMON, "head_dim": 16}
GEMMA = {**SMALL_HEADS, "sliding_window": 8, "query_pre_attn_scalar": 16}
GPT = {"vocab_size": VOCAB, "initializer_range": 0.3, "eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}
CONFIGS = {
    "llama": tf.LlamaConfig(**COMMON),
    "qwen2": tf.Qwen2Config(**COMMON),
    "qwen3": tf.Qwen3Config(**SMALL_HEADS),
    "qwen3_moe": tf.Qwen3MoeConfig(**SMALL_HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48),
    "mistral": tf.MistralConfig(**COMMON, sliding_window=8),
    "gemma2": tf.Gemma2Config(**GEMMA, final_logit_softcapping=30.0, attn_logit_softcapping=50.0),
    "gemma3": tf.Gemma3TextConfig(**GEMMA, sliding_window_pattern=2),
    "phi3": tf.Phi3Config(**COMMON),
    "gpt2": tf.GPT2Config(**GPT, n_embd=64, n_layer=2, n_head=4, n_positions=MAX_LEN),
    "gpt_neox": tf.GPTNeoXConfig(
        **GPT,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_LEN,
    ),
    "olmo2": tf.Olmo2Config(**COMMON),
    "smollm3": tf.SmolLM3Config(**{**COMMON, "num_hidden_layers": 4}, no_rope_layers=[1, 0, 1, 0]),
    "granite": tf.GraniteConfig(
        **COMMON, embedding_multiplier=2.0, residual_multiplier=0.5, attention_multiplier=0.2, logits_scaling=2.0
    ),
    "gpt_oss": tf.GptOssConfig(
        **SMALL_HEADS, sliding_window=8, num_local_experts=4, num_experts_per_tok=2, rope_parameters=None
    ),
}
PROMPTS = [[9, 33, 12], [5, 6, 7, 5, 6, 7, 5], list(range(20, 34)), [(i * 17 + 3) % VOCAB for i in range(21)]]


class HalfRightDrafter(Drafter):
    """Knows the right answers and proposes them on even places of a draft, another token on odd ones."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]]):
        self._answers = answers

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        drafts = []
        for row in rows:
            prompt = next(p for p in self._answers if tuple(row.token_ids[: len(p)]) == p)
            rest = self._answers[prompt][len(row.token_ids) - len(prompt) :][: row.num_draft_tokens]
            drafts.append([(token + i % 2) % VOCAB for i, token in enumerate(rest)])
        return chain_draft(drafts)


def make_model(name: str) -> Any:
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).eval()
    for parameter_name, parameter in model.named_parameters():
        if "sinks" in parameter_name:
            torch.nn.init.normal_(parameter)
    return model


@functools.cache
def reference(name: str) -> list[list[int]]:
    """What transformers' ``generate`` gives for each prompt alone."""
    model, outputs = make_model(name), []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def run(target: TargetModel, drafter: Drafter, num_speculative_tokens: int) -> tuple[list[list[int]], int, int]:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=num_speculative_tokens)
    engine = Engine(target, drafter, config)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
    sequences = [engine.add_request(Request(str(i), prompt, params)) for i, prompt in enumerate(PROMPTS)]
    while engine.has_unfinished_requests:
        engine.step()
    accepted = sum(s.metrics.num_accepted_tokens for s in sequences)
    drafted = sum(s.metrics.num_draft_tokens for s in sequences)
    return [s.output_token_ids for s in sequences], accepted, drafted


@pytest.mark.parametrize("name", CONFIGS)
def test_ragged_batch_equals_generate(name: str) -> None:
    """Plain, n-gram and half-right drafts all give what transformers gives one by one; drafts are really judged."""
    expected = reference(name)
    target = TargetModel(make_model(name), MAX_LEN)
    assert run(target, NoDrafter(), 0)[0] == expected
    assert run(target, NGramDrafter(1, 3), 4)[0] == expected
    answers = {tuple(p): out for p, out in zip(PROMPTS, expected, strict=True)}
    tokens, accepted, drafted = run(target, HalfRightDrafter(answers), 5)
    assert tokens == expected
    assert 0 < accepted < drafted


@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_leave_no_trace_in_bf16(name: str) -> None:
    """Where the kernels keep one order of summation, drafts change no bit of the output."""
    target = TargetModel(make_model(name).to(torch.bfloat16), MAX_LEN)
    if target.native is None:
        pytest.skip("needs AVX512-BF16 and a C++ compiler")
    plain = run(target, NoDrafter(), 0)[0]
    answers = {tuple(p): out for p, out in zip(PROMPTS, plain, strict=True)}
    tokens, accepted, _ = run(target, HalfRightDrafter(answers), 5)
    assert tokens == plain
    assert accepted > 0


SELF_DRAFTERS: dict[str, Callable[[TargetModel], Drafter]] = {
    "early_exit": lambda target: EarlyExitDrafter(target, 1),
    "layer_skip": lambda target: LayerSkipDrafter(target, [0]),
    "sparse_kv": lambda target: SparseKVDrafter(target, 12, 2, "snapkv"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_models_draft_for_themselves(name: str) -> None:
    """Parts of the model run alone and its pass goes on from an early exit, whatever kind it is; all in one batch."""
    expected = reference(name)
    target = TargetModel(make_model(name), MAX_LEN)
    for method, make in SELF_DRAFTERS.items():
        tokens, _, drafted = run(target, make(target), 4)
        assert tokens == expected, method
        assert drafted > 0


SMALL = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
REFUSED = {
    "mamba": (lambda: tf.AutoModelForCausalLM.from_config(tf.MambaConfig(**SMALL)), "Mamba.*rolled back"),
    "lfm2": (
        lambda: tf.AutoModelForCausalLM.from_config(
            tf.Lfm2Config(
                **SMALL,
                intermediate_size=64,
                num_attention_heads=2,
                num_key_value_heads=1,
                layer_types=["conv", "full_attention"],
            )
        ),
        "Lfm2.*conv",
    ),
    "t5": (
        lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        ),
        "encoder-decoder",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_state_is_refused_by_name(kind: str) -> None:
    make, message = REFUSED[kind]
    with pytest.raises(UnsupportedModelError, match=message):
        TargetModel(make(), MAX_LEN)
