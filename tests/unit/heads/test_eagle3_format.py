"""EAGLE-3 checkpoints as others publish them, byte by byte the keys and shapes of their files; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.errors import IncompatibleDrafterError, ModelLoadError
from foredraft.heads.checkpoint import read_head
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.eagle3_format import read_eagle3, save_eagle3
from foredraft.testing import eagle3_config, eagle3_head

SIZES = (64, 64, 30)
"""Hidden size, vocabulary and layers of the target."""
LLAMA = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "vocab_size": 64,
    "draft_vocab_size": 48,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
VERIFIER = {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]}


@pytest.fixture(scope="module")
def tensors(tiny: Any) -> dict[str, torch.Tensor]:
    """By the names of speculators."""
    return dict(eagle3_head(eagle3_config(tiny)).state_dict())


def write(path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], as_pickle: bool = False) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    if as_pickle:
        torch.save(tensors, path / "pytorch_model.bin")
    else:
        save_file(tensors, path / "model.safetensors")
    return path


def safeailab(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("layers.0.", "midlayer."): tensor.clone() for name, tensor in tensors.items()}


def same(head: Eagle3Head, tensors: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, tensors[name]) for name, tensor in head.state_dict().items())


@pytest.mark.parametrize("as_pickle", [False, True])
def test_safeailab(tmp_path: Path, tensors: dict[str, torch.Tensor], as_pickle: bool):
    """midlayer.*, a Llama config, no flags; layers 2, L/2 and L-3 since none are named."""
    head = read_eagle3(read_head(str(write(tmp_path, LLAMA, safeailab(tensors), as_pickle))), *SIZES)
    assert same(head, tensors)
    assert head.config.feature_layers == (2, 15, 27)
    config = head.config
    assert not any((config.norm_before_residual, config.norm_output, config.has_embeddings))
    assert head.config.layer.rope_parameters["rope_theta"] == 500000.0
    assert head.layers[0].hidden_norm.variance_epsilon == 1e-5


def test_nvidia(tmp_path: Path, tensors: dict[str, torch.Tensor]):
    """Layer ids in eagle_config, embeddings of its own."""
    config = {**LLAMA, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 26], "use_aux_hidden_state": True}}
    held = {**safeailab(tensors), "embed_tokens.weight": torch.randn(64, 64)}
    head = read_eagle3(read_head(str(write(tmp_path, config, held))), *SIZES)
    assert head.config.feature_layers == (1, 14, 26)
    assert torch.equal(head.embed_tokens.weight, held["embed_tokens.weight"])


@pytest.mark.parametrize(
    "flags",
    [
        {"norm_before_residual": True},
        {"norm_before_fc": True, "norm_output": True},
        {"fc_norm": True, "has_embeddings": True},
    ],
)
def test_speculators_round_trip(tiny: Any, tmp_path: Path, flags: dict[str, bool]):
    """Written with every flag, read as it was; the keys are those of speculators."""
    head = eagle3_head(eagle3_config(tiny, feature_layers=(2, 15, 28), **flags))
    save_eagle3(head, tmp_path, VERIFIER, num_tokens=5)
    again = read_eagle3(read_head(str(tmp_path)), *SIZES)
    assert same(again, dict(head.state_dict()))
    assert {k: v for k, v in vars(again.config).items() if k != "layer"} == {
        k: v for k, v in vars(head.config).items() if k != "layer"
    }
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert config["speculators_config"]["verifier"]["name_or_path"] == "tiny"
    assert config["transformer_layer_config"]["rope_theta"] == head.config.layer.rope_parameters["rope_theta"]
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert config[flag] is flags.get(flag, False)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "layers.0.hidden_norm.weight"} <= names
    assert ("input_norm.weight" in names) == flags.get("norm_before_fc", False)
    assert ("fc_norm.2.weight" in names) == flags.get("fc_norm", False)


def test_the_whole_vocabulary_is_written_without_a_map(tiny: Any, tmp_path: Path):
    """vLLM ends with an error where d2t maps the whole vocabulary to itself."""
    head = eagle3_head(eagle3_config(tiny, draft_vocab_size=64))
    save_eagle3(head, tmp_path, VERIFIER)
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "model.safetensors"))
    assert same(read_eagle3(read_head(str(tmp_path)), *SIZES), dict(head.state_dict()))


def test_draft_vocabulary_is_given_by_offsets(tmp_path: Path, tensors: dict[str, torch.Tensor]):
    head = read_eagle3(read_head(str(write(tmp_path, LLAMA, safeailab(tensors)))), *SIZES)
    left_out = [i for i in range(64) if not head.t2d[i]]
    assert left_out[:2] == [5, 8]
    assert head.token_ids[:7].tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert head.draft_ids(torch.tensor([4, 5, 6])).tolist() == [4, -1, 5]
    assert head.restrict(torch.arange(64.0)).tolist() == head.token_ids.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.weight": None}, "is no EAGLE-3 head: it lacks fc.weight"),
        ({"norm.weight": None}, "lacks the tensor norm.weight, which its config.json says has shape \\[64\\]"),
        ({"midlayer.extra": torch.zeros(3, 2)}, "a tensor layers.0.extra of shape \\[3, 2\\]"),
        (
            {"norm.weight": torch.ones(32)},
            "norm.weight .* shape \\[32\\], and by its config.json it should have \\[64\\]",
        ),
        ({"d2t": None}, "lacks the tensor d2t of shape \\[48\\]"),
        ({"d2t": torch.arange(48)}, "d2t .* must hold offsets"),
    ],
)
def test_files_that_do_not_belong_together(
    tmp_path: Path, tensors: dict[str, torch.Tensor], change: dict[str, Any], message: str
):
    held = {**safeailab(tensors), **change}
    write(tmp_path, LLAMA, {name: tensor for name, tensor in held.items() if tensor is not None})
    with pytest.raises(ModelLoadError, match=message):
        read_eagle3(read_head(str(tmp_path)), *SIZES)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((32, 64, 30), "fc.weight has shape \\[64, 192\\] and needs \\[64, 96\\]"),
        ((64, 70, 30), "t2d \\[64\\]\\) and the target has 70 \\(t2d \\[70\\]"),
    ],
)
def test_another_target(tmp_path: Path, tensors: dict[str, torch.Tensor], sizes: tuple[int, int, int], message: str):
    with pytest.raises(IncompatibleDrafterError, match=message):
        read_eagle3(read_head(str(write(tmp_path, LLAMA, safeailab(tensors)))), *sizes)
