"""MLP speculators with IBM's keys and shapes, the paper's formula, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foredraft.errors import IncompatibleDrafterError, ModelLoadError
from foredraft.heads.checkpoint import read_head
from foredraft.heads.mlp import read_mlp, save_mlp
from foredraft.testing import mlp_speculator

SIZES = (64, 64, 2)
CONFIG = {
    "architectures": ["MLPSpeculatorPreTrainedModel"],
    "model_type": "mlp_speculator",
    "emb_dim": 64,
    "inner_dim": 48,
    "n_candidates": 5,
    "n_predict": 3,
    "top_k_tokens_per_head": [5, 3, 2],
    "vocab_size": 64,
    "torch_dtype": "float16",
}


def published(is_tied: bool = False) -> dict[str, Tensor]:
    """The tensors of IBM's files; tied ones are in them for each step."""
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for step in range(3):
        shapes = {"emb": (64, 48), "proj": (48, 64 if step == 0 else 48), "head": (64, 48)}
        for part, shape in shapes.items():
            tensors[f"speculator.{part}.{step}.weight"] = 0.3 * torch.randn(shape)
        tensors[f"speculator.ln.{step}.weight"], tensors[f"speculator.ln.{step}.bias"] = torch.rand(48), torch.randn(48)
    if is_tied:
        for name in list(tensors):
            part, step = name.split(".")[1:3]
            first = name.replace(f".{step}.", ".1." if part == "proj" else ".0.")
            if name != first and not (part == "proj" and step == "0"):
                tensors[name] = tensors[first].clone()
    return tensors


def write(path: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(tensors, path / "model.safetensors")
    return path


def by_formula(tensors: dict[str, Tensor], state: Tensor, token_ids: list[int], scale_input: bool) -> list[Tensor]:
    """Logits of each step behind one state: 2404.19124, equations of section 3.2, in plain torch."""
    normed = lambda x: x / (x.pow(2).mean() + 1e-6).sqrt()  # noqa: E731
    state_weight = 0.5 ** (0.5 / 3)
    emb_weight = math.sqrt((1 - state_weight**2) * 48 / 2)
    if scale_input:
        state = normed(state) / 2**0.5
    found = []
    for step, token in enumerate(token_ids):
        emb, proj, head = (tensors[f"speculator.{part}.{step}.weight"] for part in ("emb", "proj", "head"))
        x = proj @ state + emb[token] * (emb_weight / state_weight)
        x = normed(x) * tensors[f"speculator.ln.{step}.weight"] + tensors[f"speculator.ln.{step}.bias"]
        state = x * 0.5 * (1 + torch.erf(x / 2**0.5))
        found.append(head @ state)
    return found


@pytest.mark.parametrize("scale_input", [False, True])
@pytest.mark.parametrize("tie_weights", [False, True])
def test_published_speculators_follow_the_formula(tmp_path: Path, tie_weights: bool, scale_input: bool):
    tensors = published(tie_weights)
    path = write(tmp_path, tensors, tie_weights=tie_weights, scale_input=scale_input)
    speculator = read_mlp(read_head(str(path)), *SIZES)
    assert (speculator.config.num_steps, speculator.config.inner_size) == (3, 48)
    features, token_ids = 3.0 * torch.randn(1, 6, 64), torch.randint(0, 64, (1, 6))
    with torch.no_grad():
        steps = list(speculator.unroll(features, token_ids, None, 3))
    expected = by_formula(tensors, features[0, 1], token_ids[0, 2:5].tolist(), scale_input)
    for logits, wanted in zip(steps, expected, strict=True):
        assert logits.shape == (1, 5, 64)
        assert torch.allclose(logits[0, 1], wanted, atol=1e-4)


@pytest.mark.parametrize("once", [False, True])
def test_tied_tensors_once_or_for_every_step(tmp_path: Path, once: bool):
    """Without the prefix, as older files have them."""
    tensors = {name.removeprefix("speculator."): tensor for name, tensor in published(is_tied=True).items()}
    if once:
        tensors = {n: t for n, t in tensors.items() if n.split(".")[1] == "0" or n == "proj.1.weight"}
    speculator = read_mlp(read_head(str(write(tmp_path, tensors, tie_weights=True))), *SIZES)
    assert [len(parts) for parts in (speculator.emb, speculator.proj, speculator.head, speculator.ln)] == [1, 2, 1, 1]


@pytest.mark.parametrize("changes", [{}, {"tie_weights": True, "scale_input": True, "feature_layers": (2,)}])
def test_round_trip(tiny: Any, tmp_path: Path, changes: dict[str, Any]):
    speculator = mlp_speculator(tiny, **changes)
    save_mlp(speculator, tmp_path)
    again = read_mlp(read_head(str(tmp_path)), *SIZES)
    assert again.config == speculator.config
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in speculator.state_dict().items())
    config = json.loads((tmp_path / "config.json").read_text())
    assert {name: config[name] for name in ("emb_dim", "inner_dim", "n_predict", "vocab_size")} == {
        "emb_dim": 64, "inner_dim": 48, "n_predict": 3, "vocab_size": 64,
    }  # fmt: skip
    assert len(config["top_k_tokens_per_head"]) == 3
    flags = ("tie_weights", "scale_input", "state_before_norm")
    assert [config[flag] for flag in flags] == [bool(changes)] * 3
    assert set(load_file(tmp_path / "model.safetensors")) == set(published())


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        ({"speculator.emb.0.weight": None}, {}, "holds no MLP speculator"),
        ({"speculator.head.2.weight": None}, {}, r"lacks the tensor speculator.head.2.weight, .* shape \[64, 48\]"),
        ({"speculator.proj.3.weight": torch.ones(2)}, {}, r"a tensor speculator.proj.3.weight of shape \[2\]"),
        ({"speculator.ln.1.bias": torch.ones(9)}, {}, r"speculator.ln.1.bias .* shape \[9\], .* should have \[48\]"),
        ({}, {"tie_weights": True}, "speculator.emb.0.weight and speculator.emb.1.weight are not the same"),
    ],
)
def test_files_that_do_not_belong_together(tmp_path: Path, change: dict[str, Any], flags: dict[str, Any], message: str):
    held = {name: tensor for name, tensor in {**published(), **change}.items() if tensor is not None}
    with pytest.raises(ModelLoadError, match=message):
        read_mlp(read_head(str(write(tmp_path, held, **flags))), *SIZES)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((32, 64, 2), r"speculator.proj.0.weight has shape \[48, 64\] and needs \[48, 32\]"),
        ((64, 70, 2), r"speculator.emb.0.weight has shape \[64, 48\] and needs \[70, 48\]"),
    ],
)
def test_another_target(tmp_path: Path, sizes: tuple[int, int, int], message: str):
    with pytest.raises(IncompatibleDrafterError, match=message):
        read_mlp(read_head(str(write(tmp_path, published()))), *sizes)
