"""What a model's passes, a method's drafts and the host cost on this machine: for ``foredraft profile``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from foredraft.engine import Engine
from foredraft.engine.llm import LLM
from foredraft.engine.profile import PassSample, fit_table, settle_pass_samples
from foredraft.measure import machine
from foredraft.measure.tables import Grid, Section, method_name
from foredraft.policy import Forecast, PassTable, PlanRow, StepOutcome
from foredraft.types import Request, SamplingParams

BATCHES, LENGTHS = (1, 8, 32), (0, 1, 4)
STEPS = 6
PROMPT = tuple(range(1, 17)) * 4
"""The output is kept to its tokens, so that copying drafters find something."""

Tell = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class StepSample:
    """Median seconds of the parts of a step that asks for ``num_draft_tokens`` for each of ``batch_size`` rows.

    It gets ``num_drafted`` in all, on average.

    The first step of a request is not among them: it takes the prompt in.
    """

    batch_size: int
    num_draft_tokens: int
    num_drafted: float
    draft_s: float
    target_s: float
    verify_s: float
    host_s: float

    @property
    def host_share(self) -> float:
        return self.host_s / (self.draft_s + self.target_s + self.verify_s + self.host_s)


@dataclass(frozen=True, slots=True)
class Profile:
    """Everything that was measured of a model and a method.

    Attributes:
        samples: passes of the target; ``table`` is fitted to them.
        steps: whole steps with drafts of the method, and without.
    """

    model: str
    method: str
    dtype: str
    device: str
    threads: int
    samples: list[PassSample]
    table: PassTable
    steps: list[StepSample]

    def draft_cost(self, step: StepSample) -> float:
        """c: seconds of a draft token over those of a pass of one token."""
        return step.draft_s / max(1, step.num_draft_tokens) / self.table.seconds[0]


def measure_profile(llm: LLM, *, refresh: bool, threads: int, tell: Tell = lambda label, fraction: None) -> Profile:
    """Passes from the cache folder, or measured and kept there; steps are measured each time.

    Args:
        refresh: measure the passes again.
    """
    target = llm.engine.target
    label = "passes of the target"
    samples = settle_pass_samples(
        target, llm.loaded.fingerprint, llm.config, refresh=refresh, tell=lambda done: tell(label, 0.5 * done)
    )
    most = llm.speculative_config.max_draft_tokens
    lengths = sorted({k for k in LENGTHS if k < most} | {most})
    room = (target.max_model_len - len(PROMPT)) // (max(lengths) + 1)
    cases = [(batch, k) for batch in BATCHES if batch <= llm.config.max_num_seqs for k in lengths]
    steps = []
    for at, (batch, k) in enumerate(cases):
        tell(f"steps of {batch} rows with {k} draft tokens each", 0.5 + 0.5 * at / len(cases))
        steps.append(measure_steps(llm.engine, batch, k, max(1, min(STEPS, room - 1))))
    return Profile(
        model=llm.config.model,
        method=llm.speculative_config.method,
        dtype=str(llm.loaded.dtype).removeprefix("torch."),
        device=str(llm.loaded.device),
        threads=threads,
        samples=samples,
        table=fit_table(samples),
        steps=steps,
    )


def measure_steps(engine: Engine, batch_size: int, num_draft_tokens: int, num_steps: int) -> StepSample:
    """Run requests that repeat themselves, greedily, for some steps; the engine is left as it was."""
    watcher = _Watcher(num_draft_tokens)
    policy, engine.policy = engine.policy, watcher
    names = [f"profile-{i}" for i in range(batch_size)]
    prompt = [token % engine.target.vocab_size for token in PROMPT]
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, allowed_token_ids=tuple(set(prompt)))
    try:
        for name in names:
            engine.add_request(Request(name, prompt, params))
        while engine.has_unfinished_requests and len(watcher.seen) < num_steps + 1:
            engine.step()
    finally:
        for name in names:
            engine.abort(name)
        engine.policy = policy
    seen = watcher.seen[1:] or watcher.seen
    parts = ("draft_s", "target_s", "verify_s", "host_s")
    drafted = mean(sum(row.num_draft_tokens for row in step.rows) for step in seen)
    seconds = (median(getattr(step, part) for step in seen) for part in parts)
    return StepSample(batch_size, num_draft_tokens, drafted, *seconds)


class _Watcher:
    """A policy of one length that keeps the outcomes of steps in which all rows decode."""

    forecast: Forecast | None = None

    def __init__(self, num_draft_tokens: int):
        self._length = num_draft_tokens
        self.seen: list[StepOutcome] = []

    def rests(self, num_rows: int) -> bool:
        return False

    def plan(self, rows: Sequence[PlanRow], num_other_tokens: int) -> list[int]:
        return [min(self._length, row.limit) for row in rows]

    def observe(self, step: StepOutcome) -> None:
        if step.rows and len(step.rows) == step.num_rows:
            self.seen.append(step)

    def forget(self, sequence_id: int) -> None:
        """Nothing is kept of a sequence."""


def profile_grids(profile: Profile) -> list[Grid]:
    """The tables of a profile: passes, and steps with drafts."""
    passes = [
        [
            str(sample.num_rows),
            str(sample.num_tokens),
            str(sample.context_len),
            f"{1e3 * sample.seconds:.2f}",
            f"{1e3 * sample.predicted_s(profile.table):.2f}",
            f"{sample.predicted_s(profile.table) / sample.seconds - 1.0:+.0%}",
        ]
        for sample in profile.samples
    ]
    steps = [
        [
            str(step.batch_size),
            str(step.num_draft_tokens),
            f"{step.num_drafted:.1f}",
            *(f"{1e3 * getattr(step, part):.2f}" for part in ("draft_s", "target_s", "verify_s", "host_s")),
            f"{step.host_share:.1%}",
            f"{profile.draft_cost(step):.3f}" if step.num_draft_tokens else "",
        ]
        for step in profile.steps
    ]
    return [
        Grid(
            "A pass of the target, ms",
            ["rows", "tokens each", "context", "measured", "fitted", "error"],
            0,
            f"A pass of up to {profile.table.free_tokens} tokens costs at most a tenth more than one of a single "
            f"token. A further row costs {1e6 * profile.table.row_s:.0f} us, a thousand keys of a row "
            f"{1e6 * profile.table.key_s:.2f} ms, and for each further token {1e6 * profile.table.pair_s:.2f} ms.",
            [Section("", passes)],
        ),
        Grid(
            f"A step with drafts: {method_name(profile.method)}, ms",
            ["rows", "asked each", "drafted", "draft", "target", "verify", "host", "host share", "c"],
            0,
            "drafted: tokens of all rows. host: scheduling, delivery. c: time of drafting over draft tokens asked for "
            "each row, in passes of one token. The output is kept to 16 tokens, so that there is something to copy.",
            [Section("", steps)],
        ),
    ]


def profile_document(profile: Profile, command: str) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "command": command,
        "model": profile.model,
        "method": profile.method,
        "dtype": profile.dtype,
        "device": profile.device,
        "threads": profile.threads,
        "free_tokens": profile.table.free_tokens,
        "table": asdict(profile.table),
        "passes": [
            {**asdict(sample), "fitted_s": round(sample.predicted_s(profile.table), 7)} for sample in profile.samples
        ],
        "steps": [
            {**asdict(step), "c": round(profile.draft_cost(step), 4), "host_share": round(step.host_share, 4)}
            for step in profile.steps
        ],
        "versions": machine.versions(),
        "hardware": {**machine.cpu(), "accelerators": machine.accelerators()},
    }
