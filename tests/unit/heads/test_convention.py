"""The self-check of layer ids and norms: it finds the convention that a head was trained with, and is silent else."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from foredraft.heads.convention import check_conventions
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.testing import eagle3_config, eagle3_head, random_model, target_for, tiny_config

SIZE, WORDS, CONSTANT = 96, 64, 90


class Words:
    """A tokenizer that counts: 0, 1, 2, ..."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(range(60))}


def reader(distance: int, added: torch.Tensor) -> torch.Tensor:
    """Weights ``[WORDS, SIZE]`` that name the token ``distance`` behind a state's, to which ``added`` was added."""
    weight = torch.zeros(WORDS, SIZE)
    for token in range(WORDS):
        weight[token, (token - distance) % WORDS] = 1.0
        weight[token, CONSTANT] = -added[(token - distance) % WORDS]
    return weight


@pytest.fixture(scope="module")
def model() -> Any:
    """Counts on. A state is the token's one-hot, a constant, and what each layer has added, a vector of its own."""
    config = tiny_config(hidden_size=SIZE, num_hidden_layers=3, mlp_bias=True)
    model = random_model(LlamaForCausalLM, config, seed=0)
    generator = torch.Generator().manual_seed(0)
    model.model.embed_tokens.weight.copy_(torch.eye(WORDS, SIZE))
    model.model.embed_tokens.weight[:, CONSTANT] = 1.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        layer.mlp.down_proj.bias.zero_()
        layer.mlp.down_proj.bias[:WORDS] = 3.0 * torch.rand(WORDS, generator=generator)
    model.lm_head.weight.copy_(reader(1, sum(layer.mlp.down_proj.bias for layer in model.model.layers)))
    return model


@pytest.fixture(scope="module")
def head(model: Any) -> Eagle3Head:
    """Reads the state behind the first layer and knows what that layer has added."""
    head = eagle3_head(eagle3_config(model, feature_layers=(1,), draft_vocab_size=WORDS))
    head.layers[0].self_attn.o_proj.weight.zero_()
    head.layers[0].mlp.down_proj.weight.zero_()
    head.fc.weight.copy_(torch.eye(SIZE))
    head.lm_head.weight.copy_(reader(2, model.model.layers[0].mlp.down_proj.bias))
    return head


def with_layers(head: Eagle3Head, layers: tuple[int, ...]) -> Eagle3Head:
    other = copy.deepcopy(head)
    other.config = replace(head.config, feature_layers=layers)
    return other


def test_silent_for_a_head_that_is_read_as_it_was_trained(
    model: Any, head: Eagle3Head, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        scores = check_conventions(head, target_for(model), Words(), "a head")
    assert not caplog.records
    assert scores["as read"] == max(scores.values()) > 0.45
    assert len(scores) == 5


@pytest.mark.parametrize("layer", [0, 2])
def test_warns_of_layers_that_are_off_by_one(
    model: Any, head: Eagle3Head, layer: int, caplog: pytest.LogCaptureFixture
):
    wrong = with_layers(head, (layer,))
    with caplog.at_level(logging.WARNING):
        check_conventions(wrong, target_for(model), Words(), "a head")
    assert "eagle_aux_hidden_state_layer_ids [1]" in caplog.text


def test_says_nothing_without_a_text(model: Any, head: Eagle3Head):
    assert check_conventions(head, target_for(model), None, "a head") == {}


def test_random_heads_are_no_reason_to_warn(model: Any, caplog: pytest.LogCaptureFixture):
    random = eagle3_head(eagle3_config(model))
    with caplog.at_level(logging.WARNING):
        scores = check_conventions(random, target_for(model), Words(), "a head")
    assert not caplog.records
    assert torch.tensor(list(scores.values())).max() < 0.2
