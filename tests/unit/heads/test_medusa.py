"""Medusa heads as published and as vLLM keeps them; what the engine drafts is what the heads say of the right state."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from foredraft import SamplingParams
from foredraft.drafters.medusa import MedusaDrafter, MedusaTreeDrafter
from foredraft.errors import IncompatibleDrafterError, ModelLoadError
from foredraft.heads.checkpoint import read_head
from foredraft.heads.medusa import MedusaHeads, read_medusa, save_medusa
from foredraft.testing import RecordingDrafter, engine_for, reference, run, target_for, trained_medusa

GREEDY = SamplingParams(temperature=0.0, max_tokens=14)
PROMPTS = ([7, 8, 9], [5, *range(20, 45)], [11])


@pytest.fixture(scope="module")
def heads(tiny: Any) -> MedusaHeads:
    return trained_medusa(tiny, num_heads=3)


def original(num_heads: int = 5, num_layers: int = 1, prefix: str = "") -> dict[str, torch.Tensor]:
    """The keys of medusa_lm_head.pt."""
    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{prefix}{head}.{layer}.linear.weight"] = torch.randn(64, 64)
            tensors[f"{prefix}{head}.{layer}.linear.bias"] = torch.randn(64)
        tensors[f"{prefix}{head}.{num_layers}.weight"] = torch.randn(64, 64)
    return tensors


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    config = {"base_model_name_or_path": "x", "medusa_num_heads": 2, "medusa_num_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    torch.save(tensors, path / "medusa_lm_head.pt")
    return path


@pytest.mark.parametrize(("num_layers", "prefix"), [(1, ""), (2, "medusa_head.")])
def test_the_original_layout(tmp_path: Path, num_layers: int, prefix: str):
    """Five heads, though config.json speaks of two, as in the published ones."""
    tensors = original(5, num_layers, prefix)
    heads = read_medusa(read_head(str(write(tmp_path, tensors))), 64, 64)
    assert (heads.config.num_heads, heads.config.num_layers) == (5, num_layers)
    x = torch.randn(2, 64)
    expected = x
    for layer in range(num_layers):
        weight, bias = (tensors[f"{prefix}3.{layer}.linear.{part}"] for part in ("weight", "bias"))
        expected = expected + torch.nn.functional.silu(expected @ weight.T + bias)
    assert torch.allclose(heads(x, 3), expected @ tensors[f"{prefix}3.{num_layers}.weight"].T, atol=1e-4)


def test_written_as_vllm_reads_them(tmp_path: Path, heads: MedusaHeads):
    save_medusa(heads, tmp_path, 64)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"blocks.2.layers.0.weight", "blocks.2.layers.0.bias", "lm_heads.2.weight", "token_map"} <= names
    again = read_medusa(read_head(str(tmp_path)), 64, 64)
    assert again.config == heads.config
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in heads.state_dict().items())
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["num_heads"], config["truncated_vocab_size"]) == ("medusa", 3, 61)


def test_one_lm_head_for_all(tmp_path: Path):
    shared = {f"blocks.{i}.layers.0.weight": torch.randn(64, 64) for i in range(2)} | {
        "lm_head.weight": torch.randn(64, 64)
    }
    heads = read_medusa(read_head(str(write(tmp_path, shared))), 64, 64)
    assert heads.config.num_heads == 2
    assert not heads.config.has_bias
    assert torch.equal(heads.lm_heads[1].weight, shared["lm_head.weight"])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((32, 64), "blocks.0.layers.0.weight has shape \\[64, 64\\] and needs \\[32, 32\\]"),
        ((64, 70), "lm_heads.0.weight has shape \\[64, 64\\] and needs \\[70, 64\\]"),
    ],
)
def test_another_target(tmp_path: Path, sizes: tuple[int, int], message: str):
    with pytest.raises(IncompatibleDrafterError, match=message):
        read_medusa(read_head(str(write(tmp_path, original()))), *sizes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"0.0.linear.weight": None}, "holds no Medusa heads"),
        ({"3.1.weight": None}, "lacks the tensor lm_heads.3.weight, which .* has shape \\[64, 64\\]"),
        ({"more": torch.zeros(2)}, "has a tensor more of shape \\[2\\]"),
        (
            {"1.1.weight": torch.zeros(9, 64)},
            "lm_heads.1.weight .* has shape \\[9, 64\\], and .* should have \\[64, 64\\]",
        ),
    ],
)
def test_files_that_do_not_belong_together(tmp_path: Path, change: dict[str, Any], message: str):
    held = {name: tensor for name, tensor in {**original(), **change}.items() if tensor is not None}
    with pytest.raises(ModelLoadError, match=message):
        read_medusa(read_head(str(write(tmp_path, held))), 64, 64)


def test_drafts_are_what_the_heads_say(tiny: Any, heads: MedusaHeads):
    """Head i reads the state of the last token but one, whatever was accepted before."""
    target = target_for(tiny)
    recorder = RecordingDrafter(MedusaDrafter(heads, target))
    sequences = run(engine_for(target, recorder, num_speculative_tokens=5), PROMPTS, GREEDY)
    assert [s.output_token_ids for s in sequences] == [reference(tiny, p, GREEDY).token_ids for p in PROMPTS]
    checked = 0
    for texts, draft in zip(recorder.texts, recorder.drafts, strict=True):
        for text, tokens, count in zip(texts, draft.token_ids.tolist(), draft.num_draft_tokens, strict=True):
            with torch.no_grad():
                state = tiny.model(torch.tensor([text])).last_hidden_state[0, -2:-1] if count else None
            for head in range(count):
                assert heads.token_map[heads(state, head)[0].argmax()] == tokens[head]
                checked += 1
    assert checked > 20
    assert max(max(draft.num_draft_tokens) for draft in recorder.drafts) == 3


def test_trees(tiny: Any, heads: MedusaHeads):
    target = target_for(tiny)
    recorder = RecordingDrafter(MedusaTreeDrafter(heads, target, 2, 4))
    sequences = run(engine_for(target, recorder, num_speculative_tokens=8), PROMPTS, GREEDY)
    assert [s.output_token_ids for s in sequences] == [reference(tiny, p, GREEDY).token_ids for p in PROMPTS]
    assert max(max(draft.num_draft_tokens) for draft in recorder.drafts) == 8
    assert max(max(draft.depths(0), default=0) for draft in recorder.drafts) == 3


def test_a_measured_tree_is_drafted_as_it_stands(tiny: Any, heads: MedusaHeads, tmp_path: Path):
    """Ranks of each head along its paths, the first nodes of the tree where not all are wanted."""
    choices = ((0,), (1,), (0, 0), (3,), (0, 2), (0, 0, 1))
    measured = copy.copy(heads)
    measured.config = replace(heads.config, choices=choices)
    save_medusa(measured, tmp_path, 64)
    read = read_medusa(read_head(str(tmp_path)), 64, 64)
    assert read.config.choices == choices
    target = target_for(tiny)
    recorder = RecordingDrafter(MedusaTreeDrafter(read, target, 2, 4))
    sequences = run(engine_for(target, recorder, num_speculative_tokens=5), PROMPTS, GREEDY)
    assert [s.output_token_ids for s in sequences] == [reference(tiny, p, GREEDY).token_ids for p in PROMPTS]
    checked = 0
    for texts, draft in zip(recorder.texts, recorder.drafts, strict=True):
        for row, (text, count) in enumerate(zip(texts, draft.num_draft_tokens, strict=True)):
            with torch.no_grad():
                state = tiny.model(torch.tensor([text])).last_hidden_state[0, -2:-1]
            for node, path in enumerate(choices[:count]):
                best = heads(state, len(path) - 1)[0].topk(4).indices
                assert draft.token_ids[row, node] == heads.token_map[best[path[-1]]]
                checked += 1
            assert draft.parents[row, :count].tolist() == [-1, -1, 0, -1, 0][:count]
    assert checked > 20
    assert max(max(draft.num_draft_tokens) for draft in recorder.drafts) == 5
    sampled = SamplingParams(temperature=1.0, max_tokens=8)
    assert all(s.finish_reason for s in run(engine_for(target, recorder), PROMPTS[:1], sampled))


@pytest.mark.parametrize("choices", [[[0, 1]], [[0], [0]], [[0], [-1]], [["x"]], [3]])
def test_choices_that_are_no_tree(heads: MedusaHeads, tmp_path: Path, choices: Any):
    save_medusa(heads, tmp_path, 64)
    config = json.loads((tmp_path / "config.json").read_text()) | {"medusa_choices": choices}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="medusa_choices"):
        read_medusa(read_head(str(tmp_path)), 64, 64)
