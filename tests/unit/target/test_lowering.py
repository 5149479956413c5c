"""Which modules are replaced, which are left alone, and which models are refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as tf
from torch import nn

from foredraft.errors import UnsupportedModelError
from foredraft.target import lowering
from foredraft.target.forward import TargetModel
from foredraft.target.layout import PassRow
from foredraft.testing import random_model, target_for, tiny_config, tiny_model

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
TEXT = [3, 14, 15, 9, 26, 5, 35]


def model_of(kind: str, **options):
    config = getattr(tf, f"{kind}Config")(**{**SIZES, **options})
    return random_model(tf.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, 0)


def check_logits(model, target: TargetModel) -> None:
    """The lowered copy gives the logits of the model itself."""
    target.slots.open(0)
    ours = target.forward([PassRow(0, TEXT, len(TEXT))])
    target.slots.close(0)
    theirs = model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    assert torch.allclose(ours, theirs, atol=1e-3, rtol=1e-3)


def test_all_of_a_llama_is_replaced():
    """Two layers: attention and MLP each, two norms each and the last one, the head."""
    model = tiny_model()
    target = target_for(model)
    assert target.lowering.replaced == {"LlamaRMSNorm": 5, "LlamaAttention": 2, "LlamaMLP": 2, "Linear": 1}
    assert target.lowering.left == {}
    check_logits(model, target)


@pytest.mark.parametrize(
    ("kind", "options", "replaced", "left"),
    [
        ("Qwen2", {}, {"Qwen2Attention": 2, "Qwen2MLP": 2, "Qwen2RMSNorm": 5}, {}),
        ("Qwen3", {"head_dim": 16}, {"Qwen3Attention": 2, "Qwen3RMSNorm": 9}, {}),
        ("Mistral", {"sliding_window": 4}, {"MistralAttention": 2}, {}),
        ("Olmo2", {}, {"Olmo2RMSNorm": 9, "Olmo2MLP": 2}, {"Olmo2Attention": 2}),
        ("SmolLM3", {"no_rope_layers": [1, 0]}, {"SmolLM3Attention": 2}, {}),
        (
            "Gemma2",
            {"head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 16},
            {"Gemma2RMSNorm": 9, "Gemma2MLP": 2},
            {"Gemma2Attention": 2},
        ),
        (
            "Gemma3Text",
            {"head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 16},
            {"Gemma3RMSNorm": 13, "Gemma3MLP": 2, "Gemma3Attention": 2},
            {},
        ),
    ],
)
def test_kinds_that_differ_from_llama(kind, options, replaced, left):
    """Norms of 1 + weight, norms over all heads, layers without positions, capped scores: right or left alone."""
    model = model_of(kind, **options)
    target = target_for(model)
    assert replaced.items() <= target.lowering.replaced.items()
    assert target.lowering.left == left
    check_logits(model, target)


class OddRMSNorm(nn.Module):
    """Looks like an RMS norm, computes another thing."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(weight.clone()), 1e-6

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + self.variance_epsilon)


def test_a_norm_of_an_unknown_kind_is_left_alone():
    """A name is not enough: the replacement is compared on the module's own input."""
    model = copy.deepcopy(tiny_model())
    model.model.norm = OddRMSNorm(model.model.norm.weight.data)
    target = target_for(model)
    assert target.lowering.left == {"OddRMSNorm": 1}
    assert target.lowering.replaced["LlamaRMSNorm"] == 4
    check_logits(model, target)


def test_unpacked_nothing_is_replaced():
    """packed=False runs the model's own modules."""
    model = tiny_model()
    target = target_for(model, packed=False)
    assert not target.lowering.replaced
    assert target.native is None
    check_logits(model, target)


def test_the_probe_leaves_no_slot_open():
    """Sequences of the engine begin in slot 0."""
    assert target_for(tiny_model()).slots.num_open == 0


def test_a_whole_that_differs_is_refused(monkeypatch):
    """Each module within its tolerance is not enough: the logits are compared too."""
    same = lowering._same
    monkeypatch.setattr(lowering, "_same", lambda ours, theirs, slack=1.0: slack == 1.0 and same(ours, theirs))
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM gives other logits .* packed=False"):
        target_for(tiny_model())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            tf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1),
            "MambaForCausalLM .mamba, .*keeps a state that cannot be rolled back .*wrap it with wrap_model",
        ),
        (
            tf.Lfm2Config(
                vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=1, layer_types=["conv", "full_attention"],
            ),
            "Lfm2ForCausalLM .lfm2, .*keeps a state that cannot be rolled back .*[(]conv[)]",
        ),
    ],
    ids=["mamba", "lfm2"],
)  # fmt: skip
def test_models_with_recurrent_state_are_refused_by_name(config, message):
    """Their state cannot follow a rejected draft."""
    with pytest.raises(UnsupportedModelError, match=message):
        TargetModel(tf.AutoModelForCausalLM.from_config(config), 64)


def test_an_encoder_decoder_model_is_refused_by_name():
    """T5 has no causal cache of the prompt."""
    config = tf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModelError, match="T5ForConditionalGeneration .t5. is an encoder-decoder model"):
        TargetModel(tf.T5ForConditionalGeneration(config), 64)


def test_a_layer_that_is_used_twice_is_refused():
    """Two modules of one layer index would overwrite each other's keys."""
    model = random_model(tf.LlamaForCausalLM, tiny_config(), 0)
    model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(UnsupportedModelError, match="runs the attention of layer 0 twice"):
        target_for(model)
