"""A model of some of a target's layers is the transformers model of those layers, and shares weights and slots."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from foredraft.errors import UnsupportedModelError
from foredraft.target.layout import PassRow
from foredraft.target.views import find_layers
from foredraft.testing import target_for, tiny_mamba, tiny_model

TOKENS = [3, 14, 15, 9, 2, 6, 5]


@pytest.fixture(scope="module")
def model():
    return tiny_model(1, num_hidden_layers=4)


@pytest.fixture
def target(model):
    return target_for(model)


def logits_of(target):
    target.slots.open(0)
    logits = target.forward([PassRow(0, TOKENS, len(TOKENS))])
    target.slots.close(0)
    return logits


@pytest.mark.parametrize("kept", [(0,), (0, 1, 2), (0, 3), (1, 2, 3), (2,)])
def test_a_view_is_the_model_with_these_layers(model, target, kept):
    """Compared with transformers' own model whose list was cut; what was cut makes a difference."""
    cut = copy.deepcopy(model)
    cut.model.layers = nn.ModuleList([cut.model.layers[i] for i in kept])
    cut.config.num_hidden_layers = len(kept)
    view = target.with_layers([target.layers[i] for i in kept])
    expected = cut(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    assert torch.allclose(logits_of(view), expected, atol=1e-4)
    assert (logits_of(view) - logits_of(target)).abs().max() > 0.1


def test_the_target_stays_as_it_was(target):
    """The same modules in the same order, the same configuration and logits; nothing stays open."""
    layers, before = target.layers, logits_of(target)
    view = target.with_layers(layers[1:3])
    logits_of(view)
    assert target.layers == layers
    assert target.model.config.num_hidden_layers == 4
    assert torch.equal(logits_of(target), before)
    assert view.slots is target.slots
    assert target.slots.num_open == 0


def test_weights_are_shared(target):
    """No parameter and no module of a layer is a copy."""
    view = target.with_layers(target.layers[:2])
    ours = {id(p) for p in target.model.parameters()}
    assert all(id(p) in ours for p in view.model.parameters())
    assert find_layers(view.model, 2)[1][0] is target.layers[0]


def test_a_model_without_a_list_of_layers_is_refused(model):
    """The list is one shorter than the attention layers that were counted."""
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has no list of 5 decoder layers"):
        find_layers(model, 5)


def test_a_layer_that_does_not_run_alone_is_refused(target):
    """The error of the forward is in the message."""

    class Needy(nn.Module):
        def forward(self, hidden_states, *, from_below, **_):
            return hidden_states

    needy = Needy()
    needy.layer_idx = 0
    with pytest.raises(UnsupportedModelError, match=r"does not run with 1 of its 4 layers .*from_below"):
        target.with_layers([needy])
    assert target.slots.num_open == 0


def test_a_compiled_model_is_refused(target):
    """Its packed modules work inside the graph only."""
    target.compiled = object()
    with pytest.raises(UnsupportedModelError, match="leave compile at False"):
        target.with_layers([])


def test_a_state_is_not_shared_with_a_draft():
    """A Mamba's layers hold what they have read, so a draft would change the text's state."""
    with pytest.raises(UnsupportedModelError, match="Mamba2ForCausalLM.*cannot share with a draft"):
        target_for(tiny_mamba()).layers  # noqa: B018
