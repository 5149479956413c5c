"""PARD: rows in training are what drafting feeds; folders as AMD publishes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from foredraft.errors import ModelLoadError
from foredraft.heads.pard import mask_token_of, parallel_rows, save_pard
from foredraft.target.loader import load_model

MASK = 63


def test_each_row_says_what_drafting_says(tiny: Any):
    """Every depth at every place, and no row sees a token that drafting does not have."""
    texts = torch.tensor([[7, 8, 9, 10, 11, 12], [3, 5, 3, 5, 4, 1]])
    rows = parallel_rows(texts, MASK, 4, keep=1.0)
    out = tiny(input_ids=rows.input_ids(texts), position_ids=rows.positions, attention_mask=rows.attention_mask).logits
    assert len(rows.places) == 5 + 4 + 3 + 2
    for row, (place, depth) in enumerate(zip(rows.places.tolist(), rows.depths.tolist(), strict=True)):
        fed = torch.cat([texts[:, : place - depth + 1], torch.full((2, depth), MASK)], 1)
        assert torch.allclose(out[:, row], tiny(fed).logits[:, -1], atol=1e-4)
        assert torch.equal(rows.labels[:, row], texts[:, place + 1])


def test_deeper_rows_are_dropped_with_those_that_build_on_them():
    texts = torch.arange(200).expand(2, -1).clone()
    texts[0, 150:] = -100
    rows = parallel_rows(texts, MASK, 6, keep=0.5, keep_at_least=0.2, generator=torch.Generator().manual_seed(3))
    assert rows.depths.bincount().tolist() == [199, 100, 50, 40, 40, 40]
    kept = set(zip(rows.depths.tolist(), rows.places.tolist(), strict=True))
    assert all((depth - 1, place - 1) in kept for depth, place in kept if depth)
    assert (rows.labels[0] == -100).sum() == (rows.places >= 149).sum()
    assert torch.equal(rows.labels[1], rows.places + 1)


def test_masks_stand_only_where_they_reach_a_label():
    """Every label that masks can tell is told at every depth, and no group of masks is all prompt."""
    texts = torch.arange(40).expand(2, -1).clone()
    texts[:, :30] = -100
    rows = parallel_rows(texts, MASK, 4, keep=1.0)
    assert rows.depths.bincount().tolist() == [39, 12, 11, 10]
    starts = rows.places - rows.depths
    assert int(starts[rows.depths > 0].min()) == 26  # its last mask tells the first label, at 30
    for depth in range(4):
        assert rows.labels[0, rows.depths == depth].tolist()[-10:] == list(range(30, 40))
    assert parallel_rows(torch.full((1, 9), -100), MASK, 4).depths.tolist() == [0] * 8


def test_a_folder_as_published(tiny: Any, tmp_path: Path):
    """An ordinary causal model with pard_token and spd_type; it is read as any model."""
    save_pard(tiny, tmp_path, MASK, num_tokens=8)
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["architectures"] == ["LlamaForCausalLM"]
    assert (content["pard_token"], content["spd_type"], content["para_num"]) == (63, "pard", 8)
    assert not hasattr(tiny.config, "pard_token"), "the caller's model is left alone"
    loaded = load_model(tmp_path)
    assert mask_token_of(loaded.model.config, tmp_path, 64) == 63
    assert all(torch.equal(p, q) for p, q in zip(loaded.model.parameters(), tiny.parameters(), strict=True))


@pytest.mark.parametrize("key", ["pard_token", "ptd_token_id", "mask_token_id"])
def test_names_of_the_mask(key: str):
    assert mask_token_of(LlamaConfig(**{key: 5}), "x", 64) == 5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "is no parallel draft model: its config.json has no pard_token.*use|method 'draft_model'"),
        ({"pard_token": 64}, "pard_token 64 of x is no token of its vocabulary of 64"),
        ({"pard_token": "<mask>"}, "pard_token '<mask>' of x is no token"),
    ],
)
def test_no_mask(config: dict[str, Any], message: str):
    with pytest.raises(ModelLoadError, match=message):
        mask_token_of(LlamaConfig(**config), "x", 64)
