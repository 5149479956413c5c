"""Exact resume: a run that is stopped, or killed, ends with the weights of one that was not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from foredraft.errors import InvalidOptionError
from foredraft.target.features import AFTER_NORM
from foredraft.testing import tiny_model, tiny_texts
from foredraft.train import eagle3
from foredraft.train.checkpoint import FILE, Checkpoint, read_checkpoint, write_checkpoint
from foredraft.train.dataset import TextStore
from foredraft.train.loop import Trainer
from foredraft.train.options import TrainOptions
from foredraft.train.trainee import TrainTarget, TrainTexts

NUM_UPDATES = 20
OPTIONS = TrainOptions(method="eagle3", num_rows=120, learning_rate=3e-3, dropout=0.1)


class Stopped(Exception):
    pass


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TextStore:
    return tiny_texts(
        tiny_model(0, context=0.01), tmp_path_factory.mktemp("texts"), (0, 1, 2, AFTER_NORM), num_texts=28
    )


def trainer_for(store: TextStore, folder: Path, **options: Any) -> Trainer:
    texts = TrainTexts(store, list(range(24)), list(range(24, 28)))
    trainee = eagle3.make(TrainTarget(tiny_model(0, context=0.01), "tiny", ()), texts, OPTIONS)
    return Trainer(trainee, texts, OPTIONS, folder, Accelerator(cpu=True), **options)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.trainee.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_stopped_and_resumed_it_ends_with_the_same_weights(
    store: TextStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Stopped behind an update that has no checkpoint any more, between two looks, in the part with more steps."""
    monkeypatch.setattr("foredraft.train.loop.CHECKPOINT_S", 0.0)
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole = trainer_for(store, tmp_path / "whole")
    first = weights(whole)
    acceptance = whole.train(NUM_UPDATES)
    assert not torch.equal(first["head.fc.weight"], weights(whole)["head.fc.weight"])
    losses = [look["loss"] for look in whole.history]
    assert losses[2] < losses[0]  # while one step is counted

    cut = trainer_for(store, tmp_path / "cut")
    update = cut._update

    def stop(number: int, num_updates: int) -> float:
        if number == 11:
            raise Stopped
        return update(number, num_updates)

    monkeypatch.setattr(cut, "_update", stop)
    with pytest.raises(Stopped):
        cut.train(NUM_UPDATES)
    torch.manual_seed(99)  # nothing may come from the global generator
    again = trainer_for(store, tmp_path / "cut")
    again.resume()
    assert again.train(NUM_UPDATES) == acceptance
    assert_same(weights(again), weights(whole))
    assert again.history == whole.history


def test_measuring_the_speed_changes_nothing(store: TextStore, tmp_path: Path):
    trainer = trainer_for(store, tmp_path)
    before = weights(trainer)
    assert trainer.updates_within(5.0) > 10
    assert_same(weights(trainer), before)
    assert not trainer._optimizer.state


def test_a_short_run_looks_at_fewer_texts(store: TextStore, tmp_path: Path):
    """Measuring acceptance takes a share of the time, and not all of it."""
    trainer = trainer_for(store, tmp_path)
    usual = trainer.num_looked
    trainer.updates_within(60.0)
    assert trainer.num_looked == usual > 1
    assert trainer.updates_within(1e-3) == 1
    assert trainer.num_looked == 1


def test_a_checkpoint_is_whole_or_not_there(tmp_path: Path):
    assert read_checkpoint(tmp_path) is None
    write_checkpoint(tmp_path, Checkpoint(3, {"a": torch.ones(2)}, {}, [0.5], [{"drafted": (1, 2)}]))
    (tmp_path / (FILE + ".part")).write_bytes(b"cut off")
    found = read_checkpoint(tmp_path)
    assert found is not None
    assert (found.num_done, found.history) == (3, [{"drafted": (1, 2)}])
    (tmp_path / FILE).write_bytes(b"cut off")
    with pytest.raises(InvalidOptionError, match="no checkpoint of a training run"):
        read_checkpoint(tmp_path)


PROGRAM = """
import sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, {tests!r})
import foredraft.train.loop as loop
from test_loop import trainer_for, NUM_UPDATES
from foredraft.train.dataset import TextStore
loop.CHECKPOINT_S = 0.0
trainer = trainer_for(TextStore(Path(sys.argv[1])), Path(sys.argv[2]))
trainer.resume()
print("resumed at", trainer._num_done, flush=True)
update = trainer._update
def slow(*args):
    time.sleep(float(sys.argv[3]))
    return update(*args)
trainer._update = slow
trainer.train(NUM_UPDATES)
"""


@pytest.mark.slow  # two more processes that import torch
def test_killed_and_resumed_it_ends_with_the_same_weights(store: TextStore, tmp_path: Path):
    """A real kill in the middle, which no handler sees."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole = trainer_for(store, tmp_path / "whole")
    whole.train(NUM_UPDATES)
    call = [sys.executable, "-c", PROGRAM.format(tests=str(Path(__file__).parent)), str(store.directory)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*call, str(tmp_path / "killed"), "0.1"], env=environment, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while (read_checkpoint(tmp_path / "killed") or Checkpoint(0, {}, {})).num_done < 8:
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    done = read_checkpoint(tmp_path / "killed")
    assert done is not None
    assert 8 <= done.num_done < NUM_UPDATES
    again = subprocess.run([*call, str(tmp_path / "killed"), "0"], env=environment, capture_output=True, text=True)
    assert again.stdout == f"resumed at {done.num_done}\n", again.stderr
    ended = read_checkpoint(tmp_path / "killed")
    assert ended is not None
    assert_same(ended.module, weights(whole))
    assert ended.history == whole.history
