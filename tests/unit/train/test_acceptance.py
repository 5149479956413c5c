"""Rounds by hand, and against the engine: the acceptance that training reports is the one that the engine has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoConfig

from foredraft import EngineConfig, SamplingParams, SpeculativeConfig
from foredraft.drafters import make_drafter
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.medusa import MedusaDrafter, MedusaTreeDrafter
from foredraft.drafters.recurrent_head import make_head_drafter
from foredraft.engine.sequence import Sequence
from foredraft.heads.checkpoint import read_head
from foredraft.heads.eagle3_format import read_eagle3
from foredraft.heads.medusa import read_medusa
from foredraft.heads.runner import HeadRunner
from foredraft.target.features import AFTER_NORM
from foredraft.target.loader import load_model
from foredraft.testing import engine_for, run, target_for, tiny_model, tiny_texts
from foredraft.train import draft, eagle, eagle3, medusa, mlp, mtp
from foredraft.train.acceptance import Acceptance, held_out_acceptance, walk_rounds
from foredraft.train.batches import collate, windows_of
from foredraft.train.loop import Trainer
from foredraft.train.options import TrainOptions
from foredraft.train.trainee import TrainTarget, TrainTexts

LAYERS = (0, 1, 2, AFTER_NORM)
K = 4


def test_rounds_by_hand():
    """Text 5 6 7 8 9 1 2, three tokens committed: a draft half right, one wrong, and none at the last place."""
    text = [5, 6, 7, 8, 9, 1, 2]
    guesses = [[-1, -1]] * 3 + [[8, 0], [-1, -1], [0, 2], [2, 2]]
    assert list(walk_rounds(guesses, text, 3)) == [(2, 1), (1, 0), (0, 0)]


def test_rates():
    both = Acceptance(6, 3, (3, 2), (2, 1)) + Acceptance(2, 2, (1, 0), (0, 0))
    assert both == Acceptance(8, 5, (4, 2), (2, 1))
    assert both.rates == [0.5, 0.5]
    assert both.tokens_per_pass == 1.6


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(0, context=0.01)


@pytest.fixture(scope="module")
def texts(model: Any, tmp_path_factory: pytest.TempPathFactory) -> TrainTexts:
    store = tiny_texts(model, tmp_path_factory.mktemp("texts"), LAYERS, num_texts=112)
    return TrainTexts(store, list(range(100)), list(range(100, 112)))


def trained(
    model: Any, texts: TrainTexts, folder: Path, method: Any, num_updates: int = 60, **options: Any
) -> tuple[Any, TrainOptions]:
    chosen = TrainOptions(
        method=method.__name__.rpartition(".")[2], num_rows=300, learning_rate=5e-3, head_learning_rate=5e-3, **options
    )
    trainee = method.make(TrainTarget(model, "tiny", (1,)), texts, chosen)
    trainer = Trainer(trainee, texts, chosen, folder, Accelerator(cpu=True))
    trainer.train(num_updates)
    assert trainer.history[2]["loss"] < trainer.history[0]["loss"]  # while one step is counted
    trainee.eval()
    return trainee, chosen


def engine_counts(model: Any, drafter: Any, target: Any, texts: TrainTexts) -> list[Sequence]:
    """The engine's own sequences for the held-out prompts."""
    store = texts.store
    prompts = [store.token_ids(i)[: store.num_prompt_tokens(i)].tolist() for i in texts.held]
    sequences = run(
        engine_for(target, drafter, num_speculative_tokens=K), prompts, SamplingParams(temperature=0, max_tokens=24)
    )
    assert [s.token_ids for s in sequences] == [store.token_ids(i).tolist() for i in texts.held]
    return sequences


def total(counts: list[list[int]]) -> list[int]:
    return [sum(row[i] for row in counts if len(row) > i) for i in range(K)]


def check_same(expected: Acceptance, sequences: list[Sequence]) -> None:
    """States are kept in bfloat16, so a near-tie may go the other way; the issue's limit is 5 %."""
    metrics = [sequence.metrics for sequence in sequences]
    accepted = total([m.accepted_per_position for m in metrics])
    assert sum(accepted) == pytest.approx(sum(expected.accepted), rel=0.05)
    assert accepted[0] == pytest.approx(expected.accepted[0], rel=0.05)
    rounds = sum(m.num_target_passes - 1 for m in metrics)  # the first pass is that of the prompt
    assert rounds == pytest.approx(expected.num_rounds, rel=0.05)
    assert 0.2 < expected.rates[0] < 0.98  # or else nothing is compared
    assert expected.accepted[1] > 5


def test_eagle3_accepts_in_the_engine_what_training_says(model: Any, texts: TrainTexts, tmp_path: Path):
    trainee, options = trained(model, texts, tmp_path, eagle3, num_updates=36, num_steps=2, draft_vocab_size=60)
    expected = held_out_acceptance(trainee, texts, texts.held, K, options.window)
    trainee.save(tmp_path / "head")
    target = target_for(model)
    head = read_eagle3(read_head(str(tmp_path / "head")), target.hidden_size, target.vocab_size, 2)
    assert len(head.token_ids) == 60
    runner = HeadRunner(head, head.config.layer, target)
    drafter = make_head_drafter(runner, head.config.feature_layers, target.vocab_size, head.token_ids, 1, K)
    check_same(expected, engine_counts(model, drafter, target, texts))


@pytest.mark.parametrize("method", [eagle, mtp, mlp])
def test_heads_of_the_last_state_accept_in_the_engine_what_training_says(
    model: Any, texts: TrainTexts, tmp_path: Path, method: Any
):
    trainee, options = trained(model, texts, tmp_path, method, num_updates=30, num_steps=2)
    expected = held_out_acceptance(trainee, texts, texts.held, K, options.window)
    trainee.save(tmp_path / "head")
    target = target_for(model)
    speculative = SpeculativeConfig(method=options.method, model=str(tmp_path / "head"), num_speculative_tokens=K)
    drafter = make_drafter(speculative, EngineConfig(model="tiny", dtype="float32"), target, None)
    check_same(expected, engine_counts(model, drafter, target, texts))


@pytest.mark.slow  # the principle is that of the test above
def test_medusa_accepts_in_the_engine_what_training_says(model: Any, texts: TrainTexts, tmp_path: Path):
    """Chains as counted, and the measured tree, which is at least as good with the same prompts."""
    trainee, options = trained(model, texts, tmp_path, medusa)
    expected = held_out_acceptance(trainee, texts, texts.held, K, options.window)
    store = texts.store
    windows = [windows_of(i, store.num_prompt_tokens(i), len(store.token_ids(i)), 512)[0] for i in texts.held]
    trainee.measure([collate(store, windows)])
    trainee.save(tmp_path / "head")
    target = target_for(model)
    heads = read_medusa(read_head(str(tmp_path / "head")), target.hidden_size, target.vocab_size)
    assert heads.config.choices == trainee.heads.config.choices
    assert heads.config.choices[0] == (0,)
    chains = engine_counts(model, MedusaDrafter(heads, target), target, texts)
    check_same(expected, chains)
    trees = engine_counts(model, MedusaTreeDrafter(heads, target, 4, 4), target, texts)
    assert sum(s.metrics.num_target_passes for s in trees) < 1.05 * sum(s.metrics.num_target_passes for s in chains)
    assert max(max(s.metrics.drafted_per_position) for s in trees) > 0


@pytest.mark.slow  # the principle is that of the test above
def test_a_draft_model_accepts_in_the_engine_what_training_says(model: Any, texts: TrainTexts, tmp_path: Path):
    """It drafts beside the prompt already, so that rounds begin a token earlier; the rates are near all the same."""
    trainee, options = trained(model, texts, tmp_path, draft, num_layers=1)
    expected = held_out_acceptance(trainee, texts, texts.held, K, options.window)
    trainee.save(tmp_path / "model")
    assert AutoConfig.from_pretrained(tmp_path / "model").num_hidden_layers == 1
    small = load_model(tmp_path / "model", device="cpu").model
    assert torch.equal(small.lm_head.weight, model.lm_head.weight)
    target = target_for(model)
    sequences = engine_counts(model, DraftModelDrafter(target_for(small), target.vocab_size), target, texts)
    accepted = total([s.metrics.accepted_per_position for s in sequences])
    drafted = total([s.metrics.drafted_per_position for s in sequences])
    assert accepted[0] / drafted[0] == pytest.approx(expected.rates[0], rel=0.1)
    assert 0.3 < expected.rates[0] < 0.99


def test_the_layers_of_a_draft_model_are_spread_over_the_target():
    assert [draft.spread(30, n) for n in (1, 2, 3, 4)] == [[0], [0, 29], [0, 14, 29], [0, 10, 19, 29]]
    assert draft.spread(2, 5) == [0, 1]


def test_the_tree_has_the_paths_that_are_most_often_right():
    assert medusa.choose_tree([[0.6, 0.3], [0.5, 0.1]], 5) == [(0,), (1,), (0, 0), (1, 0), (0, 1)]


def test_a_guess_sees_no_later_token(model: Any, texts: TrainTexts):
    """Guess at place n + j: nothing of the text from n + j on may matter, nor any state from n - 1 on."""
    options = TrainOptions(method="eagle3")
    trainee = eagle3.make(TrainTarget(model, "tiny", (1,)), texts, options).eval()
    store = texts.store
    batch = collate(store, windows_of(3, store.num_prompt_tokens(3), len(store.token_ids(3)), 512))
    place = 12
    with torch.no_grad():
        before = trainee.guesses(batch, K)[0, place]
        batch.features[:, place - 1 :] = 7.0
        batch.token_ids[:, place + K - 1 :] = 5
        assert torch.equal(trainee.guesses(batch, K)[0, place], before)
        batch.token_ids[:, place:] = 5
        assert trainee.guesses(batch, K)[0, place, 0] == before[0]
