"""Models beyond those of `test_architectures`: run exactly, or refused by name when they are loaded; never wrong.

Each is a tiny random configuration of a transformers class, compared with its own ``generate`` in float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf

from foredraft.drafters import Drafter
from foredraft.drafters.ngram import NGramDrafter
from foredraft.errors import UnsupportedModelError
from foredraft.testing import OracleDrafter, engine_for, random_model, run, target_for
from foredraft.types import SamplingParams

VOCAB, NUM_TOKENS = 64, 24
PROMPTS = [[9, 33, 12], [5, 6, 7, 5, 6, 7, 5], [(i * 17 + 3) % VOCAB for i in range(21)]]
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = {**BASE, "num_key_value_heads": 2, "tie_word_embeddings": False}
HEADS = {**GROUPED, "head_dim": 16}
SLIDING = {**HEADS, "sliding_window": 8}
GPT = {key: BASE[key] for key in ("vocab_size", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id")}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
EXACT: dict[str, Callable[[], Any]] = {
    "gemma": lambda: tf.GemmaConfig(**HEADS),
    "cohere2": lambda: tf.Cohere2Config(**GROUPED, sliding_window=8),
    "mixtral": lambda: tf.MixtralConfig(**GROUPED, num_local_experts=4),
    "deepseek_v3": lambda: tf.DeepseekV3Config(
        **{**GROUPED, "num_key_value_heads": 4}, **MLA, **MOE, first_k_dense_replace=1
    ),
    "olmo3": lambda: tf.Olmo3Config(**GROUPED, sliding_window=8),
    "exaone4": lambda: tf.Exaone4Config(**GROUPED, sliding_window=8),
    "ministral": lambda: tf.MinistralConfig(**SLIDING),
    "qwen2 with sliding layers": lambda: tf.Qwen2Config(
        **GROUPED, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "starcoder2": lambda: tf.Starcoder2Config(**GROUPED, sliding_window=8),
    "hunyuan": lambda: tf.HunYuanDenseV1Config(**HEADS),
    "ernie": lambda: tf.Ernie4_5Config(**HEADS),
    "helium": lambda: tf.HeliumConfig(**HEADS),
    "seed_oss": lambda: tf.SeedOssConfig(**HEADS),
    "phi, positions on half of a head": lambda: tf.PhiConfig(**GROUPED),
    "opt": lambda: tf.OPTConfig(
        **GPT, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=96, max_position_embeddings=128,
        init_std=0.3, word_embed_proj_dim=64,
    ),
    "gptj": lambda: tf.GPTJConfig(**GPT, n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=128),
    "gpt_bigcode, one key head": lambda: tf.GPTBigCodeConfig(**GPT, n_embd=64, n_layer=2, n_head=4, n_positions=128),
    "glm4, positions on half of a head": lambda: tf.Glm4Config(**HEADS),
}  # fmt: skip
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "mpt, attention of its own": (
        lambda: tf.MptConfig(vocab_size=VOCAB, d_model=64, n_heads=4, n_layers=2, max_seq_len=128), "MptForCausalLM"
    ),
    "diffllama, two attentions a layer": (lambda: tf.DiffLlamaConfig(**GROUPED), "DiffLlamaForCausalLM .* twice"),
    "bert, looks ahead": (lambda: tf.BertConfig(**BASE, is_decoder=False), "BertLMHeadModel"),
    "gemma 3, looks ahead": (
        lambda: tf.Gemma3TextConfig(**SLIDING, query_pre_attn_scalar=16, use_bidirectional_attention=True),
        "Gemma3ForCausalLM",
    ),
    "stablelm": (lambda: tf.StableLmConfig(**GROUPED), "StableLmForCausalLM"),
    "nemotron": (lambda: tf.NemotronConfig(**GROUPED), "NemotronForCausalLM"),
    "bloom": (lambda: tf.BloomConfig(**GPT, hidden_size=64, n_layer=2, n_head=4), "BloomForCausalLM"),
    "falcon with alibi": (
        lambda: tf.FalconConfig(**GPT, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=True),
        "FalconForCausalLM",
    ),
    "xglm": (
        lambda: tf.XGLMConfig(
            vocab_size=VOCAB, d_model=64, ffn_dim=96, num_layers=2, attention_heads=4, max_position_embeddings=128
        ),
        "XGLMForCausalLM",
    ),
    "doge": (lambda: tf.DogeConfig(**GROUPED), "DogeForCausalLM"),
}  # fmt: skip


def make_model(config: Any) -> Any:
    return random_model(tf.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_output_equals_generate(name: str):
    """Ragged rows with n-gram drafts and with half-right ones, across the window where there is one."""
    model = make_model(EXACT[name]())
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        expected.append(out[0, len(prompt) :].tolist())
    assert len({token for out in expected for token in out}) > 8, "too uniform to show anything"
    target = target_for(copy.deepcopy(model), max_model_len=128)
    texts = [prompt + out for prompt, out in zip(PROMPTS, expected, strict=True)]
    drafters: list[Drafter | None] = [None, NGramDrafter(1, 3), OracleDrafter(texts, VOCAB, lambda length: length % 4)]
    for drafter in drafters:
        sequences = run(engine_for(target, drafter), PROMPTS, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
        assert [s.output_token_ids for s in sequences] == expected
    assert (
        0 < sum(s.metrics.num_accepted_tokens for s in sequences) < sum(s.metrics.num_draft_tokens for s in sequences)
    )


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_refused_by_name(name: str):
    """An UnsupportedModelError that names the model, not whatever its code raises when it meets our attention."""
    make, message = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=message):
        target_for(make_model(make()), max_model_len=128)
