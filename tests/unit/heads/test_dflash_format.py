"""DFlash checkpoints as z-lab and speculators publish them, keys and shapes; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.errors import IncompatibleDrafterError, ModelLoadError
from foredraft.heads.checkpoint import read_head
from foredraft.heads.dflash import DFlashHead
from foredraft.heads.dflash_format import read_dflash, save_dflash, save_zlab
from foredraft.testing import dflash_config, dflash_head

SIZES = (64, 64, 30)
"""Hidden size, vocabulary and layers of the target."""
QWEN3 = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "attention_bias": False,
    "model_type": "qwen3",
    "block_size": 16,
    "dflash_config": {"mask_token_id": 60, "target_layer_ids": [1, 9, 17]},
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 30,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 64,
}
VERIFIER = {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]}


def published() -> dict[str, torch.Tensor]:
    """The keys and shapes of model.safetensors."""
    shapes = {"fc.weight": (64, 3 * 64), "hidden_norm.weight": (64,), "norm.weight": (64,)}
    for layer in range(2):
        for name, shape in {
            "self_attn.q_proj": (128, 64),
            "self_attn.k_proj": (64, 64),
            "self_attn.v_proj": (64, 64),
            "self_attn.o_proj": (64, 128),
            "self_attn.q_norm": (32,),
            "self_attn.k_norm": (32,),
            "mlp.gate_proj": (96, 64),
            "mlp.up_proj": (96, 64),
            "mlp.down_proj": (64, 96),
            "input_layernorm": (64,),
            "post_attention_layernorm": (64,),
        }.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def read(path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], sizes: Any = SIZES) -> DFlashHead:
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return read_dflash(read_head(str(path)), *sizes)


def same(head: DFlashHead, tensors: dict[str, torch.Tensor]) -> bool:
    held = dict(head.state_dict())
    return held.keys() == tensors.keys() and all(torch.equal(held[name], tensor) for name, tensor in tensors.items())


def variants(head: DFlashHead) -> dict[str, Any]:
    return {name: value for name, value in vars(head.config).items() if name != "layer"}


def test_zlab(tmp_path: Path):
    tensors = published()
    head = read(tmp_path, QWEN3, tensors)
    assert same(head, tensors)
    config = head.config
    assert (config.block_size, config.mask_token_id, config.feature_layers) == (16, 60, (2, 10, 18))
    assert config.is_causal == (False, False)
    assert config.windows == (None, None)
    assert config.layer.rope_parameters["rope_theta"] == 1000000
    assert head.token_ids is None


def test_zlab_round_trip(tmp_path: Path):
    """Options may stand in dflash_config; sliding layers do not look ahead unless that is said."""
    own = {
        **QWEN3["dflash_config"],  # type: ignore[dict-item]
        "block_size": 10,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 20.0,
        "input_embedding_scale": 2.0,
    }
    config = {name: value for name, value in QWEN3.items() if name != "block_size"} | {
        "dflash_config": own,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 100,
        "use_sliding_window": True,
    }
    head = read(tmp_path, config, published())
    assert (head.config.block_size, head.config.windows, head.config.is_causal) == (10, (100, None), (True, False))
    assert (head.config.logit_scale, head.config.logit_cap, head.config.embedding_scale) == (0.5, 20.0, 2.0)
    save_zlab(head, tmp_path / "again", num_target_layers=30)
    again = read_dflash(read_head(str(tmp_path / "again")), *SIZES)
    assert same(again, published())
    assert variants(again) == variants(head)
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["architectures"] == ["DFlashDraftModel"]
    assert written["model_type"] == "qwen3"
    assert written["dflash_config"]["target_layer_ids"] == [1, 9, 17]
    assert written["rope_theta"] == 1000000
    with pytest.raises(ValueError, match="no place for factors.*save_zlab"):
        save_dflash(head, tmp_path / "other", VERIFIER)


@pytest.mark.parametrize(
    ("change", "windows", "is_causal"),
    [
        ({"is_causal": True}, None, True),
        ({"dflash_config": {"causal": True}}, None, True),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 7}}, 7, True),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 7, "causal": False}}, 7, False),
    ],
)
def test_who_looks_ahead(tmp_path: Path, change: dict[str, Any], windows: int | None, is_causal: bool):
    own = {**QWEN3["dflash_config"], **change.get("dflash_config", {})}  # type: ignore[dict-item]
    head = read(tmp_path, {**QWEN3, **change, "dflash_config": own}, published())
    assert head.config.windows == (windows, windows)
    assert head.config.is_causal == (is_causal, is_causal)
    save_zlab(head, tmp_path / "again", 30)
    if windows is None:
        assert variants(read_dflash(read_head(str(tmp_path / "again")), *SIZES)) == variants(head)


def test_layers_that_are_not_named(tmp_path: Path):
    """Those of the reference code: 3 of 30 layers."""
    config = {**QWEN3, "dflash_config": {"mask_token_id": 60}, "num_hidden_layers": 3, "layer_types": None}
    tensors = published()
    tensors |= {n.replace("layers.1", "layers.2"): t.clone() for n, t in tensors.items() if n.startswith("layers.1")}
    assert read(tmp_path, config, tensors).config.feature_layers == (2, 15, 28)


@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": 48}, {"draft_vocab_size": 64, "has_embeddings": True}])
def test_speculators_round_trip(tiny: Any, tmp_path: Path, changes: dict[str, Any]):
    head = dflash_head(dflash_config(tiny, 2, feature_layers=(2, 15, 28), **changes))
    save_dflash(head, tmp_path, VERIFIER)
    again = read_dflash(read_head(str(tmp_path)), *SIZES)
    assert same(again, dict(head.state_dict()))
    assert variants(again) == variants(head)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "dflash"
    assert config["architectures"] == ["DFlashSpeculator"]
    assert config["aux_hidden_state_layer_ids"] == [2, 15, 28]
    assert (config["block_size"], config["mask_token_id"]) == (9, 63)
    assert config["draft_vocab_size"] == changes.get("draft_vocab_size", 64)
    assert config["sliding_window_non_causal"] is True
    assert config["sample_from_anchor"] is False
    assert config["transformer_layer_config"]["model_type"] == "qwen3"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 8
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"fc.weight", "hidden_norm.weight", "layers.1.self_attn.k_norm.weight"} <= names
    assert ({"lm_head.weight", "d2t", "t2d"} <= names) == bool(changes)
    if changes:
        with pytest.raises(ValueError, match="use save_dflash"):
            save_zlab(head, tmp_path / "other", 30)


def test_speculators_as_published(tmp_path: Path):
    """A layer configuration of another kind still has the norms of Qwen3; tensors of the target are not read."""
    layer = {**QWEN3, "model_type": "llama", "head_dim": 32}
    config = {
        "speculators_model_type": "dflash",
        "transformer_layer_config": {k: v for k, v in layer.items() if k not in ("dflash_config", "block_size")},
        "draft_vocab_size": 64,
        "aux_hidden_state_layer_ids": [2, 10, 18],
        "mask_token_id": 60,
        "sliding_window_non_causal": False,
    }
    tensors = published()
    head = read(tmp_path, config, {**tensors, "verifier_norm.weight": torch.ones(64), "d2t": torch.zeros(64)})
    assert same(head, tensors)
    assert (head.config.block_size, head.config.feature_layers) == (8, (2, 10, 18))
    assert head.config.is_causal == (False, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.weight": None}, "is no DFlash head: it lacks fc.weight"),
        ({"norm.weight": None}, "lacks the tensor norm.weight, which its config.json says has shape \\[64\\]"),
        ({"markov_head.markov_w1.weight": torch.zeros(64, 8)}, "tensor markov_head.* of shape \\[64, 8\\]"),
        (
            {"layers.1.self_attn.k_proj.weight": torch.zeros(32, 64)},
            "layers.1.self_attn.k_proj.weight .* shape \\[32, 64\\], and .* should have \\[64, 64\\]",
        ),
        ({"lm_head.weight": torch.zeros(48, 64)}, "lm_head.weight .* \\[48, 64\\], and .* should have \\[64, 64\\]"),
    ],
)
def test_files_that_do_not_belong_together(tmp_path: Path, change: dict[str, Any], message: str):
    held = {name: tensor for name, tensor in {**published(), **change}.items() if tensor is not None}
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path, QWEN3, held)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dflash_config": {}}, "mask_token_id in the config.json of .* is None"),
        ({"dflash_config": {"mask_token_id": 64}}, "is 64; it must be a token of the target's 64"),
        ({"dflash_config": {"mask_token_id": 1, "projector_type": "domino"}}, "projector_type='domino', a variant"),
        ({"sample_from_anchor": True}, "sample_from_anchor=True, a variant that is not known"),
        ({"layer_types": ["sliding_attention"] * 2}, "names layers of sliding attention, and no sliding_window"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, change: dict[str, Any], message: str):
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path, {**QWEN3, **change}, published())


def test_a_draft_vocabulary_without_its_tokens(tmp_path: Path):
    config = {**QWEN3, "draft_vocab_size": 48}
    with pytest.raises(ModelLoadError, match="lacks the tensor d2t of shape \\[48\\]"):
        read(tmp_path, config, {**published(), "lm_head.weight": torch.zeros(48, 64)})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((32, 64, 30), "fc.weight has shape \\[64, 192\\] and needs \\[64, 96\\]"),
        ((64, 70, 30), "made for a vocabulary of 64 tokens and the target has 70"),
    ],
)
def test_another_target(tmp_path: Path, sizes: tuple[int, int, int], message: str):
    with pytest.raises(IncompatibleDrafterError, match=message):
        read(tmp_path, QWEN3, published(), sizes)


def test_another_hidden_size(tmp_path: Path):
    tensors = {**published(), "fc.weight": torch.zeros(64, 3 * 48)}
    with pytest.raises(IncompatibleDrafterError, match="hidden size of 64, the target one of 48"):
        read(tmp_path, QWEN3, tensors, (48, 64, 30))
