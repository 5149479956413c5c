"""The self-check of layer ids and norms: it finds the convention that a head was trained with, and is silent else."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from foredraft.heads.convention import check_conventions, neighbours
from foredraft.heads.eagle import EagleHead
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.mlp import MlpSpeculator
from foredraft.heads.mtp import MtpHead
from foredraft.testing import (
    eagle3_config,
    eagle3_head,
    eagle_head,
    mlp_speculator,
    mtp_head,
    random_model,
    target_for,
    tiny_config,
)

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


@pytest.fixture(scope="module")
def signed(model: Any) -> Any:
    """The same target, whose final norm changes the sign of half of the coordinates."""
    twin = copy.deepcopy(model)
    signs = 1.0 - 2.0 * torch.randint(0, 2, (SIZE,), generator=torch.Generator().manual_seed(0))
    twin.model.norm.weight.copy_(signs)
    twin.lm_head.weight *= signs
    return twin


def step_on(model: Any) -> torch.Tensor:
    """Weights ``[SIZE, SIZE]`` from the state of a token behind the norm to that of the next one."""
    added = sum(layer.mlp.down_proj.bias for layer in model.model.layers)[:WORDS]
    weight = torch.zeros(SIZE, SIZE)
    weight[:WORDS, :WORDS] = torch.eye(WORDS).roll(1, 0)
    weight[:WORDS, CONSTANT] = added - added.roll(1)
    weight[CONSTANT, CONSTANT] = 1.0
    signs = model.model.norm.weight
    return weight * signs * signs[:, None]


def eagle(model: Any, **options: Any) -> EagleHead:
    head = eagle_head(model, **options)
    head.layers[0].self_attn.o_proj.weight.zero_()
    head.layers[0].mlp.down_proj.weight.zero_()
    head.fc.weight.copy_(torch.cat([torch.zeros(SIZE, SIZE), step_on(model)], 1))
    return head


def mtp(model: Any, states_first: bool = False, **options: Any) -> MtpHead:
    """What the order of its projection is said to be has no influence on its weights, which have the state behind."""
    head = mtp_head(model, states_first=states_first, **options)
    head.block.inner.self_attn.o_proj.weight.zero_()
    head.block.inner.mlp.down_proj.weight.zero_()
    head.eh_proj.weight.copy_(torch.cat([torch.zeros(SIZE, SIZE), step_on(model)], 1))
    return head


def mlp(model: Any, **options: Any) -> MlpSpeculator:
    speculator = mlp_speculator(model, inner_size=WORDS, **options)
    for step in range(3):
        speculator.emb[step].weight.zero_()
        speculator.head[step].weight.copy_(torch.eye(WORDS))
        speculator.proj[step].weight.copy_(
            torch.eye(WORDS).roll(1, 0) if step else model.lm_head.weight @ step_on(model)
        )
    return speculator


@pytest.mark.parametrize(
    ("make", "wrong", "advice"),
    [
        (eagle, {"feature_layers": (3,)}, "state_before_norm False"),
        (mtp, {"feature_layers": (3,)}, "state_before_norm False"),
        (mtp, {"states_first": True}, "mtp_hidden_states_first False"),
        (mlp, {"feature_layers": (3,)}, "state_before_norm False"),
    ],
)
def test_heads_on_the_last_state(
    signed: Any, make: Any, wrong: dict[str, Any], advice: str, caplog: pytest.LogCaptureFixture
):
    """Silent as they were made; read by another convention, the warning names the right one."""
    target, tokenizer = target_for(signed), Words()
    with caplog.at_level(logging.WARNING):
        scores = check_conventions(make(signed), target, tokenizer, "a head")
        assert not caplog.records
        assert scores["as read"] == max(scores.values()) > 0.9
        check_conventions(make(signed, **wrong), target, tokenizer, "a head")
    assert advice in caplog.text


def test_neighbours_of_each_kind(tiny: Any):
    normed = eagle_head(tiny, layernorms=True)
    assert [name for name, _ in neighbours(normed, 2)] == ["state_before_norm True", "norm_output True"]
    assert [name for name, _ in neighbours(mtp_head(tiny, feature_layers=(2,)), 2)] == [
        "state_before_norm False", "mtp_hidden_states_first True", "norm_output False",
    ]  # fmt: skip
