"""The check at construction finds states that are lost, not restored, or computed in two ways."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import Mamba2ForCausalLM

from foredraft.errors import UnsupportedModelError
from foredraft.target.statecheck import check_states
from foredraft.target.stateful import StatefulModel
from foredraft.target.wrap import wrap_model
from foredraft.testing import random_model, tiny_mamba


def faulty(change: Any) -> Any:
    """A tiny Mamba 2 with ``change(tokens, cache, call)`` around each call of it."""

    class Faulty(Mamba2ForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: Any, cache: Any = None, use_cache: Any = None, logits_to_keep: int = 0) -> Any:
            def call() -> Any:
                return super(Faulty, self).forward(
                    input_ids=input_ids, cache=cache, use_cache=use_cache, logits_to_keep=logits_to_keep
                )

            return change(input_ids, cache, call)

    return random_model(Faulty, tiny_mamba().config, 0)


def forget_when_long(tokens: torch.Tensor, cache: Any, call: Any) -> Any:
    """What several real models do: a pass of several tokens begins with an empty state."""
    if tokens.shape[1] > 1:
        cache.reset()
    return call()


def forget_slightly_when_short(tokens: torch.Tensor, cache: Any, call: Any) -> Any:
    """One state loses a thousandth of itself in passes of one token."""
    if tokens.shape[1] == 1 and cache.layers[0].recurrent_states[0] is not None:
        cache.layers[0].recurrent_states[0].mul_(0.999)
    return call()


def keep_elsewhere() -> Any:
    """The state is where no copy of the cache reaches it."""
    kept: dict[str, Any] = {}

    def change(tokens: torch.Tensor, cache: Any, call: Any) -> Any:
        state = cache.layers[0].recurrent_states[0]
        if state is not None and kept:
            state.copy_(kept["state"])
        out = call()
        kept["state"] = cache.layers[0].recurrent_states[0].clone()
        return out

    return change


def fail_when_continued(tokens: torch.Tensor, cache: Any, call: Any) -> Any:
    if cache.layers[0].recurrent_states[0] is not None and tokens.shape[1] == 2:
        raise RuntimeError("only odd numbers of tokens")
    return call()


def test_a_sound_model_passes():
    target = wrap_model(faulty(lambda tokens, cache, call: call()), 64)
    assert isinstance(target, StatefulModel)
    assert not target.single_steps


def test_a_state_lost_in_long_passes_is_fed_token_by_token(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        target: Any = wrap_model(faulty(forget_when_long), 64)
    assert target.single_steps
    assert "cannot make it faster" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (forget_slightly_when_short, r"token by token than in one pass: the difference is 0\.\d+ of .*limit 3e-04"),
        (keep_elsewhere(), "restored from a copy|token by token"),
        (fail_when_continued, r"Faulty \(mamba2, layers of linear_attention\) fails .*only odd numbers of tokens"),
    ],
    ids=["two formulas", "state elsewhere", "failure"],
)
def test_what_cannot_be_verified_exactly_is_refused(change: Any, message: str):
    with pytest.raises(UnsupportedModelError, match=message):
        wrap_model(faulty(change), 64)


def test_bf16_is_checked_in_float32_and_left_as_it_was():
    """A fault of a thousandth would drown in the rounding of bf16."""
    model = tiny_mamba().to(torch.bfloat16)
    before = {name: (tensor.data_ptr(), tensor.dtype) for name, tensor in model.state_dict().items()}
    target = wrap_model(model, 64)
    assert target.dtype == torch.bfloat16
    assert {name: (tensor.data_ptr(), tensor.dtype) for name, tensor in model.state_dict().items()} == before
    with pytest.raises(UnsupportedModelError, match="token by token"):
        wrap_model(faulty(forget_slightly_when_short).to(torch.bfloat16), 64)


def test_the_check_leaves_nothing_open():
    target = wrap_model(tiny_mamba(), 64)
    assert isinstance(target, StatefulModel)
    check_states(target)
    assert target.slots.num_open == 0
