"""TRN: labels, their mask and what guesses them are shifted together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.target.features import AFTER_NORM
from foredraft.testing import tiny_texts
from foredraft.train import eagle, eagle3, medusa, mlp, mtp
from foredraft.train.batches import Batch
from foredraft.train.options import TrainOptions
from foredraft.train.trainee import TrainTarget, TrainTexts

LAYERS = (0, 1, 2, AFTER_NORM)
NUM_STEPS = 3
SPANS = [((4, 6),), ((0, 2),), ((3, 3),), ((5, 7),), ((4, 6), (2, 3)), ((1, 7), (6, 6))]


@pytest.fixture(scope="module")
def made(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    texts = TrainTexts(tiny_texts(tiny, tmp_path_factory.mktemp("texts"), LAYERS, num_texts=8), [0, 1, 2, 3], [4])
    target = TrainTarget(tiny, "tiny", ())
    return {
        "eagle3": eagle3.make(target, texts, TrainOptions(method="eagle3", noise=0.0)),
        "eagle": eagle.make(target, texts, TrainOptions(method="eagle", noise=0.0)),
        "mtp": mtp.make(target, texts, TrainOptions(method="mtp", noise=0.0)),
        "mlp": mlp.make(target, texts, TrainOptions(method="mlp", noise=0.0, num_heads=NUM_STEPS)),
        "medusa": medusa.make(target, texts, TrainOptions(method="medusa", num_heads=NUM_STEPS)),
    }


def batch_of(spans: tuple[tuple[int, int], ...]) -> Batch:
    """Eight tokens a row; the labels are those of the span."""
    generator = torch.Generator().manual_seed(1)
    places = torch.arange(8)
    return Batch(
        torch.randint(0, 64, (len(spans), 8), generator=generator),
        torch.stack([(places >= first) & (places <= last) for first, last in spans]),
        torch.randn(len(spans), 8, len(LAYERS), 64, generator=generator),
        LAYERS,
    )


def guessing(spans: tuple[tuple[int, int], ...], step: int) -> set[tuple[int, int]]:
    """The states from which a step guesses the labels: 2 + step places before each, where there is one."""
    places = ((row, t - 2 - step) for row, (first, last) in enumerate(spans) for t in range(first, last + 1))
    return {(row, place) for row, place in places if place >= 0}


def rows_with_gradient(gradient: Tensor) -> set[tuple[int, int]]:
    return {(row, place) for row, place in gradient.abs().amax(-1).nonzero().tolist()}


@pytest.mark.parametrize("method", ["eagle3", "eagle", "mtp", "mlp"])
@pytest.mark.parametrize("spans", SPANS)
def test_o37_unrolled_heads_learn_the_answers_tokens_and_no_others(
    made: dict[str, Any], spans: tuple[tuple[int, int], ...], method: str, monkeypatch: pytest.MonkeyPatch
):
    """Of each step exactly the rows that guess labels have a gradient; per step the window moves by one.

    What EAGLE-3 says is not what it feeds back; in others a row learns from the later steps that read it, too.
    """
    trainee = made[method]
    seen: list[Tensor] = []
    unroll = trainee.head.unroll_states

    def noted(*args: Any) -> Iterator[Tensor]:
        for normed in unroll(*args):
            normed.retain_grad()
            seen.append(normed)
            yield normed

    monkeypatch.setattr(trainee.head, "unroll_states", noted)
    trainee(batch_of(spans), NUM_STEPS, None).backward()
    assert len(seen) == NUM_STEPS
    found = [rows_with_gradient(normed.grad) for normed in seen]
    expected = [guessing(spans, step) for step in range(NUM_STEPS)]
    assert found == (expected if method == "eagle3" else [set().union(*expected[step:]) for step in range(NUM_STEPS)])
    if spans == ((4, 6),):
        assert found[0] - found[1] == {(0, 4)}


@pytest.mark.parametrize("spans", SPANS)
def test_o37_medusa_learns_the_answers_tokens_and_no_others(made: dict[str, Any], spans: tuple[tuple[int, int], ...]):
    batch = batch_of(spans)
    batch.features.requires_grad_(True)
    made["medusa"](batch, 1, None).backward()
    expected = set().union(*(guessing(spans, head) for head in range(NUM_STEPS)))
    assert rows_with_gradient(batch.features.grad[:, :, LAYERS.index(AFTER_NORM)]) == expected
    assert not batch.features.grad[:, :, :-1].any()


def test_o37_a_label_that_cannot_be_drafted_teaches_nothing(tiny: Any, tmp_path: Path):
    texts = TrainTexts(tiny_texts(tiny, tmp_path, LAYERS, num_texts=8), [0, 1, 2, 3], [4])
    options = TrainOptions(method="medusa", num_heads=1, draft_vocab_size=30)
    trainee = medusa.make(TrainTarget(tiny, "tiny", ()), texts, options)
    batch = batch_of(((2, 7),))
    can_draft = (trainee.draft_ids[batch.token_ids[0]] >= 0).nonzero().flatten().tolist()
    batch.features.requires_grad_(True)
    trainee(batch, 1, None).backward()
    expected = {(0, t - 2) for t in can_draft if t >= 2}
    assert 0 < len(expected) < 6
    assert rows_with_gradient(batch.features.grad[:, :, -1]) == expected
