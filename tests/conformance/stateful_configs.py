"""A tiny random configuration of each kind of model whose state cannot be cut; windows, chunks and budgets are small.

`REPLAYED` and `STEPPED` of `target.kinds` list the same kinds: what is listed is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as tf

from foredraft.testing import random_model

VOCAB, MAX_LEN = 64, 128
IDS: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
RECURRENT = {**IDS, "hidden_size": 64, "num_hidden_layers": 2, "initializer_range": 0.3}
MOE_ONLY = {
    **RECURRENT,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
}
HYBRID = {**MOE_ONLY, "intermediate_size": 96}
ALL_HEADS = {**HYBRID, "num_key_value_heads": 4}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
GROUPED_LINEAR = {**LINEAR, "linear_num_value_heads": 4}
SSM = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED_EXPERTS = {**EXPERTS, "shared_expert_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
CONV = {"layer_types": ["conv", "full_attention"]}
ZAMBA = {"layers_block_type": ["linear_attention", "hybrid"], "mamba_d_state": 8, "use_mamba_kernels": False}
NEMOTRON = {
    **{key: value for key, value in HYBRID.items() if key != "num_hidden_layers"},
    "head_dim": 16, "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"], "ssm_state_size": 16,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 8, "n_routed_experts": 4,
    "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "use_mamba_kernels": False,
}  # fmt: skip

CONFIGS: dict[str, Callable[[], Any]] = {
    "bailing_hybrid": lambda: tf.BailingHybridConfig(
        **ALL_HEADS, **MLA, **LOCAL_EXPERTS, **LAYERS, head_dim=16, n_group=1, topk_group=1, first_k_dense_replace=1
    ),
    "bamba": lambda: tf.BambaConfig(**HYBRID, **SSM, attn_layer_indices=[1]),
    "falcon_h1": lambda: tf.FalconH1Config(**HYBRID, **SSM, mamba_d_ssm=128),
    "falcon_mamba": lambda: tf.FalconMambaConfig(**RECURRENT, state_size=8),
    "granitemoehybrid": lambda: tf.GraniteMoeHybridConfig(
        **HYBRID, **SSM, **LAYERS, num_local_experts=4, shared_intermediate_size=32
    ),
    "jamba": lambda: tf.JambaConfig(
        **HYBRID, num_experts=2, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, use_mamba_kernels=False
    ),
    "kimi_linear": lambda: tf.KimiLinearConfig(
        **ALL_HEADS, **MLA, **LOCAL_EXPERTS, **LAYERS, linear_head_dim=16, linear_num_heads=4,
        mlp_layer_types=["dense", "sparse"],
    ),
    "lara_mini": lambda: tf.LaraMiniConfig(
        **{**MOE_ONLY, "num_hidden_layers": 4}, **GROUPED_LINEAR, **SHARED_EXPERTS, head_dim=16, sliding_window=8
    ),
    "lfm2": lambda: tf.Lfm2Config(**HYBRID, **CONV, block_auto_adjust_ff_dim=False),
    "lfm2_moe": lambda: tf.Lfm2MoeConfig(**HYBRID, **CONV, **EXPERTS, num_dense_layers=1),
    "llama4_text": lambda: tf.Llama4TextConfig(
        **{**HYBRID, "num_hidden_layers": 4}, head_dim=16, attention_chunk_size=8, num_local_experts=2,
        intermediate_size_mlp=64,
    ),
    "mamba": lambda: tf.MambaConfig(**RECURRENT, state_size=8),
    "mamba2": lambda: tf.Mamba2Config(**RECURRENT, num_heads=8, head_dim=16, state_size=16, n_groups=2, chunk_size=8),
    "minimax": lambda: tf.MiniMaxConfig(**HYBRID, **LAYERS, head_dim=16, block_size=8, num_local_experts=4),
    "olmo_hybrid": lambda: tf.OlmoHybridConfig(**HYBRID, **LINEAR, **LAYERS),
    "qwen3_5_moe_text": lambda: tf.Qwen3_5MoeTextConfig(
        **MOE_ONLY, **GROUPED_LINEAR, **SHARED_EXPERTS, **LAYERS, head_dim=16
    ),
    "qwen3_5_text": lambda: tf.Qwen3_5TextConfig(**HYBRID, **GROUPED_LINEAR, **LAYERS, head_dim=16),
    "qwen3_next": lambda: tf.Qwen3NextConfig(**HYBRID, **GROUPED_LINEAR, **SHARED_EXPERTS, **LAYERS, head_dim=16),
    "qwen4_exp_text": lambda: tf.Qwen4ExpTextConfig(
        **MOE_ONLY, **GROUPED_LINEAR, **EXPERTS, head_dim=16, layer_types=["linear_attention", "indexed_attention"],
        hc_count=2, hc_lowrank=16, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=16,
        indexer_compress_ratio=4, ple_layer_ids=[], ple_embed_dim=16,
    ),
    "rwkv": lambda: tf.RwkvConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, context_length=MAX_LEN),
    "xlstm": lambda: tf.xLSTMConfig(
        **IDS, hidden_size=128, num_hidden_layers=2, num_heads=4, chunk_size=8, autocast_kernel_dtype="float32"
    ),
    "zamba": lambda: tf.ZambaConfig(
        **{**ALL_HEADS, "num_hidden_layers": 4}, **{**ZAMBA, "layers_block_type": ["linear_attention", "hybrid"] * 2}
    ),
    "zaya": lambda: tf.ZayaConfig(
        **MOE_ONLY, head_dim=16, num_experts=4, moe_intermediate_size=32, router_hidden_size=32
    ),
}  # fmt: skip

NOT_CONTINUED: dict[str, Callable[..., Any]] = {
    "nemotron_h": lambda **changes: tf.NemotronHConfig(**NEMOTRON, **changes),
    "zamba2": lambda **changes: tf.Zamba2Config(**ALL_HEADS, **ZAMBA, n_mamba_heads=8, chunk_size=8, **changes),
}
"""Refused: their step has no lower limit of the time step, their longer pass has one."""


def make_model(config: Any, seed: int = 0) -> Any:
    return random_model(tf.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, seed)
