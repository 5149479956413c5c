"""Devices, model shapes from configurations, and the roofline made of both."""

import json
import math

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    LlamaConfig,
    Qwen3MoeConfig,
    T5Config,
)

from foredraft.errors import InvalidOptionError, ModelLoadError, UnsupportedModelError
from foredraft.lab.devices import DEVICES, find_device, measure_this_device
from foredraft.lab.model_shape import given_shape, model_shape
from foredraft.lab.roofline import document, roofline

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def test_the_seed_s_7b_model_on_an_h100():
    result = roofline(given_shape(7e9, 32, 8, 128), find_device("h100-sxm"), context_lens=[0, 1024, 16384])
    assert f"{result.weight_read_s * 1e3:.2f}" == "4.18"
    assert f"{result.ceiling_tokens_per_s:.0f}" == "239"
    assert f"{result.arithmetic_s * 1e6:.1f}" == "14.1"
    assert f"{result.compute_bound_batch:.0f}" == "295"
    assert result.compute_bound_batch_drafting == pytest.approx(result.compute_bound_batch / 5)
    empty, short, long = result.contexts
    assert empty.kv_share == 0.0
    assert empty.compute_bound_batch == result.compute_bound_batch
    assert short.kv_bytes == 1024 * 131072
    assert long.kv_share == pytest.approx(16384 * 131072 / (14e9 + 16384 * 131072))
    assert long.compute_bound_batch == math.inf


def test_document_is_plain_data():
    result = roofline(given_shape(7e9, 32, 8, 128), find_device("l4"), context_lens=[10])
    plain = document(result)
    assert plain["model"]["kv_bytes_per_token"] == 131072
    assert "kv_layers" not in plain["model"]
    json.dumps(plain)


def test_every_device_is_found_by_its_key_and_has_sane_figures():
    assert len({device.key for device in DEVICES}) == len(DEVICES)
    for device in DEVICES:
        assert find_device(device.key.upper()) is device
        assert 1e11 < device.bandwidth_bytes_per_s < 1e13
        assert 5e12 < device.flops_per_s < 3e15
        assert device.source


@pytest.mark.parametrize(("key", "near"), [("h100", "h100-sxm"), ("rtx4090", "rtx-4090"), ("thiss", "this")])
def test_an_unknown_device_is_refused_and_the_nearest_named(key, near):
    with pytest.raises(InvalidOptionError, match=f"no device '{key}' is known; did you mean '{near}'"):
        find_device(key)


@pytest.mark.parametrize("key", ["zzzz", ""])
def test_a_device_like_no_other_is_refused_with_the_list(key):
    with pytest.raises(InvalidOptionError, match="foredraft lab roofline --devices"):
        find_device(key)


def test_this_device_is_measured():
    device = measure_this_device(budget_s=0.05)
    assert device.key == "this"
    assert 1e8 < device.bandwidth_bytes_per_s < 1e13
    assert 1e8 < device.flops_per_s < 5e15


def test_shape_of_a_dense_model_equals_the_built_model(tmp_path):
    config = LlamaConfig(**SMALL, tie_word_embeddings=True)
    config.save_pretrained(tmp_path)
    built = AutoModelForCausalLM.from_config(config)
    for path in (tmp_path, tmp_path / "config.json"):
        shape = model_shape(path)
        assert shape.num_params == shape.num_active_params == sum(p.numel() for p in built.parameters())
        assert shape.kv_bytes(10) == 10 * shape.kv_bytes_per_token == 10 * 4 * 2 * 2 * 8 * 2
        assert shape.name == tmp_path.name
    cache = built(torch.arange(10)[None], use_cache=True).past_key_values
    values = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert model_shape(tmp_path, kv_bytes_per_value=4).kv_bytes(10) == values * 4


def test_a_quantized_config_is_counted_without_its_quantizer(tmp_path):
    LlamaConfig(**SMALL, quantization_config={"quant_method": "awq", "bits": 4}).save_pretrained(tmp_path)
    assert model_shape(tmp_path).num_params > 10_000


def test_only_chosen_experts_are_active(tmp_path):
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
    }
    Qwen3MoeConfig(**SMALL, **experts).save_pretrained(tmp_path)
    shape = model_shape(tmp_path)
    expert_params = 4 * 8 * 3 * 32 * 16
    assert shape.num_params - shape.num_active_params == pytest.approx(expert_params * 6 / 8)


def test_sliding_layers_stop_growing_at_their_window(tmp_path):
    kinds = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    Gemma3TextConfig(**SMALL, head_dim=8, layer_types=kinds, sliding_window=16).save_pretrained(tmp_path)
    shape = model_shape(tmp_path)
    per_layer = 2 * 2 * 8 * 2
    assert shape.kv_bytes(10) == 4 * per_layer * 10
    assert shape.kv_bytes(1000) == per_layer * 1000 + 3 * per_layer * 16


def test_latent_attention_caches_the_latent(tmp_path):
    sizes = {
        "kv_lora_rank": 12,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "q_lora_rank": 8,
    }
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 8,
    }
    DeepseekV3Config(**(SMALL | {"num_key_value_heads": 4}), **sizes, **experts).save_pretrained(tmp_path)
    assert model_shape(tmp_path).kv_bytes_per_token == 4 * (12 + 4) * 2


def test_what_is_not_a_causal_language_model_is_refused(tmp_path):
    T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, vocab_size=32).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="t5"):
        model_shape(tmp_path)


def test_missing_and_broken_configurations(tmp_path):
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        model_shape(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        model_shape(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelLoadError, match="cannot be read"):
        model_shape(tmp_path)
