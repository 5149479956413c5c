"""From a target's folder and a text to a head that the engine loads, and going on with what was begun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from foredraft import LLM, SamplingParams
from foredraft.cli import app
from foredraft.errors import InvalidOptionError, UnsupportedModelError
from foredraft.train import run as training
from foredraft.train.dataset import TextStore
from foredraft.train.options import TrainOptions
from foredraft.train.plan import read_plan
from foredraft.train.run import TrainRun, train_head

TEXTS = [f"the quick brown fox number {i} jumps over {i % 7} lazy dogs, alpha beta {i} gamma" for i in range(40)]


def silent(label: str, share: float) -> None:
    pass


@pytest.fixture(scope="module")
def target(model: Any, chat_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    chat_tokenizer.save_pretrained(folder)
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return folder


@pytest.fixture(scope="module")
def first(target: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainRun:
    """A finished run that read a text, with a budget of seconds."""
    run = TrainRun(
        target=str(target),
        out=tmp_path_factory.mktemp("out"),
        options=TrainOptions(method="eagle3", num_rows=600, held_out=0.2, window=64),
        minutes=0.05,
        num_updates=6,
        data=(target / "texts.jsonl",),
        device="cpu",
    )
    assert train_head(run, silent) is not None
    return run


def test_the_engine_runs_the_head(first: TrainRun):
    prompts, params = [[5, 9, 11]], SamplingParams(temperature=0, max_tokens=12)
    plain = LLM(first.target, num_threads=1).generate(prompts, params)[0].outputs[0].token_ids
    options = {"method": "eagle3", "model": str(first.out)}
    output = LLM(first.target, speculative_config=options, num_threads=1).generate(prompts, params)[0]
    assert output.outputs[0].token_ids == plain
    assert output.metrics.num_drafts > 0


SLOW = pytest.mark.slow  # the principle is that of the first
OTHERS = ["mtp", pytest.param("eagle", marks=SLOW), pytest.param("mlp", marks=SLOW)]


@pytest.mark.parametrize("method", OTHERS)
def test_the_engine_runs_heads_of_other_methods(first: TrainRun, tmp_path: Path, method: str):
    """Trained on the same texts, loaded by their folder."""
    texts = first.folder / "texts"
    options = replace(first.options, method=method)
    assert train_head(replace(first, out=tmp_path, options=options, data=(texts,), num_updates=2), silent) is not None
    prompts, params = [[5, 9, 11]], SamplingParams(temperature=0, max_tokens=12)
    plain = LLM(first.target, num_threads=1).generate(prompts, params)[0].outputs[0].token_ids
    speculative = {"method": method, "model": str(tmp_path)}
    output = LLM(first.target, speculative_config=speculative, num_threads=1).generate(prompts, params)[0]
    assert output.outputs[0].token_ids == plain
    assert output.metrics.num_drafts > 0


def test_the_card_says_where_the_head_comes_from(first: TrainRun):
    card = (first.out / "README.md").read_text()
    plan = read_plan(first.folder)
    assert plan is not None
    assert (plan.num_updates, plan.dtype in ("float32", "bfloat16")) == (6, True)
    for words in (
        plan.fingerprint,
        "6 updates",
        "files ",
        "tokens a pass of the target",
        "| position | 1 | 2 | 3 | 4 |",
    ):
        assert words in card


def test_asked_again_it_goes_on_with_what_is_there(first: TrainRun, monkeypatch: pytest.MonkeyPatch):
    """Nothing is written or trained again, and the head is the same."""
    before = load_file(first.out / "model.safetensors")
    monkeypatch.setattr(training, "load_writer", None)
    monkeypatch.setattr(training.Trainer, "_update", None)
    train_head(first, silent)
    assert all(torch.equal(t, before[name]) for name, t in load_file(first.out / "model.safetensors").items())


def test_texts_and_weights_of_an_earlier_run(first: TrainRun, tmp_path: Path):
    """Through the command line: a second run begins where the first one ended, here with each text twice."""
    command = ["train", "eagle3", "--target", first.target, "--out", str(tmp_path), "--num-updates", "1"]
    command += ["--data", str(first.folder / "texts")] * 2 + ["--start-from", str(first.out), "--learning-rate", "0"]
    command += ["--head-learning-rate", "0", "--device", "cpu", "--held-out", "0.2", "--window", "64"]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, command)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["num_updates"] == 1
    plans = [read_plan(run.folder) for run in (first, replace(first, out=tmp_path))]
    assert [plan.num_texts for plan in plans if plan] == [
        len(store := TextStore(first.folder / "texts")),
        2 * len(store),
    ]
    assert len(document["acceptance_per_position"]) == 4
    assert "Held-out acceptance" in result.stdout
    one, other = (load_file(folder / "model.safetensors") for folder in (first.out, tmp_path))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())  # with learning rates of 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"options": TrainOptions(method="eagle3", seed=1)}, "holds a run with seed=0, and seed=1 is asked for"),
        ({"out": "new", "minutes": None, "num_updates": None}, "how long the run may take is not known"),
        ({"out": "new", "start_from": Path("/nowhere")}, "holds no training run to begin with"),
        ({"out": "new", "data": (Path("empty"),)}, "holds no texts to train on"),
        ({"out": "new", "data": (Path("empty"), Path("chats.jsonl"))}, "data has files beside the folder"),
    ],
)
def test_what_cannot_be_done(first: TrainRun, tmp_path: Path, changes: dict[str, Any], words: str):
    (tmp_path / "empty").mkdir()
    changes = dict(changes)
    if "out" in changes:
        changes["out"] = tmp_path / "new"
        changes["data"] = tuple(tmp_path / path for path in changes.get("data", (first.folder / "texts",)))
    if "options" in changes:
        changes["options"] = replace(first.options, seed=1)
    with pytest.raises(InvalidOptionError, match=words):
        train_head(replace(first, **changes), silent)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("mtp", "is of the kind 'gpt2'; known are"),
        ("draft", "GPT2LMHeadModel.* has no list of layers"),
        ("pard", "no list"),
    ],
)
def test_a_target_that_will_not_do_is_refused_before_it_writes(tmp_path: Path, method: str, words: str):
    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2)).save_pretrained(tmp_path / "target")
    run = TrainRun(
        target=str(tmp_path / "target"), out=tmp_path / "out", options=TrainOptions(method=method), minutes=1
    )
    with pytest.raises(UnsupportedModelError, match=words):
        train_head(run, silent)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "eagle4"}, "'eagle4' cannot be trained; one of eagle3, eagle, .*, pard, dflash can"),
        ({"method": "eagle3", "num_steps": 0}, "num_steps=0 is outside"),
        ({"method": "pard", "num_places": 0}, "num_places=0 is outside"),
        ({"method": "eagle3", "draft_vocab_size": 1}, "draft_vocab_size=1 is below 2"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str):
    with pytest.raises(InvalidOptionError, match=words):
        TrainOptions(**options)


@pytest.mark.slow  # three processes that import torch
def test_two_processes_of_accelerate_learn_as_one(first: TrainRun, tmp_path: Path):
    """Each reads half of the windows of an update; the gradient is that of all of them."""
    texts = first.folder / "texts"
    script = tmp_path / "script.py"
    script.write_text("from foredraft.cli import main\nmain()\n")
    heads = []
    for num_processes in (1, 2):
        out = tmp_path / str(num_processes)
        command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", str(num_processes)]
        command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", str(script)]
        command += ["train", "eagle3", "--target", first.target, "--out", str(out), "--num-updates", "4"]
        command += ["--data", str(texts), "--device", "cpu", "--held-out", "0.2", "--window", "64", "--noise", "0"]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count('"num_updates": 4') == 1  # one of them tells
        heads.append(load_file(out / "model.safetensors"))
    one, two = heads
    assert all(torch.allclose(tensor, two[name], rtol=1e-3, atol=1e-4) for name, tensor in one.items())
