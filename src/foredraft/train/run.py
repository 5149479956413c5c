"""A training run from the name of a target to the folder of a head.

    OUT/config.json, model.safetensors, README.md    the head, for the engine and others; its model card
    OUT/run/plan.json                                what was fixed on the way: texts, updates, options
    OUT/run/texts/                                   what the target wrote, unless there were texts
    OUT/run/checkpoint.pt                            to go on from

A time is a budget for all of it. How many texts and updates fit is measured at the beginning, then fixed and written
down: a run that is killed goes on as the one that it was, and no faster or slower machine changes what comes out.
"""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs

from foredraft.errors import InvalidOptionError
from foredraft.target.loader import LoadedModel, load_model
from foredraft.train.acceptance import Acceptance, first_windows
from foredraft.train.batches import collate
from foredraft.train.card import write_card
from foredraft.train.checkpoint import read_checkpoint
from foredraft.train.collect import collect, load_writer, open_store
from foredraft.train.dataset import TextStore
from foredraft.train.files import FromFiles
from foredraft.train.loop import FEW_TEXTS, Trainer, fastest_dtype
from foredraft.train.methods import TRAINABLE
from foredraft.train.options import TrainOptions
from foredraft.train.own_words import OwnWords
from foredraft.train.plan import Plan, check_same_run, read_plan, write_plan
from foredraft.train.trainee import Trainee, TrainTarget, TrainTexts

SHARE_OF_TEXTS = 0.6
"""Of the time; a head that has learnt its texts by heart wants more of them, not more epochs."""
SPARE = 0.95
"""Share of the time that is planned for."""
WAIT_S = 1.0

Tell = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRun:
    """What is asked for.

    Attributes:
        out: folder of the head and of the run.
        minutes: for all of it; not needed where ``num_updates`` is given and there are texts.
        num_updates: instead of as many as there is time for.
        data: files of texts or chats, or folders of texts that earlier runs wrote; none lets the target write.
        start_from: folder of an earlier run, whose weights this one begins with.
        device: ``cpu``, or ``auto`` for what accelerate finds.
        command: for the model card.
    """

    target: str
    out: Path
    options: TrainOptions
    minutes: float | None = None
    num_updates: int | None = None
    data: tuple[Path, ...] = ()
    start_from: Path | None = None
    device: str = "auto"
    cache_dir: str | None = None
    command: str = ""

    @property
    def folder(self) -> Path:
        return self.out / "run"

    def seconds(self) -> float:
        if self.minutes is None:
            raise InvalidOptionError("how long the run may take is not known; give minutes, or updates and texts")
        return 60.0 * self.minutes * SPARE


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What came out; ``acceptance`` is that of all held-out texts."""

    plan: Plan
    acceptance: Acceptance
    history: list[dict[str, Any]]
    num_bytes: int
    num_tokens: int
    num_held_out: int


def train_head(run: TrainRun, tell: Tell) -> TrainResult | None:
    """Train a head, or go on with a run that was begun in ``run.out``.

    Returns:
        None in processes of accelerate other than the first, which writes the head.

    Raises:
        InvalidOptionError: another run was begun there; the texts are of another target or lack states; or there is
            neither a time nor a number of updates.
        ModelLoadError, UnsupportedModelError: the target cannot be loaded.
    """
    started = time.perf_counter()
    accelerator = Accelerator(
        cpu=run.device == "cpu",
        mixed_precision="no",
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )
    if not accelerator.is_main_process:
        tell = _silent
    tell(f"loading {run.target}", 0.0)
    loaded = load_model(run.target, device="cpu", cache_dir=run.cache_dir)
    method = importlib.import_module(TRAINABLE[run.options.method])
    target = TrainTarget.of(loaded)
    if hasattr(method, "check_target"):
        method.check_target(target)
    if accelerator.is_main_process:
        plan = _begin(run, loaded, accelerator.device)
        plan = _fix_texts(run, plan, loaded, method, tell)
    plan = _wait_for(run.folder, "num_texts")
    texts = _texts(run, plan, method.feature_layers(_num_layers(loaded)))
    trainee: Trainee = method.make(target, texts, run.options)
    if plan.start_from is not None:
        _load_weights(trainee, Path(plan.start_from))
    looked = FEW_TEXTS if plan.num_looked is None else plan.num_looked
    trainer = Trainer(
        trainee,
        texts,
        run.options,
        run.folder,
        accelerator,
        tell,
        plan.dtype,
        num_looked=looked,
        is_trained=plan.start_from is not None,
    )
    if accelerator.is_main_process and plan.num_updates is None:
        tell("measuring the speed of training", 0.0)
        num_updates = run.num_updates or trainer.updates_within(_seconds_left(run, texts.store, started))
        plan = write_plan(run.folder, replace(plan, num_updates=num_updates, num_looked=trainer.num_looked))
    accelerator.wait_for_everyone()
    plan = _wait_for(run.folder, "num_updates")
    assert plan.num_updates is not None
    trainer.resume()
    acceptance = trainer.train(plan.num_updates)
    if not accelerator.is_main_process:
        return None
    windows = first_windows(texts, texts.held, run.options.window)
    trainee.measure(collate(texts.store, [window]).to(accelerator.device) for window in windows)
    trainee.save(run.out)
    result = TrainResult(
        plan,
        acceptance,
        trainer.history,
        sum(file.stat().st_size for file in run.out.glob("*.safetensors")),
        sum(len(texts.store.token_ids(i)) - texts.store.num_prompt_tokens(i) for i in texts.kept),
        len(texts.held),
    )
    write_card(run.out, run, texts.store, result, time.perf_counter() - started)
    return result


def _silent(label: str, share: float) -> None:
    """Progress of a process that is not the first."""


def _begin(run: TrainRun, loaded: LoadedModel, device: torch.device) -> Plan:
    """The plan of the folder, or a new one."""
    plan = read_plan(run.folder)
    if plan is not None:
        check_same_run(run.folder, plan, run.options, loaded.fingerprint)
        return plan
    if run.num_updates is None or not _are_stores(run.data):
        run.seconds()
    stores = run.data if _are_stores(run.data) else (run.folder / "texts",)
    new = Plan(
        options=asdict(run.options),
        fingerprint=loaded.fingerprint,
        texts=[str(store.absolute()) for store in stores],
        dtype=fastest_dtype(device),
        start_from=None if run.start_from is None else str(run.start_from.absolute()),
    )
    return write_plan(run.folder, new)


def _fix_texts(run: TrainRun, plan: Plan, loaded: LoadedModel, method: Any, tell: Tell) -> Plan:
    """Let the target write its texts if there are none, and fix how many are used."""
    if plan.num_texts is not None:
        return plan
    if _are_stores(run.data):
        return write_plan(run.folder, replace(plan, num_texts=len(_open_stores(plan))))
    tell("writing the first texts", 0.0)
    options = {"cache_dir": run.cache_dir, "device": run.device}
    llm, writer = load_writer(run.target, method.feature_layers(_num_layers(loaded)), **options)
    limit, seed = writer.engine.target.max_model_len, run.options.seed
    source: Any = (
        FromFiles(run.data, llm.tokenizer, limit, seed=seed) if run.data else OwnWords(llm.tokenizer, limit, seed=seed)
    )
    store = open_store(plan.texts[0], llm, writer, source)
    if plan.num_pieces is None:
        store = collect(store, source, writer, num_pieces=1)
        a_piece = store.seconds / store.num_pieces
        wanted = max(1, int(SHARE_OF_TEXTS * run.seconds() / max(a_piece, 1e-9)))
        plan = write_plan(run.folder, replace(plan, num_pieces=min(wanted, source.num_pieces or wanted)))
    assert plan.num_pieces is not None
    for piece in range(store.num_pieces, plan.num_pieces):
        left = (plan.num_pieces - piece) * store.seconds / store.num_pieces
        label = f"writing texts: {store.num_tokens} tokens, {store.tokens_per_second:.0f}/s, {left / 60:.1f} min left"
        tell(label, piece / plan.num_pieces)
        store = collect(store, source, writer, num_pieces=piece + 1)
    plan = write_plan(run.folder, replace(plan, num_texts=len(store)))
    llm.close()
    del llm, writer
    gc.collect()
    return plan


def _texts(run: TrainRun, plan: Plan, layers: tuple[int, ...]) -> TrainTexts:
    store, names = _open_stores(plan), ", ".join(plan.texts)
    if store.meta.fingerprint != plan.fingerprint:
        raise InvalidOptionError(f"{names} holds texts of {store.meta.target}, and not of {run.target}")
    missing = sorted(set(layers) - set(store.meta.layers))
    if missing:
        raise InvalidOptionError(
            f"{names} has states of layers {list(store.meta.layers)}, and {run.options.method} needs "
            f"{missing} too; let new texts be written"
        )
    assert plan.num_texts is not None
    kept, held = ([i for i in part if i < plan.num_texts] for part in store.split(run.options.held_out))
    if not kept or not held:
        raise InvalidOptionError(f"the first {plan.num_texts} texts of {names} are too few to measure on some of them")
    return TrainTexts(store, kept, held)


def _open_stores(plan: Plan) -> TextStore:
    """The texts of all folders as one store."""
    store = TextStore(plan.texts[0])
    for folder in plan.texts[1:]:
        store.join(TextStore(folder))
    return store


def _load_weights(trainee: Trainee, out: Path) -> None:
    checkpoint = read_checkpoint(out / "run")
    if checkpoint is None:
        raise InvalidOptionError(f"{out} holds no training run to begin with: there is no run/checkpoint.pt in it")
    try:
        trainee.load_state_dict(checkpoint.module)
    except RuntimeError as error:
        raise InvalidOptionError(f"the run in {out} trained another kind of head or other sizes: {error}") from error


def _seconds_left(run: TrainRun, store: TextStore, started: float) -> float:
    """Of the budget, whether the texts were written by this process or by one that was killed."""
    spent = time.perf_counter() - started
    return run.seconds() - (spent if _are_stores(run.data) else max(spent, store.seconds))


def _wait_for(folder: Path, name: str) -> Plan:
    """The plan once a number in it is known; other processes than the first wait for that one."""
    while (plan := read_plan(folder)) is None or getattr(plan, name) is None:
        time.sleep(WAIT_S)
    return plan


def _are_stores(data: tuple[Path, ...]) -> bool:
    """Raises InvalidOptionError if there are files among folders."""
    folders = [path for path in data if path.is_dir()]
    if folders and len(folders) < len(data):
        raise InvalidOptionError(
            f"data has files beside the folder {folders[0]}; let the files' texts be written into a folder of their own"
        )
    return bool(folders)


def _num_layers(loaded: LoadedModel) -> int:
    config: Any = loaded.model.config
    return int(config.get_text_config().num_hidden_layers)
