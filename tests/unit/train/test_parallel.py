"""Drafters that fill in masks, from texts to the engine: what training measures is what the engine drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from foredraft import LLM, SamplingParams
from foredraft.target.features import AFTER_NORM
from foredraft.testing import RecordingDrafter, tiny_model, tiny_texts
from foredraft.train import dflash, pard
from foredraft.train.batches import Batch, collate, windows_of
from foredraft.train.loop import Trainer
from foredraft.train.options import TrainOptions
from foredraft.train.trainee import Trainee, TrainTarget, TrainTexts
from foredraft.train.vocabulary import mask_token

K = 4
LENGTH = 16
METHODS = {"pard": pard, "dflash": dflash}
OPTIONS: dict[str, dict[str, Any]] = {
    "pard": {"learning_rate": 2e-3},
    "dflash": {"learning_rate": 1e-2, "draft_vocab_size": 30},
}
NUM_UPDATES = 60


@pytest.fixture(scope="module")
def model() -> Any:
    """It is sure of what it says, so that little is learnt from its other tokens."""
    model = tiny_model(0, context=0.01, vocab_size=32)
    with torch.no_grad():
        model.lm_head.weight.mul_(4.0)
    return model


@pytest.fixture(scope="module")
def texts(model: Any, tmp_path_factory: pytest.TempPathFactory) -> TrainTexts:
    store = tiny_texts(model, tmp_path_factory.mktemp("texts"), (0, 1, 2, AFTER_NORM), num_texts=84, length=LENGTH)
    return TrainTexts(store, list(range(60)), list(range(60, 84)))


def options_of(method: str, **changes: Any) -> TrainOptions:
    options = {
        "num_rows": 300,
        "head_learning_rate": 5e-3,
        "num_layers": 1,
        "num_places": K,
        **OPTIONS[method],
        **changes,
    }
    return TrainOptions(method=method, **options)


def new_trainee(method: str, model: Any, texts: TrainTexts) -> Trainee:
    trainee: Trainee = METHODS[method].make(TrainTarget(model, "tiny", (1,)), texts, options_of(method))
    return trainee


def batch_of(texts: TrainTexts, indices: list[int]) -> Batch:
    store = texts.store
    return collate(store, [windows_of(i, store.num_prompt_tokens(i), len(store.token_ids(i)), 512)[0] for i in indices])


@pytest.mark.parametrize("method", METHODS)
def test_the_engine_drafts_what_training_says(method: str, model: Any, texts: TrainTexts, tmp_path: Path):
    """States are kept in bfloat16, so a near-tie may go the other way; the issue's limit is 5 %."""
    trainee, options, store = new_trainee(method, model, texts), options_of(method), texts.store
    trainer = Trainer(trainee, texts, options, tmp_path, Accelerator(cpu=True))
    expected = trainer.train(NUM_UPDATES)
    assert trainer.history[-1]["loss"] < 0.7 * trainer.history[0]["loss"]
    assert 0.2 < expected.rates[0] < 0.95
    assert expected.accepted[2] > 5
    model.save_pretrained(tmp_path / "target")
    trainee.save(tmp_path / "head")

    speculative = {"method": method, "model": str(tmp_path / "head"), "num_speculative_tokens": K, "policy": "fixed"}
    llm = LLM(str(tmp_path / "target"), speculative_config=speculative, num_threads=1)
    recorder = RecordingDrafter(llm.engine.drafter)
    llm.engine = llm.new_engine(llm.speculative_config, recorder)
    prompts = [store.token_ids(i)[: store.num_prompt_tokens(i)].tolist() for i in texts.held]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True))
    answers = [prompt + list(output.outputs[0].token_ids) for prompt, output in zip(prompts, outputs, strict=True)]
    assert answers == [store.token_ids(i).tolist() for i in texts.held]

    trainee.eval()
    with torch.no_grad():
        guesses = trainee.guesses(batch_of(texts, texts.held), K).tolist()
    same = []
    for begun, draft in zip(recorder.texts, recorder.drafts, strict=True):
        for text, tokens, count in zip(begun, draft.token_ids.tolist(), draft.num_draft_tokens, strict=True):
            row = next(row for row, answer in enumerate(answers) if answer[: len(text)] == text)
            for at, said in enumerate(tokens[:count]):
                same.append(guesses[row][len(text)][at] == said)
                if said != answers[row][len(text) + at]:
                    break
    assert sum(same) > 0.98 * len(same)
    assert len(same) > 100

    metrics = [output.metrics for output in outputs]
    drafted = sum(m.drafted_per_position[0] for m in metrics)
    accepted = sum(m.accepted_per_position[0] for m in metrics)
    assert accepted / drafted == pytest.approx(expected.rates[0], rel=0.05)
    others = 0 if method == "pard" else len(outputs)  # passes of prompts; a draft model drafts beside them already
    passes = sum(m.num_target_passes for m in metrics) - others
    assert (LENGTH * len(outputs) - others) / passes == pytest.approx(expected.tokens_per_pass, rel=0.05)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_drawn_follows_from_the_generator(method: str, model: Any, texts: TrainTexts):
    """So an update is a function of weights, seed and number; a measurement is one of the weights alone."""
    trainee, batch = new_trainee(method, model, texts), batch_of(texts, texts.kept[:6])

    def loss(seed: int | None) -> float:
        torch.rand(())  # nothing may come from the global generator
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return float(trainee(batch, 1, generator).detach())

    assert loss(1) == loss(1) != loss(2)
    assert loss(None) == loss(None)


@pytest.mark.parametrize("method", METHODS)
def test_stopped_and_resumed_it_ends_with_the_same_weights(method: str, model: Any, texts: TrainTexts, tmp_path: Path):
    """Stopped behind the second of four updates; the rest is done by another trainer."""

    def trainer(folder: str) -> Trainer:
        (tmp_path / folder).mkdir(exist_ok=True)
        trainee = new_trainee(method, model, texts)
        return Trainer(trainee, texts, options_of(method), tmp_path / folder, Accelerator(cpu=True))

    whole = trainer("whole")
    begun = {name: tensor.clone() for name, tensor in whole.trainee.state_dict().items()}
    whole.train(4)
    cut = trainer("cut")
    for update in range(2):
        cut._update(update, 4)
        cut._num_done += 1
    cut._save()
    again = trainer("cut")
    again.resume()
    again.train(4)
    ended = whole.trainee.state_dict()
    assert any(not torch.equal(tensor, begun[name]) for name, tensor in ended.items())
    assert all(torch.equal(tensor, ended[name]) for name, tensor in again.trainee.state_dict().items())


@pytest.mark.parametrize("method", METHODS)
def test_a_guess_sees_no_later_token(method: str, model: Any, texts: TrainTexts):
    """All that is guessed of a round that begins at n follows from tokens before n and states before n - 1."""
    trainee, batch = new_trainee(method, model, texts).eval(), batch_of(texts, [3])
    place = 12
    with torch.no_grad():
        for parameter in trainee.parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                parameter *= 4.0  # so that one token more or less shows in what is guessed
        said = trainee.guesses(batch, 1)[0, place]
        batch.token_ids[0, place] = said  # right, so that more is guessed
        before = trainee.guesses(batch, 2)[0, place]
        assert (before >= 0).all()
        batch.features[:, place - 1 :] = torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16()
        batch.token_ids[:, place + 1 :] = 5
        assert torch.equal(trainee.guesses(batch, 2)[0, place], before)
        firsts = set()
        for token in range(32):
            batch.token_ids[:, place - 1] = token
            firsts.add(int(trainee.guesses(batch, 1)[0, place, 0]))
        assert len(firsts) > 1  # the last token that it may see, it sees


def test_layers_of_dflash():
    assert dflash.feature_layers(30) == (2, 15, 28, AFTER_NORM)
    assert dflash.feature_layers(6) == (2, 3, 4, AFTER_NORM)
    assert dflash.feature_layers(2) == (0, 1, 2, AFTER_NORM)
    assert dflash.feature_layers(1) == (0, 1, AFTER_NORM)


def test_the_mask_is_a_token_that_is_not_missed():
    embeddings = torch.ones(6, 2)
    embeddings[5] = 0.0
    assert mask_token(torch.tensor([3, 0, 0, 0, 2, 0]), embeddings, never=(3,)) == 2
    assert mask_token(torch.tensor([3, 4, 5, 0, 2, 0]), embeddings, never=(3,)) == 4
