"""The target's pass goes on from the states of a draft: the same logits, the first layers run for the rest only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from foredraft.errors import InvalidOptionError, UnsupportedModelError
from foredraft.target.early_exit import EarlyExit
from foredraft.target.layout import PassRow
from foredraft.testing import target_for, tiny_model

TEXTS = {0: [3, 14, 15, 9], 1: list(range(20, 61)), 2: [7]}
DRAFTS = {0: [11, 12, 13], 1: [5], 2: [8, 9]}
LAYERS, EXIT = 4, 2


@pytest.fixture(scope="module")
def model():
    return tiny_model(1, num_hidden_layers=LAYERS)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bf16"])
def target(model, request):
    target = target_for(model, dtype=request.param)
    if request.param is torch.bfloat16 and target.native is None:
        pytest.skip("needs AVX512-BF16 and a C++ compiler for identical bits")
    for key, text in TEXTS.items():
        target.slots.open(key)
        target.prefill(key, text[:-1])
    return target


def draft(exit_, slots, keys=(0, 1, 2)):
    """Feed the last token of each text and its draft but the last token, as a drafter does, ragged."""
    starts = {key: slots.length(key) for key in keys}
    for step in range(3):
        rows = [PassRow(k, [[TEXTS[k][-1], *DRAFTS[k]][step]], 1) for k in keys if step < len(DRAFTS[k])]
        exit_.draft(rows)
        for row in rows:
            slots.commit(row.sequence_id, 1)
    for key, start in starts.items():
        slots.truncate(key, start)


def verify_rows(order=(1, 0, 2)):
    return [PassRow(key, [TEXTS[key][-1], *DRAFTS[key]], len(DRAFTS[key]) + 1) for key in order]


def same(ours, theirs):
    return torch.equal(ours, theirs) if ours.dtype == torch.bfloat16 else torch.allclose(ours, theirs, atol=1e-4)


def cached(target):
    target_ = target.slots
    return {key: [(k.clone(), v.clone()) for k, v in target_.read(key)] for key in TEXTS}


def test_the_pass_gives_the_logits_and_the_cache_of_the_whole_model(target):
    """A ragged batch in another order than the slots; in bf16 on the native kernels bit for bit."""
    expected = target.forward(verify_rows())
    for key in TEXTS:
        target.slots.commit(key, 1 + len(DRAFTS[key]))
    cache = cached(target)
    for key in TEXTS:
        target.slots.truncate(key, len(TEXTS[key]) - 1)
    target.early_exit = EarlyExit(target, EXIT)
    draft(target.early_exit, target.slots)
    assert same(target.forward(verify_rows()), expected)
    for key in TEXTS:
        assert target.slots.length(key) == len(TEXTS[key]) - 1
        target.slots.commit(key, 1 + len(DRAFTS[key]))
    for key, layers in cached(target).items():
        for (keys, values), (old_keys, old_values) in zip(layers, cache[key], strict=True):
            assert same(keys, old_keys)
            assert same(values, old_values)


def test_the_first_layers_run_for_what_is_missing_only(target):
    """Of nine tokens three were not drafted with: the layers below the exit see those, the others see all."""
    target.early_exit = EarlyExit(target, EXIT)
    seen = {}
    for i, layer in enumerate(target.layers):
        layer.register_forward_pre_hook(lambda _, args, i=i: seen.__setitem__(i, args[0].shape[1]))
    draft(target.early_exit, target.slots)
    seen.clear()
    target.forward(verify_rows())
    assert [seen[i] for i in range(LAYERS)] == [3, 3, 9, 9]


def test_states_are_used_once(target):
    """A second pass at the same place runs the whole model."""
    target.early_exit = EarlyExit(target, EXIT)
    draft(target.early_exit, target.slots)
    rows = verify_rows()
    assert target.early_exit.take(rows).keys() == TEXTS.keys()
    assert not target.early_exit.take(rows)


def test_rows_without_states_run_whole_beside_the_others(target):
    """Two drafted rows, one prompt of several tokens in two chunks, logits of each."""
    rows = [*verify_rows((2, 0)), PassRow(1, [TEXTS[1][-1], 50, 51], 3)]
    expected = target.forward(rows)
    target.early_exit = EarlyExit(target, EXIT)
    draft(target.early_exit, target.slots, keys=(0, 2))
    assert same(target.forward(rows), expected)


def test_states_hold_as_far_as_the_tokens_agree(target):
    """Another second draft token than was fed: the states of two tokens are good, and used."""
    row = PassRow(0, [TEXTS[0][-1], DRAFTS[0][0], 60, 61], 4)
    expected = target.forward([row])
    target.early_exit = exit_ = EarlyExit(target, EXIT)
    draft(exit_, target.slots)
    taken = exit_.take([row])
    assert {key: len(states) for key, states in taken.items()} == {0: 2}
    assert same(exit_.resume([row], taken), expected)


@pytest.mark.parametrize("why", ["moved on", "overwritten", "a tree"])
def test_states_that_do_not_fit_are_not_used(target, why):
    """The text has grown; another model wrote where the first layers' keys were; or the draft branches."""
    target.early_exit = exit_ = EarlyExit(target, EXIT)
    draft(exit_, target.slots)
    row = verify_rows((0,))[0]
    if why == "moved on":
        target.slots.commit(0, 1)
    elif why == "overwritten":
        target.with_layers(target.layers[1:]).forward([row])
    else:
        row = PassRow(0, row.token_ids, 4, [-1, 0, 0])
    assert not exit_.take([row])


def test_a_closed_neighbour_takes_the_scratch_of_the_one_that_moves(target):
    """Closing slot 0 moves the last sequence there without what lies past its length."""
    target.early_exit = exit_ = EarlyExit(target, EXIT)
    draft(exit_, target.slots)
    target.slots.close(0)
    assert exit_.take(verify_rows((1, 2))).keys() == {1}


@pytest.mark.parametrize("exit_layer", [0, LAYERS])
def test_the_exit_must_lie_inside(target, exit_layer):
    """None or all of the layers would draft nothing, or everything."""
    with pytest.raises(InvalidOptionError, match=rf"exit_layer={exit_layer} is outside \[1, 3\]"):
        EarlyExit(target, exit_layer)


def test_a_model_that_hands_on_more_than_states_is_refused(model):
    """Its third layer adds what it reads of the first one's input."""
    target = target_for(model)
    layers, kept = target.layers, []

    class Giver(nn.Module):
        def forward(self, hidden_states, **options):
            kept[:] = [hidden_states.mean(1, keepdim=True)]
            return self.layer(hidden_states, **options)

    class Taker(nn.Module):
        def forward(self, hidden_states, **options):
            return self.layer(hidden_states + 3 * kept[0], **options)

    for i, kind in ((0, Giver), (2, Taker)):
        wrapper = kind()
        wrapper.layer = layers[i]
        target.model.model.layers[i] = wrapper
    with pytest.raises(UnsupportedModelError, match="hands more from layer to layer than hidden states"):
        EarlyExit(target, EXIT)
