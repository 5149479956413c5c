"""One timed completion, the same for every engine: what an arm is, and the arms of foredraft itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from foredraft.config import SpeculativeConfig
from foredraft.engine.llm import LLM
from foredraft.engine.sequence import Sequence as Running
from foredraft.types import Request, RequestMetrics, SamplingParams


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Seconds of a run in drafting, target passes, verification and everything else. They sum to its total.

    ``verify_s`` is 0 for an engine that does not tell it apart; it is then part of ``host_s``.
    """

    draft_s: float
    target_s: float
    verify_s: float
    host_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """One completion of one prompt.

    Attributes:
        token_ids: the new tokens.
        drafted, emitted: per target pass that delivered something, the draft tokens and the new tokens.
        num_target_passes: all passes of the target; a peer's are counted by a hook on its model.
        first_s, total_s: seconds from the call to the first and to the last delivery.
    """

    token_ids: list[int]
    drafted: list[int]
    emitted: list[int]
    num_target_passes: int
    first_s: float
    total_s: float
    split: TimeSplit


class Arm(Protocol):
    """A way of decoding under measurement.

    Attributes:
        engine: ``foredraft`` or the peer's name.
        method: as in :class:`~foredraft.config.SpeculativeConfig`.
        num_speculative_tokens: most draft tokens of a pass.
    """

    engine: str
    method: str
    num_speculative_tokens: int

    def run(self, prompt: Sequence[int], *, temperature: float, seed: int, max_tokens: int) -> Run:
        """Complete a prompt with exactly ``max_tokens`` tokens: end tokens do not end it."""
        ...


@dataclass(slots=True)
class PassCounter:
    """Counts and times the calls of a module with forward hooks; the hooks stay for the module's life.

    Seconds are those of the call, so on an accelerator they are those of launching its work.
    """

    num_passes: int = 0
    seconds: float = 0.0
    widths: list[int] = field(default_factory=list)
    _began: float = 0.0

    def attach(self, module: Any) -> PassCounter:
        """Count the calls of ``module`` (its weights and outputs are not touched)."""
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(self._leave)
        return self

    def reset(self) -> None:
        self.num_passes, self.seconds = 0, 0.0
        self.widths.clear()

    def _enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        self.widths.append(0 if tokens is None else tokens.shape[-1])
        self._began = time.perf_counter()

    def _leave(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began
        self.num_passes += 1


class ForedraftArm:
    """An engine of our own with one drafter, on a target that all arms share.

    Args:
        llm: gives the target, the tokenizer and the settings.
        config: the drafter.
    """

    engine = "foredraft"

    def __init__(self, llm: LLM, config: SpeculativeConfig):
        self.method, self.num_speculative_tokens = config.method, config.max_draft_tokens
        self._engine = llm.new_engine(config)
        self._num_runs = 0

    def run(self, prompt: Sequence[int], *, temperature: float, seed: int, max_tokens: int) -> Run:
        params = exact_length_params(temperature, seed, max_tokens)
        target = self._engine.target
        passes_before = target.num_passes
        self._num_runs += 1
        began = time.perf_counter()
        sequence = self._engine.add_request(Request(f"bench-{self._num_runs}", list(prompt), params))
        try:
            drafted, emitted, first_s = self._decode(sequence, began)
        finally:
            self._engine.abort(sequence.request.request_id)
        total_s = time.perf_counter() - began
        return Run(
            sequence.output_token_ids, drafted, emitted, target.num_passes - passes_before, first_s, total_s,
            _split(sequence.metrics, total_s),
        )  # fmt: skip

    def run_together(
        self, prompts: Sequence[Sequence[int]], *, temperature: float, seed: int, max_tokens: int
    ) -> tuple[list[list[int]], float]:
        """Decode the prompts in one batch; returns the new tokens of each and the seconds of all."""
        params = exact_length_params(temperature, seed, max_tokens)
        self._num_runs += 1
        began = time.perf_counter()
        rows = [
            self._engine.add_request(Request(f"batch-{self._num_runs}-{index}", list(prompt), params))
            for index, prompt in enumerate(prompts)
        ]
        try:
            while self._engine.has_unfinished_requests:
                self._engine.step()
        finally:
            for row in rows:
                self._engine.abort(row.request.request_id)
        return [row.output_token_ids for row in rows], time.perf_counter() - began

    def _decode(self, sequence: Running, began: float) -> tuple[list[int], list[int], float]:
        """Step to the end; draft and new tokens of each delivery, and when the first one came."""
        drafted: list[int] = []
        emitted: list[int] = []
        first_s, known = 0.0, 0
        while self._engine.has_unfinished_requests:
            for output in self._engine.step():
                first_s = first_s or time.perf_counter() - began
                drafted.append(sequence.metrics.num_draft_tokens - known)
                emitted.append(len(output.token_ids))
                known = sequence.metrics.num_draft_tokens
        return drafted, emitted, first_s


def exact_length_params(temperature: float, seed: int, max_tokens: int) -> SamplingParams:
    """Sampling that makes exactly ``max_tokens`` tokens; the seed counts only above temperature 0."""
    return SamplingParams(
        temperature=temperature, seed=seed if temperature else None, max_tokens=max_tokens, ignore_eos=True
    )


def _split(metrics: RequestMetrics, total_s: float) -> TimeSplit:
    """The engine's own account; what the caller's loop adds is host time."""
    known = metrics.draft_s + metrics.target_s + metrics.verify_s
    return TimeSplit(metrics.draft_s, metrics.target_s, metrics.verify_s, max(0.0, total_s - known))
