"""Attention by torch's own kernels over the slots, against attention written out query by query."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from foredraft.errors import UnsupportedModelError
from foredraft.target.attention import attend, attention_forward
from foredraft.target.layout import PassRow, PassShape, build_layout
from foredraft.target.segments import LONG_ROW
from foredraft.target.slots import KVSlots
from foredraft.target.storage import LayerShape

HEADS = [(4, 4, 8, 8), (6, 2, 8, 8), (4, 1, 16, 8)]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 5},
    "window of one": {"window": 1},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 7, "softcap": 3.0, "sinks": True},
}
CACHED = (3, 130, 40, 11)
WIDTHS = (1, 4, LONG_ROW + 3, 2)


def written_out(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int, options: dict[str, Any]
) -> torch.Tensor:
    """One query ``[heads, D]`` over keys ``[S, kv_heads, D]``, in float64."""
    first = max(0, position - options["window"] + 1) if options.get("window") else 0
    outputs = []
    group = query.shape[0] // keys.shape[1]
    for head, q in enumerate(query.double()):
        k, v = keys[first : position + 1, head // group].double(), values[first : position + 1, head // group].double()
        scores = k @ q * options["scaling"]
        if options.get("softcap"):
            scores = torch.tanh(scores / options["softcap"]) * options["softcap"]
        if options.get("sinks") is not None:
            scores = torch.cat([scores, options["sinks"][head : head + 1].double()])
        probs = scores.softmax(0)[: len(k)]
        outputs.append(probs @ v)
    return torch.stack(outputs)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_ragged_rows_attend_to_their_own_past(heads: tuple[int, int, int, int], name: str):
    """Prompts, drafts and single tokens in one pass, behind caches of several lengths; stale scratch is no matter."""
    num_heads, num_kv_heads, key_dim, value_dim = heads
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    slots = KVSlots([LayerShape(num_kv_heads, key_dim, value_dim)], torch.float32, torch.device("cpu"), 1000)
    for sequence_id, length in enumerate(CACHED):
        slots.open(sequence_id)
        slots.commit(sequence_id, length)
    slots.keys[0].copy_(draw(*slots.keys[0].shape))
    slots.values[0].copy_(draw(*slots.values[0].shape))
    rows = [PassRow(i, [1] * width, 1) for i, width in enumerate(WIDTHS)]
    layout = build_layout(rows, slots, PassShape())
    total = sum(WIDTHS)
    query, key, value = (draw(total, num_heads, key_dim), draw(total, num_kv_heads, key_dim),
                         draw(total, num_kv_heads, value_dim))  # fmt: skip
    options = {"scaling": 0.4, **OPTIONS[name]}
    if options.get("sinks"):
        options["sinks"] = draw(num_heads)
    out = attend(0, query, key, value, layout, **options)
    assert out.shape == (total, num_heads, value_dim)
    at = 0
    for sequence_id, (cached, width) in enumerate(zip(CACHED, WIDTHS, strict=True)):
        keys, values = slots.keys[0][sequence_id], slots.values[0][sequence_id]
        assert torch.equal(keys[cached : cached + width], key[at : at + width])
        for i in range(width):
            exact = written_out(query[at + i], keys, values, cached + i, options)
            assert torch.allclose(out[at + i].double(), exact, atol=1e-5), (sequence_id, i)
        at += width


class Layer(nn.Module):
    layer_idx = 0


def call_as_a_model_does(**options: Any) -> torch.Tensor:
    slots = KVSlots([LayerShape(2, 8, 8)], torch.float32, torch.device("cpu"), 100)
    slots.open(0)
    layout = build_layout([PassRow(0, [1, 2, 3], 1)], slots, PassShape())
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(1, 4, 3, 8, generator=generator)
    key, value = torch.randn(1, 2, 3, 8, generator=generator), torch.randn(1, 2, 3, 8, generator=generator)
    out, weights = attention_forward(Layer(), query, key, value, None, layout=layout, **options)
    assert weights is None
    assert out.shape == (1, 3, 4, 8)
    return out


def test_the_default_scaling_is_that_of_transformers():
    assert torch.equal(call_as_a_model_does(), call_as_a_model_does(scaling=8**-0.5))
    assert not torch.equal(call_as_a_model_does(), call_as_a_model_does(scaling=1.0))


def test_an_option_that_changes_attention_and_is_unknown_is_refused_by_name():
    """Options without effect on the result are let through; so is one that is None."""
    with pytest.raises(UnsupportedModelError, match="Layer asks its attention for position_bias.*another engine"):
        call_as_a_model_does(position_bias=torch.zeros(1))
    call_as_a_model_does(position_bias=None, dropout=0.0, output_attentions=False)
