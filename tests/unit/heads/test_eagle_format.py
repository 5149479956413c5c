"""EAGLE-1 checkpoints with the keys and shapes that others publish, the paper's formula, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.errors import IncompatibleDrafterError, InvalidOptionError, ModelLoadError
from foredraft.heads.checkpoint import read_head
from foredraft.heads.eagle_format import read_eagle, save_eagle, save_eagle_for_vllm
from foredraft.testing import eagle_head, unrolled

SIZES = (64, 64, 2)
"""Hidden size, vocabulary and layers of the target."""
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
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
    "torch_dtype": "float16",
}
VERIFIER = {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]}


def published(fc_bias: bool = False, qkv_bias: bool = False) -> dict[str, Tensor]:
    """The tensors of SafeAILab's pytorch_model.bin."""
    torch.manual_seed(0)
    tensors = {
        "embed_tokens.weight": torch.randn(64, 64),
        "fc.weight": 0.1 * torch.randn(64, 128),
        "layers.0.self_attn.q_proj.weight": 0.1 * torch.randn(64, 64),
        "layers.0.self_attn.k_proj.weight": 0.1 * torch.randn(32, 64),
        "layers.0.self_attn.v_proj.weight": 0.1 * torch.randn(32, 64),
        "layers.0.self_attn.o_proj.weight": 0.1 * torch.randn(64, 64),
        "layers.0.mlp.gate_proj.weight": 0.1 * torch.randn(96, 64),
        "layers.0.mlp.up_proj.weight": 0.1 * torch.randn(96, 64),
        "layers.0.mlp.down_proj.weight": 0.1 * torch.randn(64, 96),
        "layers.0.post_attention_layernorm.weight": torch.rand(64),
    }
    if fc_bias:
        tensors["fc.bias"] = torch.randn(64)
    if qkv_bias:
        tensors |= {f"layers.0.self_attn.{n}_proj.bias": torch.randn(s) for n, s in (("q", 64), ("k", 32), ("v", 32))}
    return tensors


def write(path: Path, config: dict[str, Any], tensors: dict[str, Tensor], as_pickle: bool = False) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    if as_pickle:
        torch.save(tensors, path / "pytorch_model.bin")
    else:
        save_file(tensors, path / "model.safetensors")
    return path


def by_formula(tensors: dict[str, Tensor], features: Tensor, token_ids: Tensor) -> Tensor:
    """States of the first step, ``[S - 1, hidden]``: EAGLE (2401.15077), figure 6, and Llama's layer in plain torch."""
    get = {name.removeprefix("layers.0."): tensor for name, tensor in tensors.items()}.__getitem__
    both = torch.cat([get("embed_tokens.weight")[token_ids[1:]], features[:-1]], -1)
    x = both @ get("fc.weight").T
    num = len(x)
    angles = torch.arange(num)[:, None] / 500000.0 ** (torch.arange(0, 16, 2) / 16)

    def rotated(heads: Tensor) -> Tensor:
        left, right = heads.chunk(2, -1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    query, key, value = ((x @ get(f"self_attn.{n}_proj.weight").T).view(num, -1, 16) for n in "qkv")
    query, key = rotated(query), rotated(key)
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(2, 1)) / 4.0
    scores = scores.masked_fill(torch.ones(num, num).triu(1).bool(), -torch.inf).softmax(-1)
    attended = torch.einsum("hqk,khd->qhd", scores, value.repeat_interleave(2, 1)).flatten(1)
    h = x + attended @ get("self_attn.o_proj.weight").T
    normed = h * (h.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * get("post_attention_layernorm.weight")
    gate, up = (normed @ get(f"mlp.{n}_proj.weight").T for n in ("gate", "up"))
    return h + (F.silu(gate) * up) @ get("mlp.down_proj.weight").T


@pytest.mark.parametrize("layout", ["SafeAILab", "vLLM"])
def test_published_heads_follow_the_formula(tiny: Any, tmp_path: Path, layout: str):
    """No norm before the attention and none at the end; positions begin at 0; the target's lm_head."""
    tensors = published()
    config = {**LLAMA, "bias": False}
    if layout == "vLLM":
        config = {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": config, "truncated_vocab_size": 64}
    head = read_eagle(read_head(str(write(tmp_path, config, tensors, layout == "SafeAILab"))), *SIZES)
    features, token_ids = torch.randn(7, 64), torch.randint(0, 64, (7,))
    expected = by_formula(tensors, features, token_ids) @ tiny.lm_head.weight.T
    first = next(iter(unrolled(head, tiny, features[None], token_ids[None], 1)))[0]
    assert torch.allclose(first, expected, atol=1e-3)


@pytest.mark.parametrize(
    ("config", "fc_bias", "qkv_bias"),
    [({}, True, False), ({"bias": True}, True, False), ({"bias": False, "qkv_bias": True}, False, True)],
)
def test_biases(tmp_path: Path, config: dict[str, bool], fc_bias: bool, qkv_bias: bool):
    """SafeAILab's default is a bias of fc; heads for Qwen2 have biases of q, k and v and none of o."""
    tensors = published(fc_bias, qkv_bias)
    head = read_eagle(read_head(str(write(tmp_path, {**LLAMA, **config}, tensors))), *SIZES)
    assert set(head.state_dict()) == set(tensors)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in head.state_dict().items())


@pytest.mark.parametrize("flags", [{}, {"layernorms": True, "fc_bias": True, "feature_layers": (2,)}])
def test_speculators_round_trip(tiny: Any, tmp_path: Path, flags: dict[str, Any]):
    head = eagle_head(tiny, **flags)
    save_eagle(head, tmp_path, VERIFIER, num_tokens=5)
    again = read_eagle(read_head(str(tmp_path)), *SIZES)
    assert {k: v for k, v in vars(again.config).items() if k != "layer"} == {
        k: v for k, v in vars(head.config).items() if k != "layer"
    }
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in head.state_dict().items())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle"
    assert (config["layernorms"], config["fusion_bias"]) == (bool(flags), bool(flags))
    assert (config["norm_output"], config["state_before_norm"]) == (False, bool(flags))
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"fusion_fc.weight", "transformer.self_attn.q_proj.weight", "transformer.mlp.up_proj.weight"} <= names
    norms = {"embedding_layernorm.weight", "transformer.input_layernorm.weight", "pre_lm_head_layernorm.weight"}
    assert names & norms == (norms if flags else set())


def test_the_layout_that_vllm_reads(tiny: Any, tmp_path: Path):
    """The keys of its LlamaModel without the model. in front, which it puts there itself."""
    head = eagle_head(tiny)
    save_eagle_for_vllm(head, tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(published()) - {"embed_tokens.weight"}
    again = read_eagle(read_head(str(tmp_path)), *SIZES)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in head.state_dict().items())
    for variant in ({"fc_bias": True}, {"layernorms": True}, {"feature_layers": (2,)}):
        with pytest.raises(InvalidOptionError, match=r"vLLM has EAGLE heads .* without bias and norms"):
            save_eagle_for_vllm(eagle_head(tiny, **variant), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.weight": None}, "is no EAGLE head: it lacks fc.weight"),
        ({"layers.0.hidden_norm.weight": torch.ones(64)}, "is an EAGLE-3 head; use method 'eagle3'"),
        ({"layers.0.mlp.up_proj.weight": None}, r"lacks the tensor layers.0.mlp.up_proj.weight, .* \[96, 64\]"),
        ({"lm_head.weight": torch.ones(64, 64)}, r"a tensor lm_head.weight of shape \[64, 64\]"),
        ({"layers.0.self_attn.k_proj.weight": torch.ones(64, 64)}, r"k_proj.weight .* \[64, 64\], .* \[32, 64\]"),
    ],
)
def test_files_that_do_not_belong_together(tmp_path: Path, change: dict[str, Any], message: str):
    held = {name: tensor for name, tensor in {**published(), **change}.items() if tensor is not None}
    with pytest.raises(ModelLoadError, match=message):
        read_eagle(read_head(str(write(tmp_path, {**LLAMA, "bias": False}, held))), *SIZES)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((32, 64, 2), r"fc.weight has shape \[64, 128\] and needs \[32, 64\]"),
        ((64, 70, 2), r"embed_tokens.weight \[64, 64\]\) and the target has 70 \(\[70, 64\]\)"),
    ],
)
def test_another_target(tmp_path: Path, sizes: tuple[int, int, int], message: str):
    with pytest.raises(IncompatibleDrafterError, match=message):
        read_eagle(read_head(str(write(tmp_path, LLAMA, published()))), *sizes)
