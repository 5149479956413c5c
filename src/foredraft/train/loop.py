"""The training loop: the same for every method, and exact across a kill.

An update is a function of the weights, the seed and its number. So a run that is killed and started again goes on from
its last checkpoint and ends with the very weights of one that was not; on the CPU that holds for one number of threads.
"""

from __future__ import annotations

import copy
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from foredraft.train.acceptance import Acceptance, held_out_acceptance
from foredraft.train.batches import Batch, BatchOrder, Window, collate, windows_of
from foredraft.train.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from foredraft.train.options import TrainOptions
from foredraft.train.schedule import learning_rate_factor, num_steps_at, updates_within
from foredraft.train.trainee import Trainee, TrainTexts

CLIP = 0.5
BETAS = (0.9, 0.95)
NUM_DRAFT_TOKENS = 4
"""Of the rounds in which acceptance is measured."""
DTYPES = ("bfloat16", "float32")
NUM_LOOKS = 10
"""How often it is measured during a run, on :data:`FEW_TEXTS` texts or fewer."""
FEW_TEXTS = 16
LOOK_SHARE = 0.2
"""Of a run's time, which these looks may take."""
CHECKPOINT_S = 60.0
TELL_S = 5.0
PACE_UPDATES = 30
"""The time left is reckoned by so many; later updates take longer than early ones."""
TIMED_UPDATES = 3

Tell = Callable[[str, float], None]


class Trainer:
    """One run over fixed texts.

    Args:
        folder: of the checkpoint.
        tell: gets a label and the share of the run that is done.
        dtype: of the products, bfloat16 or float32; weights are float32.
        num_looked: texts that acceptance is measured on during the run.
        is_trained: the weights come from an earlier run.

    Attributes:
        history: loss and held-out acceptance, measured at the same updates in every run of the same length.
    """

    def __init__(
        self,
        trainee: Trainee,
        texts: TrainTexts,
        options: TrainOptions,
        folder: Path,
        accelerator: Accelerator,
        tell: Tell = lambda label, share: None,
        dtype: str = "float32",
        num_looked: int = FEW_TEXTS,
        is_trained: bool = False,
    ):
        self.trainee, self.texts, self.options, self.tell = trainee.to(accelerator.device), texts, options, tell
        self.folder, self._is_trained = folder, is_trained
        self._dtype: torch.dtype = getattr(torch, dtype)
        self.history: list[dict[str, Any]] = []
        self._accelerator = accelerator
        self._order = BatchOrder(training_windows(texts, options.window), options.num_rows, options.seed)
        self._few = random.Random(0).sample(texts.held, min(num_looked, len(texts.held)))
        self._model = accelerator.prepare(trainee)
        self._optimizer = new_optimizer(trainee, options)
        self._num_done = 0
        self._recent: list[float] = []

    def seconds_of_update(self, num_steps: int) -> float:
        """What one takes that unrolls so far; measured on copies, so that the run does not depend on it."""
        trainee = copy.deepcopy(self.trainee)
        optimizer = new_optimizer(trainee, self.options)
        seconds = []
        for update in range(TIMED_UPDATES):
            started = time.perf_counter()
            windows = self._order(update)
            self._backward(trainee, windows, windows, num_steps, update, lambda loss: loss.backward())
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - started)
        return sorted(seconds)[len(seconds) // 2]

    def seconds_of_look(self) -> float:
        """What one look at the held-out texts takes."""
        started = time.perf_counter()
        self._acceptance(self._few)
        return time.perf_counter() - started

    @property
    def num_looked(self) -> int:
        return len(self._few)

    def updates_within(self, seconds: float) -> int:
        """How many updates fit into a time, looks at held-out texts included, at fewer if they would take long."""
        looks_s = (NUM_LOOKS + 1) * self.seconds_of_look()
        share = min(1.0, LOOK_SHARE * seconds / looks_s)
        self._few = self._few[: max(1, int(share * len(self._few)))]
        left = seconds - share * looks_s
        return updates_within(left, self.seconds_of_update, self.options.num_steps, self._is_trained)

    def resume(self) -> None:
        """Go on from the folder's checkpoint, if there is one."""
        checkpoint = read_checkpoint(self.folder)
        if checkpoint is not None:
            self.trainee.load_state_dict(checkpoint.module)
            self._optimizer.load_state_dict(checkpoint.optimizer)
            self._num_done, self.history = checkpoint.num_done, list(checkpoint.history)
            self._recent = list(checkpoint.losses)

    def train(self, num_updates: int) -> Acceptance:
        """Do what is left of the updates; returns the acceptance on all held-out texts."""
        looks = {round(num_updates * (i + 1) / NUM_LOOKS) for i in range(NUM_LOOKS)}
        ended = deque([time.perf_counter()], maxlen=PACE_UPDATES)
        last_saved, last_told = ended[0], 0.0
        while self._num_done < num_updates:
            self._recent.append(self._update(self._num_done, num_updates))
            self._num_done += 1
            ended.append(now := time.perf_counter())
            if self._num_done in looks:
                self._look()
            if now - last_told >= TELL_S or self._num_done == num_updates:
                left = (now - ended[0]) / (len(ended) - 1) * (num_updates - self._num_done)
                self.tell(self._label(left), self._num_done / num_updates)
                last_told = now
            if now - last_saved >= CHECKPOINT_S or self._num_done == num_updates:
                self._save()
                last_saved = now
        return self._acceptance(self.texts.held)

    def _update(self, update: int, num_updates: int) -> float:
        """One step of the optimizer; returns the loss of a label."""
        options = self.options
        factor = learning_rate_factor(update, num_updates, options.warm_up)
        for group in self._optimizer.param_groups:
            group["lr"] = factor * group["initial_lr"]
        everyones = self._order(update)
        mine = everyones[self._accelerator.process_index :: self._accelerator.num_processes]
        steps = num_steps_at(update, num_updates, options.num_steps, self._is_trained)
        loss = self._backward(self._model, mine, everyones, steps, update, self._accelerator.backward)
        torch.nn.utils.clip_grad_norm_(self.trainee.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def _backward(
        self,
        model: torch.nn.Module,
        mine: Sequence[Window],
        everyones: Sequence[Window],
        num_steps: int,
        update: int,
        backward: Callable[[Tensor], Any],
    ) -> float:
        """Gradients of the loss of a label, over the windows of all processes, of which this one reads some.

        Gradients of processes are averaged, so each counts its part as many times as there are processes. One that has
        no window reads the first one, which counts nothing.
        """
        num_labels = max(1, sum(window.num_labels for window in everyones))
        share = self._accelerator.num_processes / num_labels if mine else 0.0
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + update)
        batch = self._batch(mine or everyones[:1])
        with self._autocast():
            loss = share * model(batch, num_steps, generator)
        backward(loss)
        return float(loss.detach())

    def _batch(self, windows: Sequence[Window]) -> Batch:
        return collate(self.texts.store, windows).to(self._accelerator.device)

    def _autocast(self) -> Any:
        bfloat16 = torch.bfloat16
        return torch.autocast(self._accelerator.device.type, bfloat16, enabled=self._dtype == bfloat16)

    def _acceptance(self, indices: Sequence[int]) -> Acceptance:
        self.trainee.eval()
        with self._autocast():
            found = held_out_acceptance(self.trainee, self.texts, indices, NUM_DRAFT_TOKENS, self.options.window)
        self.trainee.train()
        return found

    def _look(self) -> None:
        found = self._acceptance(self._few)
        loss = sum(self._recent) / len(self._recent)
        self._recent.clear()
        self.history.append({"update": self._num_done, "loss": loss, **asdict(found)})

    def _label(self, left_s: float) -> str:
        label = f"training, {left_s / 60:.1f} min left"
        if self.history:
            last = self.history[-1]
            label += f", loss {last['loss']:.2f}, {last['num_tokens'] / max(1, last['num_rounds']):.2f} tokens a pass"
        return label

    def _save(self) -> None:
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            state = self.trainee.state_dict(), self._optimizer.state_dict()
            write_checkpoint(self.folder, Checkpoint(self._num_done, *state, self._recent, self.history))


def new_optimizer(trainee: Trainee, options: TrainOptions) -> torch.optim.AdamW:
    groups = trainee.parameter_groups(options)
    return torch.optim.AdamW([{**group, "initial_lr": group["lr"]} for group in groups], betas=BETAS, fused=True)


def training_windows(texts: TrainTexts, size: int) -> list[Window]:
    store = texts.store
    return [
        window
        for i in texts.kept
        for window in windows_of(i, store.num_prompt_tokens(i), len(store.token_ids(i)), size)
    ]


def fastest_dtype(device: torch.device, size: int = 512) -> str:
    """bfloat16 where its products are faster than float32's, which takes a moment to measure."""
    seconds: dict[str, float] = {}
    for name in DTYPES:
        left = torch.ones(size, size, dtype=getattr(torch, name), device=device)
        for _ in range(5):
            started = time.perf_counter()
            float((left @ left)[0, 0])
            seconds[name] = min(seconds.get(name, 1.0), time.perf_counter() - started)
    return min(seconds, key=seconds.__getitem__)
