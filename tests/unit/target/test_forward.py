"""The target over its slots gives the logits of the transformers model, however a text is fed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foredraft.errors import UnsupportedModelError
from foredraft.target.features import AFTER_NORM, HiddenStates
from foredraft.target.forward import TargetModel
from foredraft.target.layout import PassRow, PassShape
from foredraft.target.segments import LONG_ROW
from foredraft.testing import bigram_model, check_cache, hidden_states, last_logits, target_for, tiny_model

TEXTS = [[(7 * i * i + 3 * i + salt) % 64 for i in range(60)] for salt in range(4)]


@pytest.fixture(scope="module")
def target(tiny: Any) -> TargetModel:
    return target_for(tiny)


@pytest.fixture(scope="module")
def expected(tiny: Any) -> list[torch.Tensor]:
    """Logits of the texts ``[60, V]`` by one plain pass each."""
    with torch.inference_mode():
        return [tiny(input_ids=torch.tensor([text])).logits[0] for text in TEXTS]


def opened(target: TargetModel, count: int) -> None:
    for sequence_id in range(count):
        target.slots.open(sequence_id)


@pytest.fixture(autouse=True)
def closed(request: pytest.FixtureRequest):
    """Every test leaves the shared target empty."""
    yield
    if "target" in request.fixturenames:
        target = request.getfixturevalue("target")
        for sequence_id in range(8):
            if sequence_id in target.slots:
                target.slots.close(sequence_id)
        target.shape = PassShape()


@pytest.mark.parametrize("shape", [PassShape(min_tokens=1, min_queries=1), PassShape(), PassShape(min_tokens=8)])
@pytest.mark.parametrize("widths", [[60], [1] * 60, [7, 1, 40, 2, 10], [LONG_ROW, 28], [LONG_ROW + 1, 27]], ids=str)
def test_a_text_in_any_pieces(target: TargetModel, expected: list[torch.Tensor], widths: list[int], shape: PassShape):
    target.shape = shape
    opened(target, 1)
    parts, at = [], 0
    for width in widths:
        parts.append(target.forward([PassRow(0, TEXTS[0][at : at + width], width)]))
        target.slots.commit(0, width)
        at += width
    assert torch.allclose(torch.cat(parts), expected[0], atol=1e-4)
    check_cache(target, 0, [*TEXTS[0], 1])


def test_ragged_rows_in_one_pass(target: TargetModel, expected: list[torch.Tensor]):
    """Chunks of prompts, drafts and single tokens side by side; logits come in the order of the rows."""
    opened(target, 4)
    for sequence_id, length in ((0, 11), (1, 0), (2, 50), (3, 30)):
        target.prefill(sequence_id, TEXTS[sequence_id][:length], chunk=7)
    passes = target.num_passes
    rows = [PassRow(2, TEXTS[2][50:51], 1), PassRow(3, TEXTS[3][30:35], 5), PassRow(0, TEXTS[0][11:14], 2),
            PassRow(1, TEXTS[1][:40], 0)]  # fmt: skip
    logits = target.forward(rows)
    assert target.num_passes == passes + 1
    wanted = torch.cat([expected[2][50:51], expected[3][30:35], expected[0][12:14]])
    assert torch.allclose(logits, wanted, atol=1e-4)
    assert [target.slots.length(i) for i in range(4)] == [11, 0, 50, 30], "a pass changes no length"


def test_rejected_tokens_leave_no_trace(target: TargetModel, expected: list[torch.Tensor]):
    """A pass over wrong tokens of which none or some are committed, then the right ones."""
    opened(target, 2)
    for sequence_id in (0, 1):
        target.prefill(sequence_id, TEXTS[sequence_id][:20])
    wrong = [5] * 9
    target.forward([PassRow(0, wrong, 9), PassRow(1, [*TEXTS[1][20:22], *wrong], 1)])
    target.slots.commit(1, 2)
    logits = target.forward([PassRow(0, TEXTS[0][20:24], 4), PassRow(1, TEXTS[1][22:24], 2)])
    assert torch.allclose(logits, torch.cat([expected[0][20:24], expected[1][22:24]]), atol=1e-4)


def test_closing_a_neighbour_does_not_disturb(target: TargetModel, expected: list[torch.Tensor]):
    """The last slot moves into the hole, with all layers of its cache."""
    opened(target, 3)
    for sequence_id in range(3):
        target.prefill(sequence_id, TEXTS[sequence_id][:25])
    target.slots.close(0)
    logits = target.forward([PassRow(1, TEXTS[1][25:27], 2), PassRow(2, TEXTS[2][25:26], 1)])
    assert torch.allclose(logits, torch.cat([expected[1][25:27], expected[2][25:26]]), atol=1e-4)


def test_a_growing_cache_keeps_the_text():
    """Across the first 512 positions and the blocks of keys behind them."""
    model = tiny_model(0, max_position_embeddings=1100)
    target = target_for(model)
    text = [(11 * i * i + i) % 64 for i in range(1060)]
    opened(target, 1)
    assert target.slots.capacity < 500
    target.prefill(0, text[:500])
    for width in (10, 1, 1, 1, 3, 500):
        at = target.slots.length(0)
        logits = target.forward([PassRow(0, text[at : at + width], 1)])
        target.slots.commit(0, width)
        assert torch.allclose(logits[0], last_logits(model, text[: at + width]), atol=2e-4)
    assert target.slots.capacity >= 1016


@pytest.mark.parametrize(("cached", "width"), [(510, 3), (510, LONG_ROW), (500, 20), (400, 32)])
def test_a_long_text_beside_a_wide_row(cached: int, width: int):
    """The segment of both reads the keys of the longer one for the queries of the wider one: beyond 512 here."""
    model = tiny_model(0, max_position_embeddings=1100)
    target = target_for(model)
    opened(target, 2)
    text = [(11 * i * i + i) % 64 for i in range(512)]
    target.prefill(0, text[:cached])
    logits = target.forward([PassRow(0, text[cached : cached + 1], 1), PassRow(1, TEXTS[1][:width], 1)])
    assert torch.allclose(logits[0], last_logits(model, text[: cached + 1]), atol=2e-4)
    assert torch.allclose(logits[1], last_logits(model, TEXTS[1][:width]), atol=2e-4)


@pytest.mark.parametrize("vocab_size", [3, 4, 16])
@pytest.mark.parametrize("packed", [True, False])
def test_a_tiny_vocabulary(vocab_size: int, packed: bool):
    """The probe of the loading keeps to the ids that there are."""
    table = torch.arange(float(vocab_size)).repeat(vocab_size, 1)
    model = bigram_model(table, vocab_size=vocab_size)
    target = target_for(model, packed=packed)
    opened(target, 1)
    logits = target.forward([PassRow(0, [0, 1, 2], 3)])
    assert torch.allclose(logits, table[:3], atol=1e-3)


def test_logits_are_in_the_dtype_of_the_model(tiny: Any):
    target = target_for(tiny, dtype=torch.bfloat16)
    opened(target, 1)
    logits = target.forward([PassRow(0, TEXTS[0][:9], 9)])
    assert logits.dtype == torch.bfloat16
    assert target.slots.dtype == torch.bfloat16
    with torch.inference_mode():
        exact = tiny(input_ids=torch.tensor([TEXTS[0][:9]])).logits[0]
    assert float((logits.float() - exact).norm() / exact.norm()) < 0.1


@pytest.mark.parametrize("packed", [True, False])
def test_hidden_states_are_those_of_transformers(tiny, packed):
    """Every numbering, in a ragged batch whose rows are not in the order of their slots; no pass more."""
    target, prompts = target_for(tiny, packed=packed), {5: [7, 8, 9], 6: [1], 7: list(range(20, 45))}
    layers = (AFTER_NORM, 0, 2, 1)
    target.tap(layers)
    for sequence in prompts:
        target.slots.open(sequence)
    before = target.num_passes
    wanted = HiddenStates(layers)
    target.forward([PassRow(sequence, prompts[sequence], 1) for sequence in (7, 5, 6)], wanted)
    assert target.num_passes == before + 1
    for sequence, prompt in prompts.items():
        got = wanted.of_sequence[sequence]
        tokens = torch.tensor([prompt])
        before_norm = hidden_states(tiny, tokens, layers[1:])[0]
        assert torch.allclose(got[:, 1:].flatten(1), before_norm, atol=1e-3, rtol=1e-4)
        assert torch.allclose(got[:, 0], tiny.model(tokens).last_hidden_state[0], atol=1e-4)
    with pytest.raises(UnsupportedModelError, match="layer 3 are wanted and .* has 2 layers"):
        target.tap([3])
