"""The Monday-morning benchmark: plain, fixed draft lengths and auto under rising load, arms in turn.

    for each round
        for each level (clients, or requests per second)
            for each arm: one run over the round's requests

Each arm is an engine of its own on the one target. A round's requests are fresh and the same for all arms, and which
arm comes first changes from round to round. Before its first run at a level an arm makes some steps there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from foredraft.engine.llm import LLM
from foredraft.errors import InvalidOptionError
from foredraft.measure import machine
from foredraft.measure.load_arrivals import Arrivals, ClosedLoop, PoissonArrivals
from foredraft.measure.load_options import LoadOptions
from foredraft.measure.load_prompts import RequestStream, built_in_stream, dataset_stream
from foredraft.measure.load_run import LoadArm, LoadRun
from foredraft.measure.load_summary import LoadResult, Round, summarise_level
from foredraft.measure.workloads import dataset_workloads

WARM_UP_STEPS = 32
"""More than a policy needs to trust a pass time (``policy.cost.WINDOW``)."""
STRIDE = 1000
"""Indices of the stream between the runs of two levels or rounds."""

Tell = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class LoadBenchResult:
    """All figures of a benchmark under load.

    Attributes:
        results: level by level, in the order of the arms.
        num_rounds: complete rounds by level.
        contract: what the numerics of the target guarantee.
        interrupted: the user ended it early.
    """

    options: LoadOptions
    results: list[LoadResult]
    num_rounds: dict[float, int]
    contract: str
    dtype: str
    device: str
    threads: int
    interrupted: bool
    total_s: float

    @property
    def level_name(self) -> str:
        return "concurrency" if self.options.arrivals == "closed" else "requests per second"

    def at(self, level: float) -> list[LoadResult]:
        """The arms at one level."""
        return [each for each in self.results if each.level == level]


def run_load_bench(options: LoadOptions, tell: Tell = lambda label, fraction: None) -> LoadBenchResult:
    """Load the model, run all arms at all levels and return the figures; Ctrl-C ends it with those there are.

    Raises:
        ForedraftError: a model, prompt or option cannot be used; nothing has been measured then.
    """
    started = time.perf_counter()
    tell("loading", 0.0)
    most = int(max(options.concurrency, default=64))
    llm = LLM(
        options.model, dtype=options.dtype, numerics=options.numerics, num_threads=options.threads,
        max_num_seqs=max(64, most), enable_prefix_caching=False,  # the arms get the same requests
    )  # fmt: skip
    stream = load_stream(options, llm)
    arms = [LoadArm(name, llm.new_engine(config)) for name, config in options.arms.items()]
    rounds: dict[float, list[Round]] = {level: [] for level in options.levels}
    interrupted = False
    try:
        _run_rounds(options, arms, stream, rounds, started, tell)
    except KeyboardInterrupt:
        interrupted = True
    return LoadBenchResult(
        options=options,
        results=[each for level, found in rounds.items() if found for each in summarise_level(level, found)],
        num_rounds={level: len(found) for level, found in rounds.items()},
        contract=llm.numerics.contract,
        dtype=str(llm.loaded.dtype).removeprefix("torch."),
        device=str(llm.loaded.device),
        threads=torch.get_num_threads(),
        interrupted=interrupted,
        total_s=time.perf_counter() - started,
    )


def load_stream(options: LoadOptions, llm: LLM) -> RequestStream:
    """The requests, built-in or the user's."""
    if llm.tokenizer is None:
        raise InvalidOptionError(f"{options.model} has no tokenizer, so no prompt can be made for it")
    room = llm.engine.target.max_model_len
    if options.dataset is None:
        return built_in_stream(
            options.routes, llm.tokenizer, max_tokens=options.max_tokens, seed=options.seed, max_model_len=room
        )
    longest = room - options.max_tokens - options.max_tokens // 2
    workloads = dataset_workloads(options.dataset, llm.tokenizer, options.per_category, longest)
    return dataset_stream(workloads, max_tokens=options.max_tokens, seed=options.seed, max_model_len=room)


def _run_rounds(
    options: LoadOptions, arms: list[LoadArm], stream: RequestStream, rounds: dict[float, list[Round]], started: float,
    tell: Tell,
) -> None:  # fmt: skip
    """Runs all levels of all rounds; a round that was not finished is not counted."""
    took_s: dict[float, float] = {}
    for repeat in range(options.repeats):
        for at, level in enumerate(options.levels):
            done = repeat * len(options.levels) + at
            tell(f"round {repeat + 1}, {_named(options, level)}", done / (options.repeats * len(options.levels)))
            began = time.perf_counter()
            if repeat and options.time_limit_s and began - started + took_s[level] > options.time_limit_s:
                continue
            if repeat == 0:
                for arm in arms:
                    _warm_up(arm, stream, level, options)
            began = time.perf_counter()
            rounds[level].append(_run_round(options, arms, stream, level, (1 + done) * STRIDE, repeat))
            took_s[level] = time.perf_counter() - began


def _run_round(
    options: LoadOptions, arms: list[LoadArm], stream: RequestStream, level: float, first: int, repeat: int
) -> Round:
    num_requests = options.requests_at(level, len(stream.routes))
    first -= first % len(stream.routes)
    found: dict[str, LoadRun] = {}
    turn = repeat % len(arms)
    for arm in arms[turn:] + arms[:turn]:
        arrivals = _arrivals(options, level, repeat)
        found[arm.name] = arm.run(stream, first, arrivals, num_requests, options.temperature)
    return {arm.name: found[arm.name] for arm in arms}


def _warm_up(arm: LoadArm, stream: RequestStream, level: float, options: LoadOptions) -> None:
    """Closed: the level's clients. Poisson: a few, since how many there will be is not known."""
    clients = int(level) if options.arrivals == "closed" else 4
    arm.warm_up(stream, 0, clients, WARM_UP_STEPS)


def _arrivals(options: LoadOptions, level: float, repeat: int) -> Arrivals:
    if options.arrivals == "closed":
        return ClosedLoop(int(level))
    return PoissonArrivals(level, options.seed + repeat)


def _named(options: LoadOptions, level: float) -> str:
    return f"concurrency {level:g}" if options.arrivals == "closed" else f"{level:g} requests/s"


def load_document(result: LoadBenchResult, command: str) -> dict[str, Any]:
    """Everything that was measured, with all that it depends on; plain data, ready for ``json.dumps``."""
    options = result.options
    return {
        "command": command,
        "model": options.model,
        "method": options.method,
        "arrivals": options.arrivals,
        "levels": list(options.levels),
        "rounds": list(result.num_rounds.values()),
        "routes": list(options.routes) if options.dataset is None else str(options.dataset),
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
        "dtype": result.dtype,
        "device": result.device,
        "threads": result.threads,
        "numerics": result.contract,
        "arms": [result_document(each) for each in result.results],
        "versions": machine.versions(),
        "hardware": {**machine.cpu(), "accelerators": machine.accelerators()},
        "interrupted": result.interrupted,
        "total_s": round(result.total_s, 1),
    }


def result_document(result: LoadResult) -> dict[str, Any]:
    """One entry of ``arms`` in the JSON document."""
    found = {each.name: getattr(result, each.name) for each in fields(result)}
    for name in ("ttft", "tpot", "itl"):
        found[f"{name}_s"] = asdict(found.pop(name))
    return {"arm": found.pop("arm"), "level": found.pop("level"), "outcome": result.outcome, **_rounded(found)}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return round(value, 5) if isinstance(value, float) else value
