"""A recurrent target gives the logits of one plain pass, however a text is fed and whatever is rejected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from foredraft.errors import UnsupportedModelError
from foredraft.target.layout import PassRow
from foredraft.target.stateful import LONGEST_REPLAY, StatefulModel
from foredraft.target.wrap import wrap_model
from foredraft.testing import check_cache, random_model, target_for, tiny_mamba, tiny_model

TEXTS = [[(7 * i * i + 3 * i + salt) % 64 for i in range(60)] for salt in range(3)]


def stepped() -> Any:
    config = MambaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8, initializer_range=0.3,
        max_position_embeddings=128,
    )  # fmt: skip
    return random_model(MambaForCausalLM, config, 0)


@pytest.fixture(scope="module", params=["mamba2", "mamba, token by token"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_mamba() if request.param == "mamba2" else stepped()


@pytest.fixture
def target(model: Any) -> StatefulModel:
    target = target_for(model)
    assert isinstance(target, StatefulModel)
    for sequence in range(3):
        target.slots.open(sequence)
    return target


@pytest.fixture(scope="module")
def expected(model: Any) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([text]), use_cache=False).logits[0] for text in TEXTS]


@pytest.mark.parametrize("widths", [[60], [1] * 60, [7, 1, 40, 2, 10], [2, 2, 56]], ids=str)
def test_a_text_in_any_pieces(target: StatefulModel, expected: list[torch.Tensor], widths: list[int]):
    parts, at = [], 0
    for width in widths:
        parts.append(target.forward([PassRow(0, TEXTS[0][at : at + width], width)]))
        target.slots.commit(0, width)
        at += width
    assert torch.allclose(torch.cat(parts), expected[0], atol=5e-4)
    check_cache(target, 0, [*TEXTS[0], 1])


def test_ragged_rows_in_one_pass(target: StatefulModel, expected: list[torch.Tensor]):
    """Logits come in the order of the rows, as many as were asked for; a pass changes no length."""
    for sequence, length in ((0, 11), (2, 50)):
        target.prefill(sequence, TEXTS[sequence][:length], chunk=7)
    rows = [PassRow(2, TEXTS[2][50:51], 1), PassRow(0, TEXTS[0][11:14], 2), PassRow(1, TEXTS[1][:40], 0)]
    passes = target.num_passes
    logits = target.forward(rows)
    assert target.num_passes == passes + 1
    assert torch.allclose(logits, torch.cat([expected[2][50:51], expected[0][12:14]]), atol=5e-4)
    assert [target.slots.length(i) for i in range(3)] == [11, 0, 50]


@pytest.mark.parametrize("pending", [1, LONGEST_REPLAY, LONGEST_REPLAY + 1, 30])
@pytest.mark.parametrize("kept", [0, 2, 4])
def test_rejected_tokens_leave_no_trace(target: StatefulModel, expected: list[torch.Tensor], pending: int, kept: int):
    """A draft of four right tokens and four wrong ones behind pending ones, of which ``kept`` are committed."""
    text = TEXTS[0]
    target.prefill(0, text[:10])
    end = 10 + pending
    logits = target.forward([PassRow(0, [*text[10 : end + 4], 5, 5, 5, 5], 9)])
    assert torch.allclose(logits[:5], expected[0][end - 1 : end + 4], atol=5e-4)
    target.slots.commit(0, pending, path=range(kept))
    rest = text[target.slots.length(0) : end + kept + 3]
    logits = target.forward([PassRow(0, rest, 3)])
    assert torch.allclose(logits, expected[0][end + kept : end + kept + 3], atol=5e-4)


def test_a_pass_without_a_commit_is_undone(target: StatefulModel, expected: list[torch.Tensor]):
    target.prefill(0, TEXTS[0][:20])
    for _ in range(2):
        target.forward([PassRow(0, [5] * 30, 3)])
    logits = target.forward([PassRow(0, TEXTS[0][20:25], 5)])
    assert torch.allclose(logits, expected[0][20:25], atol=5e-4)


def test_calls_of_the_model():
    """Two calls a row at most, or one a token where a state is continued by single tokens only."""
    for make, expected in ((tiny_mamba, [1, 1, 2]), (stepped, [1, 9, 39])):
        target = target_for(make())
        calls: list[int] = []
        target.model.register_forward_pre_hook(
            lambda module, args, kwargs, calls=calls: calls.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        target.slots.open(0)
        counts = []
        for start, end, num_logits in ((0, 12, 1), (12, 21, 3), (21, 60, 4)):
            calls.clear()
            target.forward([PassRow(0, TEXTS[0][start:end], num_logits)])
            target.slots.commit(0, end - start)
            counts.append(len(calls))
            assert sum(calls) == end - start
        assert counts == expected


def test_a_tree_is_not_taken_for_a_chain(target: StatefulModel):
    with pytest.raises(AssertionError, match="cannot branch"):
        target.forward([PassRow(0, [1, 2, 3], 3, parents=[-1, -1])])


def test_compiling_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"compile=True .*Mamba2ForCausalLM \(mamba2, layers of linear"):
        wrap_model(tiny_mamba(), 64, compiled=True)


def test_a_model_of_attention_is_wrapped_as_before():
    assert not isinstance(target_for(tiny_model()), StatefulModel)


def test_a_model_that_takes_no_cache_is_refused():
    class NoCache(type(tiny_mamba())):  # type: ignore[misc]
        def forward(self, input_ids: torch.Tensor) -> Any:
            return super().forward(input_ids=input_ids)

    model = random_model(NoCache, tiny_mamba().config, 0)
    with pytest.raises(UnsupportedModelError, match=r"NoCache .*none of the names cache, past_key_values"):
        wrap_model(model, 64)
