"""MTP modules with the keys and shapes of published files; the target's own; transformers' module; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.modeling_layers import MtpModel

from foredraft import EngineConfig, SpeculativeConfig
from foredraft.drafters import make_drafter
from foredraft.errors import IncompatibleDrafterError, InvalidOptionError, ModelLoadError
from foredraft.heads.checkpoint import read_head
from foredraft.heads.mtp import MtpHead
from foredraft.heads.mtp_format import read_mtp, read_mtp_files, save_mtp
from foredraft.target.loader import load_model
from foredraft.testing import (
    RecordingDrafter,
    check_chains,
    engine_for,
    hidden_states,
    mtp_head,
    random_model,
    run,
    target_for,
    unrolled,
)
from foredraft.testing.state_heads import KIND_OPTIONS
from foredraft.types import SamplingParams

SIZES = (64, 64, 2)
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
NORMS = {"input_layernorm.weight": [64], "post_attention_layernorm.weight": [64]}
MLP = {"gate_proj.weight": [96, 64], "up_proj.weight": [96, 64], "down_proj.weight": [64, 96]}
EXPERT = {"gate_proj.weight": [32, 64], "up_proj.weight": [32, 64], "down_proj.weight": [64, 32]}
GATED = {"q_proj.weight": [128, 64], "k_proj.weight": [32, 64], "v_proj.weight": [32, 64], "o_proj.weight": [64, 64]}
HEAD_NORMS = {"q_norm.weight": [16], "k_norm.weight": [16]}


def under(prefix: str, shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    return {prefix + name: shape for name, shape in shapes.items()}


def experts(count: int) -> dict[str, list[int]]:
    return {name: shape for i in range(count) for name, shape in under(f"mlp.experts.{i}.", EXPERT).items()}


DEEPSEEK_LAYER = {
    "self_attn.q_a_proj.weight": [24, 64],
    "self_attn.q_a_layernorm.weight": [24],
    "self_attn.q_b_proj.weight": [96, 24],
    "self_attn.kv_a_proj_with_mqa.weight": [24, 64],
    "self_attn.kv_a_layernorm.weight": [16],
    "self_attn.kv_b_proj.weight": [128, 16],
    "self_attn.o_proj.weight": [64, 64],
    "mlp.gate.weight": [4, 64],
    "mlp.gate.e_score_correction_bias": [4],
    **experts(4),
    **under("mlp.shared_experts.", EXPERT),
    **NORMS,
}
QWEN3_NEXT_LAYER = {
    **under("self_attn.", GATED),
    **under("self_attn.", HEAD_NORMS),
    "mlp.gate.weight": [4, 64],
    "mlp.shared_expert_gate.weight": [1, 64],
    **under("mlp.shared_expert.", EXPERT),
    **experts(4),
    **NORMS,
}
QWEN2_LAYER = {
    "self_attn.q_proj.weight": [64, 64], "self_attn.q_proj.bias": [64],
    "self_attn.k_proj.weight": [32, 64], "self_attn.k_proj.bias": [32],
    "self_attn.v_proj.weight": [32, 64], "self_attn.v_proj.bias": [32],
    "self_attn.o_proj.weight": [64, 64],
    **under("mlp.", MLP),
    **NORMS,
}  # fmt: skip
QWEN_PARTS = {
    "mtp.fc.weight": [64, 128], "mtp.norm.weight": [64],
    "mtp.pre_fc_norm_hidden.weight": [64], "mtp.pre_fc_norm_embedding.weight": [64],
}  # fmt: skip
XIAOMI_PARTS = {
    "token_layernorm.weight": [64], "hidden_layernorm.weight": [64],
    "input_proj.weight": [64, 128], "final_layernorm.weight": [64],
}  # fmt: skip
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, list[int]]]] = {
    "deepseek_v3": (
        {**COMMON, **KIND_OPTIONS["deepseek_v3"], "model_type": "deepseek_v3", "num_nextn_predict_layers": 1},
        under(
            "model.layers.2.",
            {
                "enorm.weight": [64], "hnorm.weight": [64], "eh_proj.weight": [64, 128],
                "shared_head.norm.weight": [64], "shared_head.head.weight": [64, 64], "embed_tokens.weight": [64, 64],
                **DEEPSEEK_LAYER,
            },
        ),
    ),
    "qwen3_next": (
        {**COMMON, **KIND_OPTIONS["qwen3_next"], "model_type": "qwen3_next", "decoder_sparse_step": 1},
        {**QWEN_PARTS, **under("mtp.layers.0.", QWEN3_NEXT_LAYER)},
    ),
    "qwen3_5": (
        {
            "model_type": "qwen3_5",
            "text_config": {
                **COMMON,
                "head_dim": 16,
                "model_type": "qwen3_5_text",
                "layer_types": ["linear_attention", "full_attention"],
                "mtp_num_hidden_layers": 1,
            },
        },
        {
            **QWEN_PARTS,
            **under("mtp.layers.0.self_attn.", {**GATED, **HEAD_NORMS}),
            **under("mtp.layers.0.mlp.", MLP),
            **under("mtp.layers.0.", NORMS),
        },
    ),
    "mimo": (
        {**COMMON, "model_type": "mimo", "num_nextn_predict_layers": 1},
        under("model.mtp_layers.0.", {**XIAOMI_PARTS, **QWEN2_LAYER}),
    ),
    "speculators": (
        {"speculators_model_type": "mtp", "transformer_layer_config": {**COMMON, "model_type": "qwen2"}},
        under("mtp_layers.0.", {**XIAOMI_PARTS, **QWEN2_LAYER}),
    ),
}  # fmt: skip
"""Configurations and shapes as published, smaller."""
SHARED = ("embed_tokens.weight", "shared_head.head.weight")


def tensors_of(layout: str, **changes: Tensor | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    tensors: dict[str, Tensor | None] = {name: torch.randn(shape) for name, shape in LAYOUTS[layout][1].items()}
    return {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}


def write(path: Path, layout: str, tensors: dict[str, Tensor]) -> Path:
    (path / "config.json").write_text(json.dumps(LAYOUTS[layout][0]))
    save_file(tensors, path / "model.safetensors")
    return path


def read(path: Path, sizes: tuple[int, int, int] = SIZES) -> MtpHead:
    return read_mtp(read_mtp_files(str(path)), *sizes)


def all_once(head: MtpHead, tensors: dict[str, Tensor]) -> bool:
    """Whether a head holds each number of the tensors, and no other."""
    wanted = torch.cat([tensor.flatten() for name, tensor in tensors.items() if not name.endswith(SHARED)])
    held = torch.cat([tensor.flatten() for tensor in head.state_dict().values()])
    return torch.equal(wanted.sort().values, held.sort().values)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_layouts(tmp_path: Path, layout: str):
    """Within the target's files: what belongs to the target's own layers is left alone."""
    tensors = tensors_of(layout)
    around = {"model.embed_tokens.weight": torch.ones(64, 64), "model.layers.1.mlp.x": torch.ones(2)}
    head = read(write(tmp_path, layout, {**tensors, **around}))
    assert all_once(head, tensors)
    assert (head.config.states_first, head.config.norm_output) == (layout == "mimo", True)
    prefix = next(iter(tensors)).rsplit("fc.weight", 1)[0].rsplit("enorm", 1)[0].rsplit("token_layernorm", 1)[0]
    own = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"}
    if layout == "deepseek_v3":
        own = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"}
    elif "mtp_layers" in prefix:
        own = {
            "enorm": "token_layernorm",
            "hnorm": "hidden_layernorm",
            "eh_proj": "input_proj",
            "norm": "final_layernorm",
        }
    for ours, theirs in own.items():
        assert torch.equal(getattr(head, ours).weight, tensors[f"{prefix}{theirs}.weight"])


@pytest.mark.parametrize("layout", ["deepseek_v3", "qwen3_next"])
def test_experts_lie_side_by_side(tmp_path: Path, layout: str):
    tensors = tensors_of(layout)
    experts: Any = read(write(tmp_path, layout, tensors)).block.inner.mlp.experts
    prefix = "mtp.layers.0." if layout == "qwen3_next" else "model.layers.2."
    gate, up, down = (tensors[f"{prefix}mlp.experts.3.{part}_proj.weight"] for part in ("gate", "up", "down"))
    assert torch.equal(experts.gate_up_proj[3], torch.cat([gate, up]))
    assert torch.equal(experts.down_proj[3], down)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "qwen3_next", "qwen3_5_text"])
def test_round_trip(tiny: Any, tmp_path: Path, kind: str):
    """In the layout of the kind, each flag written out; read again, it is the same module."""
    flags = {"states_first": True, "norm_output": False, "feature_layers": (2,)} if kind == "llama" else {}
    head = mtp_head(tiny, kind, **flags)
    save_mtp(head, tmp_path, num_layers=2)
    again = read(tmp_path)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in head.state_dict().items())
    assert (again.config.states_first, again.config.norm_output) == (bool(flags), not flags)
    assert again.config.feature_layers == head.config.feature_layers
    config = json.loads((tmp_path / "config.json").read_text())
    written = (config["mtp_hidden_states_first"], config["norm_output"], config["state_before_norm"])
    assert written == (bool(flags), not flags, bool(flags))
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (2, 1)
    if kind in LAYOUTS:
        names = set(load_file(tmp_path / "model.safetensors"))
        assert names == {name for name in LAYOUTS[kind][1] if not name.endswith(SHARED)}


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V3 with the MTP module in its own files."""
    path = tmp_path_factory.mktemp("deepseek")
    options = {**COMMON, **KIND_OPTIONS["deepseek_v3"], "first_k_dense_replace": 1, "initializer_range": 0.2}
    config = DeepseekV3Config(**options, bos_token_id=None, eos_token_id=None)
    model = random_model(DeepseekV3ForCausalLM, config, seed=1)
    model.save_pretrained(path)
    own = {
        name: 0.2 * tensor if tensor.dim() > 1 else 1.0 + 0.1 * tensor
        for name, tensor in tensors_of("deepseek_v3").items()
    }
    save_file({**load_file(path / "model.safetensors"), **own}, path / "model.safetensors", {"format": "pt"})
    return path


def test_first_guesses_are_those_of_transformers(deepseek: Path):
    """Its MtpModel, filled with the same tensors by their names, gives the logits of the first step."""
    loaded = load_model(deepseek, dtype="float32", attn_implementation="eager")
    model: Any = loaded.model
    head = read(deepseek)
    theirs = MtpModel(model, 1).eval()
    theirs.config._attn_implementation = "eager"
    names = {f"layers.0.{name.replace('block.inner.', 'mtp_block.')}": t for name, t in head.state_dict().items()}
    names["layers.0.post_norm.weight"] = names.pop("layers.0.norm.weight")
    missing, surplus = theirs.load_state_dict(names, strict=False)
    assert not surplus
    assert all(name.startswith(("embed_tokens", "shared_head", "rotary_emb")) for name in missing)
    token_ids = torch.randint(0, 64, (1, 9))
    features = hidden_states(model, token_ids, (-1,))
    with torch.no_grad():
        positions = torch.arange(8)[None]
        states = theirs.forward_layer(0, features[:, :-1], positions, None, input_ids=token_ids[:, 1:])
        first = next(iter(unrolled(head, model, features, token_ids, 1)))
    assert torch.allclose(first, model.lm_head(states), atol=1e-4)


def test_the_targets_own_module(deepseek: Path):
    """No model= is needed, the target loads although its files hold more than it uses; drafts are as unrolled."""
    model = load_model(deepseek, dtype="float32", attn_implementation="eager").model
    target = target_for(model)
    config = SpeculativeConfig(method="mtp", num_speculative_tokens=2)
    drafter = make_drafter(config, EngineConfig(model=str(deepseek), dtype="float32"), target, None)
    engine = engine_for(target, RecordingDrafter(drafter), num_speculative_tokens=2)
    run(engine, [[3, 4, 5], [9]], SamplingParams(temperature=0.0, max_tokens=6))
    assert check_chains(engine.drafter, model, read(deepseek)) > 4


def test_other_methods_need_a_model():
    with pytest.raises(InvalidOptionError, match="method 'ngram\\+eagle' needs model="):
        SpeculativeConfig(method="ngram+eagle")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eh_proj.weight": None}, r"lacks the tensor model.layers.2.eh_proj.weight of shape \[64, 128\]"),
        ({"hnorm.weight": None}, r"lacks the tensor model.layers.2.hnorm.weight, .* shape \[64\]"),
        ({"mlp.experts.1.up_proj.weight": None}, "lacks the tensor mlp.experts.1.up_proj.weight, and has .* up to 3"),
        ({"more.weight": torch.ones(3, 2)}, r"a tensor model.layers.2.more.weight of shape \[3, 2\]"),
        (
            {"self_attn.o_proj.weight": torch.ones(64, 32)},
            r"model.layers.2.self_attn.o_proj.weight .* shape \[64, 32\], .* should have \[64, 64\]",
        ),
    ],
)
def test_files_that_do_not_belong_together(tmp_path: Path, change: dict[str, Any], message: str):
    tensors = tensors_of("deepseek_v3", **{f"model.layers.2.{name}": tensor for name, tensor in change.items()})
    with pytest.raises(ModelLoadError, match=message):
        read(write(tmp_path, "deepseek_v3", tensors))


def test_no_module_and_two(tmp_path: Path):
    with pytest.raises(ModelLoadError, match="holds no MTP module: none of its tensors is called mtp"):
        read(write(tmp_path, "deepseek_v3", {"model.layers.1.enorm.weight": torch.ones(64)}))
    both = {**tensors_of("deepseek_v3"), "model.layers.3.eh_proj.weight": torch.ones(64, 128)}
    with pytest.raises(ModelLoadError, match="holds 2 MTP modules .model.layers.2., model.layers.3."):
        read(write(tmp_path, "deepseek_v3", both))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((32, 64, 2), r"model.layers.2.eh_proj.weight has shape \[64, 128\] and needs \[32, 64\]"),
        ((64, 70, 2), r"model.layers.2.embed_tokens.weight has shape \[64, 64\] and needs \[70, 64\]"),
    ],
)
def test_another_target(tmp_path: Path, sizes: tuple[int, int, int], message: str):
    with pytest.raises(IncompatibleDrafterError, match=message):
        read(write(tmp_path, "deepseek_v3", tensors_of("deepseek_v3")), sizes)


def test_a_kind_that_is_not_known(tmp_path: Path):
    write(tmp_path, "mimo", tensors_of("mimo"))
    config = {**LAYOUTS["mimo"][0], "model_type": "abacus"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="layer of the kind 'abacus'; known are deepseek_v3, glm4_moe, llama"):
        read_mtp(read_head(str(tmp_path)), *SIZES)
