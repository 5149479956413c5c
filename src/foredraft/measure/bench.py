"""The benchmark: arms in turn over prompts and temperatures, each with a warm-up, and what came of it.

    for each repeat
        for each cell (temperature x workload)
            for each prompt, for each arm: one timed run

So a slow minute of the machine meets all arms alike, and an interrupted run has figures for what came first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foredraft.engine.llm import LLM
from foredraft.errors import InvalidOptionError
from foredraft.measure.arms import Arm, ForedraftArm
from foredraft.measure.batches import measure_batches
from foredraft.measure.options import BenchOptions, needs_draft_model
from foredraft.measure.passes import PassTime, measure_passes
from foredraft.measure.results import ArmResult, BatchResult, Round, cell_name, summarise
from foredraft.measure.workloads import LONG, Workload, built_in_workload, dataset_workloads, story_prompts

WARM_UP_TOKENS = 16

Tell = Callable[[str, float], None]
"""Told what is being done, and which fraction of all of it is done."""


@dataclass(slots=True)
class Cell:
    """Arms that run side by side on one workload at one temperature, and the rounds they have done."""

    workload: Workload
    temperature: float
    arms: list[Arm]
    rounds: dict[tuple[str, str], list[Round]] = field(default_factory=dict)
    seconds: float = 0.0

    def results(self) -> list[ArmResult]:
        """Figures of the arms that have finished at least one run."""
        found = []
        for arm in self.arms:
            rounds = self.rounds.get(_key(arm), [])
            if rounds:
                found.append(
                    summarise(
                        rounds,
                        self.rounds[arm.engine, "none"],
                        num_speculative_tokens=arm.num_speculative_tokens,
                        num_prompt_tokens=self.workload.num_prompt_tokens,
                        engine=arm.engine,
                        method=arm.method,
                        prompt=self.workload.name,
                        temperature=self.temperature,
                    )
                )
        return found


@dataclass(frozen=True, slots=True)
class BenchResult:
    """All figures of a benchmark.

    Attributes:
        passes: what drafts of several sizes cost our target.
        contract: what the numerics of our target guarantee.
        dtype, device, threads: what all arms ran with.
        weight_bytes: of the target, as a pass reads them.
        interrupted: the user ended it early.
    """

    options: BenchOptions
    arms: list[ArmResult]
    passes: list[PassTime]
    batches: list[BatchResult]
    contract: str
    dtype: str
    device: str
    threads: int
    weight_bytes: int
    bandwidth_bytes_per_s: float
    interrupted: bool
    total_s: float

    @property
    def ceiling_tokens_per_s(self) -> float:
        """Plain decoding of one sequence cannot be faster: every token reads all weights once."""
        return self.bandwidth_bytes_per_s / self.weight_bytes


def run_bench(options: BenchOptions, tell: Tell = lambda label, fraction: None) -> BenchResult:
    """Load the models, run all arms and return the figures; Ctrl-C ends it with those there are.

    Raises:
        ForedraftError: a model, prompt or option cannot be used; nothing has been measured then.
        KeyboardInterrupt: it came before the first measurement.
    """
    started = time.perf_counter()
    tell("loading", 0.0)
    llm, arms = load_arms(options)
    workloads = load_workloads(options, llm)
    cells = plan(options, arms, workloads)
    weight_bytes, bandwidth = _ceiling(llm)
    batches: list[BatchResult] = []
    passes: list[PassTime] = []
    interrupted = False
    try:
        passes += measure_passes(llm.engine.target)
        _run_cells(options, cells, started, tell)
        if max(options.batch_sizes, default=1) > 1:
            own = [arm for arm in arms if isinstance(arm, ForedraftArm) and _is_worth_batching(arm, options)]
            measure_batches(options, own, _batch_prompts(options, llm, workloads), batches.append, tell)
    except KeyboardInterrupt:
        interrupted = True
    return BenchResult(
        options=options,
        arms=[result for cell in cells for result in cell.results()],
        passes=passes,
        batches=batches,
        contract=llm.numerics.contract,
        dtype=str(llm.loaded.dtype).removeprefix("torch."),
        device=str(llm.loaded.device),
        threads=_num_threads(),
        weight_bytes=weight_bytes,
        bandwidth_bytes_per_s=bandwidth,
        interrupted=interrupted,
        total_s=time.perf_counter() - started,
    )


def load_arms(options: BenchOptions) -> tuple[LLM, list[Arm]]:
    """Our target once, shared by our arms; the peer's copy once, shared by its arms."""
    llm = LLM(
        options.model,
        dtype=options.dtype,
        numerics=options.numerics,
        num_threads=options.threads,
        enable_prefix_caching=False,  # the arms get the same prompts; each must feed them itself
    )
    draft_model = options.draft_model or options.model
    arms: list[Arm] = [ForedraftArm(llm, config) for config in options.arms.values()]
    if options.peer is not None:
        from foredraft.measure.peer_transformers import PEER_METHODS, PeerModel, TransformersArm

        peer = PeerModel(llm.config, draft_model if "draft_model" in options.all_methods else None)
        for method in (each for each in options.all_methods if each in PEER_METHODS):
            wanted = None if method == "none" else options.num_speculative_tokens
            arms.append(TransformersArm(peer, method, wanted))
    return llm, arms


def load_workloads(options: BenchOptions, llm: LLM) -> list[Workload]:
    """The prompts, and a check that there is room for their output."""
    limit = llm.engine.target.max_model_len
    if llm.tokenizer is None:
        raise InvalidOptionError(f"{options.model} has no tokenizer, so no prompt can be made for it")
    if options.dataset is not None:
        room = limit - options.max_tokens
        return dataset_workloads(options.dataset, llm.tokenizer, options.per_category, room)
    workloads = [built_in_workload(name, llm.tokenizer, options.num_prompt_tokens) for name in options.prompts]
    for workload in workloads:
        longest = max(map(len, workload.prompts))
        if longest + options.max_tokens > limit:
            raise InvalidOptionError(
                f"prompt {workload.name!r} has {longest} tokens; with max_tokens={options.max_tokens} that is "
                f"beyond the {limit} positions of {options.model}; lower one of them"
            )
    return workloads


def plan(options: BenchOptions, arms: Sequence[Arm], workloads: Sequence[Workload]) -> list[Cell]:
    """Which arms run where. The long prompt is run greedily only.

    Where the target drafts for itself, that arm runs on the other greedy cells only: it shows the cost of
    drafting, and nothing that a temperature or a context would change.
    """
    cells = []
    for temperature in options.temperatures:
        for workload in workloads:
            is_long = options.dataset is None and workload.name == LONG
            if is_long and temperature != 0.0 and 0.0 in options.temperatures:
                continue
            shows_drafting = not options.drafts_with_itself or (temperature == 0.0 and not is_long)
            chosen = [arm for arm in arms if not needs_draft_model(arm.method) or shows_drafting]
            cells.append(Cell(workload, temperature, chosen))
    return cells


def _run_cells(options: BenchOptions, cells: Sequence[Cell], started: float, tell: Tell) -> None:
    done = 0
    for repeat in range(options.repeats):
        for cell in cells:
            tell(
                f"{cell_name(cell.workload.name, cell.temperature)}, {repeat + 1} of {options.repeats}",
                done / (options.repeats * len(cells)),
            )
            done += 1
            elapsed = time.perf_counter() - started
            if repeat and options.time_limit_s and elapsed + cell.seconds > options.time_limit_s:
                continue
            began = time.perf_counter()
            _run_round(options, cell, repeat)
            cell.seconds = time.perf_counter() - began


def _run_round(options: BenchOptions, cell: Cell, repeat: int) -> None:
    """Each arm once over each prompt, in turn. In the first round a warm-up of each arm comes before it."""
    arms = [a for a in cell.arms if repeat == 0 or not needs_draft_model(a.method) or not options.drafts_with_itself]
    seed = options.seed + repeat
    if repeat == 0:
        for arm in arms:
            tokens = min(WARM_UP_TOKENS, options.max_tokens)
            arm.run(cell.workload.prompts[0], temperature=cell.temperature, seed=seed, max_tokens=tokens)
    fresh: dict[tuple[str, str], Round] = {_key(arm): [] for arm in arms}
    try:
        for prompt in cell.workload.prompts:
            for arm in arms:
                run = arm.run(prompt, temperature=cell.temperature, seed=seed, max_tokens=options.max_tokens)
                fresh[_key(arm)].append(run)
    finally:
        for key, runs in fresh.items():
            if len(runs) == len(cell.workload.prompts) or (runs and repeat == 0):
                cell.rounds.setdefault(key, []).append(runs)


def _key(arm: Arm) -> tuple[str, str]:
    return arm.engine, arm.method


def _is_worth_batching(arm: Arm, options: BenchOptions) -> bool:
    return not needs_draft_model(arm.method) or not options.drafts_with_itself


def _batch_prompts(options: BenchOptions, llm: LLM, workloads: Sequence[Workload]) -> list[list[int]]:
    """Different prompts for the largest batch: the user's, if there are enough, or else stories."""
    size = max(options.batch_sizes)
    prompts = [list(prompt) for workload in workloads for prompt in workload.prompts]
    if options.dataset is not None and len(prompts) >= size:
        return prompts[:size]
    return story_prompts(llm.tokenizer, size)


def _ceiling(llm: LLM) -> tuple[int, float]:
    """Bytes of the target's weights, and the bytes per second that this machine reads."""
    from foredraft.lab.devices import measure_this_device
    from foredraft.lab.model_shape import model_shape

    shape = model_shape(llm.loaded.path)
    return int(shape.num_active_params) * llm.loaded.dtype.itemsize, measure_this_device().bandwidth_bytes_per_s


def _num_threads() -> int:
    import torch

    return torch.get_num_threads()
