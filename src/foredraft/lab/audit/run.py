"""An audit from options to result: load the model, decode, judge."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from foredraft.config import SpeculativeConfig
from foredraft.engine.llm import LLM
from foredraft.errors import InvalidOptionError
from foredraft.lab.audit.greedy import GreedyResult, GreedyVerdict, audit_greedy
from foredraft.lab.audit.options import AuditOptions
from foredraft.lab.audit.sampling import SamplingResult, audit_sampling
from foredraft.measure.workloads import SHORT_PROMPTS, built_in_workload, dataset_workloads, encode, story_prompts

NUM_STORIES = 7

Tell = Callable[[str, float], None]


@dataclass(slots=True)
class AuditResult:
    """What an audit found, and on what.

    Attributes:
        contract: of the engine's numerics.
        greedy: None if temperature 0 was not asked for, or was not reached.
        sampling: one result a temperature.
        interrupted: by Ctrl-C; what was judged by then counts.
    """

    options: AuditOptions
    contract: str
    dtype: str
    device: str
    threads: int
    num_prompts: int
    greedy: GreedyResult | None = None
    sampling: list[SamplingResult] = field(default_factory=list)
    interrupted: bool = False
    total_s: float = 0.0

    @property
    def is_lossless(self) -> bool:
        """Whether nothing was found against the engine. It is not a proof: see the biases that would have shown."""
        greedy_fault = self.greedy is not None and self.greedy.verdict is GreedyVerdict.FAULT
        return not greedy_fault and not any(result.convicted for result in self.sampling)


def run_audit(options: AuditOptions, tell: Tell = lambda label, fraction: None) -> AuditResult:
    """Audit the engine that :class:`LLM` builds from the options.

    Raises:
        InvalidOptionError, ModelLoadError, UnsupportedModelError, IncompatibleDrafterError: before any decoding.
    """
    started = time.perf_counter()
    tell(f"loading {options.model}", 0.0)
    llm = LLM(
        options.model,
        speculative_config=options.speculative,
        enable_prefix_caching=False,  # the engines share a cache; a fault of one must not be hidden by the other
        **options.engine_options,
    )
    prompts = load_prompts(options, llm)
    target = llm.engine.target
    result = AuditResult(
        options=options,
        contract=llm.engine.contract,
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(target.device),
        threads=torch.get_num_threads(),
        num_prompts=len(prompts),
    )
    for temperature in options.temperatures:
        if result.interrupted:
            break
        _audit_at(temperature, result, llm, prompts, tell)
    result.total_s = time.perf_counter() - started
    return result


def _audit_at(temperature: float, result: AuditResult, llm: LLM, prompts: list[list[int]], tell: Tell) -> None:
    options, params = result.options, result.options.params_at(temperature)
    if temperature == 0.0:
        plain = llm.new_engine(SpeculativeConfig())
        result.greedy = audit_greedy(
            llm.engine, plain, prompts, params, tell=lambda what, at: tell(f"greedy: {what}", at)
        )
        result.interrupted = result.greedy.interrupted
        return
    found = audit_sampling(
        llm.engine,
        prompts,
        params,
        num_tokens=options.num_tokens,
        batch_size=options.batch_size,
        false_alarm_rate=options.false_alarm_rate / options.num_sampling_audits,
        tell=lambda what, at: tell(f"temperature {temperature:g}", at),
    )
    result.sampling.append(found)
    result.interrupted = found.interrupted


def load_prompts(options: AuditOptions, llm: LLM) -> list[list[int]]:
    """Token ids of the prompts; each leaves room for ``max_tokens``.

    Raises:
        InvalidOptionError: the file cannot be used, or there is no room.
    """
    if llm.tokenizer is None:
        raise InvalidOptionError(f"{options.model} has no tokenizer, so no prompt can be made for it")
    room = llm.engine.target.max_model_len - options.max_tokens
    if options.prompts_file is None:
        short = [list(built_in_workload(name, llm.tokenizer, 0).prompts[0]) for name in SHORT_PROMPTS]
        prompts = [*short, *story_prompts(llm.tokenizer, NUM_STORIES)]
    elif options.prompts_file.suffix == ".jsonl":
        workloads = dataset_workloads(options.prompts_file, llm.tokenizer, None, room)
        prompts = [list(prompt) for workload in workloads for prompt in workload.prompts]
    else:
        prompts = [encode(llm.tokenizer, [{"role": "user", "content": line}]) for line in _lines(options.prompts_file)]
    longest = max(map(len, prompts))
    if longest > room:
        raise InvalidOptionError(
            f"a prompt has {longest} tokens; with max_tokens={options.max_tokens} that is beyond the "
            f"{llm.engine.target.max_model_len} positions of {options.model}; lower one of them"
        )
    return prompts


def _lines(file: Path) -> list[str]:
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOptionError(f"prompts_file {file} cannot be read: {error}") from error
    if not lines:
        raise InvalidOptionError(f"prompts_file {file} holds no prompts; expected one a line")
    return lines
