"""The self-check of layer ids: it finds the layers that a DFlash head was trained on, and is silent else."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from foredraft.heads.dflash import DFlashHead
from foredraft.heads.dflash_convention import check_layers
from foredraft.testing import dflash_config, dflash_head, hidden_states, target_for

TEXT = torch.randint(0, 5, (1, 60), generator=torch.Generator().manual_seed(0))
"""So few words that the last one does not tell the next: the head needs the states."""


def tokenizer(text: str) -> dict[str, list[int]]:
    return {"input_ids": TEXT[0].tolist()}


@pytest.fixture(scope="module")
def head(tiny: Any) -> DFlashHead:
    """Knows by heart what the target says behind each place of the text, two places ahead."""
    head = dflash_head(dflash_config(tiny, block_size=3, feature_layers=(1,)), scale=1.0).requires_grad_(True)
    features = hidden_states(tiny, TEXT, (1,))
    said = tiny(TEXT).logits[0].argmax(-1)
    anchors = torch.arange(1, 58)[None]
    labels = torch.stack([said[anchors], said[anchors + 1]], -1)
    embeddings, output = tiny.get_input_embeddings().weight, tiny.lm_head.weight
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(60):
        logits = head(features, TEXT, anchors, embeddings, output)
        loss = F.cross_entropy(logits.flatten(0, 2), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.requires_grad_(False)


def test_silent_for_a_head_that_is_read_as_it_was_trained(
    tiny: Any, head: DFlashHead, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        scores = check_layers(head, target_for(tiny), tokenizer, "a head")
    assert not caplog.records
    assert scores["as read"] == max(scores.values()) > 0.6
    assert len(scores) == 3
    assert check_layers(head, target_for(tiny), None, "a head") == {}


@pytest.mark.parametrize(("layers", "message"), [((0,), "higher by one"), ((2,), "lower by one")])
def test_ids_that_are_off_by_one(
    tiny: Any, head: DFlashHead, caplog: pytest.LogCaptureFixture, layers: tuple[int, ...], message: str
):
    other = copy.copy(head)
    other.config = replace(head.config, feature_layers=layers)
    with caplog.at_level(logging.WARNING):
        check_layers(other, target_for(tiny), tokenizer, "a head")
    assert f"% with each layer id {message}" in caplog.text
