"""Snapshots of real caches: lengths, what is shared, and how far a sequence goes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foredraft.errors import RequestError
from foredraft.target.layout import PassRow
from foredraft.target.stateful import LONGEST_REPLAY, StatefulModel
from foredraft.target.states import NUM_SNAPSHOTS, StateSlots, copy_state
from foredraft.testing import target_for, tiny_mamba

TEXT = [(7 * i * i + 3 * i) % 64 for i in range(60)]


@pytest.fixture
def target() -> StatefulModel:
    target = target_for(tiny_mamba())
    assert isinstance(target, StatefulModel)
    target.slots.open(0)
    return target


def feed(target: StatefulModel, count: int, num_logits: int = 1) -> None:
    at = target.slots.length(0)
    target.forward([PassRow(0, TEXT[at : at + count], num_logits)])


def places(target: StatefulModel) -> list[int]:
    return [place for place, _ in target.slots._held[0].snapshots]


def test_what_is_wholly_kept_needs_no_replay(target: StatefulModel):
    feed(target, 5)
    target.slots.commit(0, 5)
    feed(target, 4, num_logits=4)
    target.slots.commit(0, 1, path=[0, 1, 2])
    assert target.slots.length(0) == 9
    assert places(target) == [0, 5]


def test_a_rejection_goes_back_to_the_snapshot_before_the_draft(target: StatefulModel):
    """Two of three draft tokens are accepted: neither they nor the token before them are in the cache."""
    feed(target, 5)
    target.slots.commit(0, 5)
    before = [part.clone() for part in target.slots.read(0)[1]]
    feed(target, 4, num_logits=4)
    assert not all(torch.equal(*pair) for pair in zip(before, target.slots.read(0)[1], strict=True))
    target.slots.commit(0, 1, path=[0, 1])
    assert target.slots.length(0) == 5
    assert all(torch.equal(*pair) for pair in zip(before, target.slots.read(0)[1], strict=True))


def test_replay_is_bounded(target: StatefulModel):
    """With nothing but rejections a snapshot is taken behind the accepted tokens once there are enough of them."""
    feed(target, 20)
    target.slots.commit(0, 20)
    text_len, widths = 20, []
    for _ in range(30):
        certain = text_len - target.slots.length(0) + 1
        widths.append(certain)
        target.forward([PassRow(0, [*TEXT[target.slots.length(0) : text_len + 1], 1, 2, 3], 4)])
        target.slots.commit(0, certain)
        target.slots.check_integrity()
        assert len(places(target)) <= NUM_SNAPSHOTS + 1
        text_len += 1
    assert max(widths) == LONGEST_REPLAY + 1
    assert widths.count(1) == 4, "behind a snapshot nothing is fed again"


def test_a_long_plain_stretch_is_not_fed_again(target: StatefulModel):
    """Without drafts there are snapshots too, though not at every token: a draft may come at any time."""
    for _ in range(40):
        feed(target, 1)
        target.slots.commit(0, 1)
    taken = places(target)
    assert 40 - taken[-1] <= LONGEST_REPLAY + 1
    assert target.slots.truncate(0, 39) == taken[-1]


def test_truncate_gives_the_length_that_is_left(target: StatefulModel):
    feed(target, 12)
    target.slots.commit(0, 12)
    feed(target, 1)
    target.slots.commit(0, 1)
    assert places(target) == [0, 12]
    assert target.slots.truncate(0, 13) == 13
    assert target.slots.truncate(0, 12) == 12
    assert target.slots.truncate(0, 11) == 0
    with pytest.raises(ValueError, match=r"it holds 0; use a length in \[0, 0\]"):
        target.slots.truncate(0, 1)


def test_more_than_was_fed_cannot_be_committed(target: StatefulModel):
    feed(target, 5)
    with pytest.raises(ValueError, match=r"commit of 5 \+ 1 tokens .* within \[0, 5\]"):
        target.slots.commit(0, 5, path=[0])
    with pytest.raises(AssertionError, match="chains"):
        target.slots.commit(0, 1, path=[1])


def test_sequences_open_once():
    slots = StateSlots(10)
    slots.open(3)
    with pytest.raises(RequestError, match="sequence 3 already has a slot"):
        slots.open(3)
    slots.close(3)
    assert 3 not in slots
    assert slots.num_open == 0


def test_a_copy_shares_keys_and_copies_states():
    """Keys are never written in place, so they are not copied; states are."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    from foredraft.testing import random_model

    config = Lfm2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False,
    )  # fmt: skip
    target: Any = target_for(random_model(Lfm2ForCausalLM, config, 0), max_model_len=64)
    target.slots.open(0)
    feed(target, 9)
    cache, _ = target.slots.cache(0)
    copied = copy_state(cache)
    conv, attention = copied.layers
    assert attention.keys is cache.layers[1].keys
    assert conv.conv_states[0] is not cache.layers[0].conv_states[0]
    kept = [tensor.clone() for tensor in (conv.conv_states[0], attention.keys, attention.values)]
    target.slots.commit(0, 9)
    feed(target, 1)
    feed(target, 5)
    after = (conv.conv_states[0], attention.keys, attention.values)
    assert all(torch.equal(*pair) for pair in zip(kept, after, strict=True))
