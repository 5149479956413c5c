"""The sampling audit: an engine decodes prompts, and each of its tokens is held against the target's own law.

Texts are judged in the order in which they were begun, whenever they end: in order of their ends, short ones
would come first, and what is short is not typical.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from foredraft.engine.engine import Engine
from foredraft.engine.sequence import Sequence as Running
from foredraft.lab.audit.events import TokenTests
from foredraft.lab.audit.law import Noise, measure_noise, text_logits, token_laws
from foredraft.lab.audit.proposals import ProposalLog
from foredraft.lab.audit.statistics import FALSE_ALARM_RATE, Bet, MartingaleTest, Panel, tokens_needed, visible_bias
from foredraft.types import Request, SamplingParams

NUM_NOISE_TEXTS = 2
SHOWN_BIASES = (0.1, 0.03, 0.01)

Tell = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """One test at the end of an audit.

    Attributes:
        bias: mean of what happened less what should, per token; None for a test that only counts.
        z_score: of the sum.
        evidence: log10 of the bet's worth.
        visible_bias: what so many tokens would have shown with a probability of 0.9.
        tokens_needed: for biases of 0.1, 0.03 and 0.01, the tokens that show them with that probability; None for
            a bias that rounding could explain.
    """

    name: str
    num_tokens: int
    bias: float | None
    z_score: float | None
    evidence: float
    visible_bias: float | None
    tokens_needed: dict[float, int | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingResult:
    """What the sampling audit found.

    Attributes:
        rule: of acceptance.
        num_tokens, num_texts: judged.
        convicted: the tokens do not have the target's law; an exact engine gets this with a probability of at
            most ``false_alarm_rate``.
        reason: name of the strongest test.
        evidence: log10 of the highest average evidence; 1 / false_alarm_rate convicts.
        noise: of the logits between passes of other shapes, and what it does to the laws.
        history: number of tokens and log10 evidence of each test, after each text.
        numbers: the transformed tokens, uniform on (0, 1) if all is well.
        interrupted: by Ctrl-C.
    """

    params: SamplingParams
    rule: str
    num_tokens: int
    num_texts: int
    convicted: bool
    reason: str
    evidence: float
    false_alarm_rate: float
    tests: list[Finding]
    noise: Noise
    num_draft_tokens: int
    num_accepted_tokens: int
    history: list[tuple[int, list[float]]]
    numbers: list[float]
    interrupted: bool
    total_s: float


def audit_sampling(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    num_tokens: int = 20_000,
    batch_size: int = 16,
    false_alarm_rate: float = FALSE_ALARM_RATE,
    tell: Tell = lambda label, fraction: None,
) -> SamplingResult:
    """Decode prompts over and over until enough tokens are judged or a bias is certain.

    Args:
        engine: idle; its target also computes the laws, in plain passes.
        prompts: token ids; each text begins with the next of them, round and round.
        params: of every text; a temperature above 0. With a seed, text i gets ``seed + i``.
        num_tokens: judge this many, unless convicted before.
        batch_size: texts that are decoded together.
        tell: gets a line and the fraction done.
    """
    started = time.perf_counter()
    auditor = _Auditor(engine, params, num_tokens, false_alarm_rate, tell)
    interrupted = False
    try:
        auditor.run(prompts, batch_size)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        auditor.close()
    return auditor.result(interrupted, time.perf_counter() - started)


class _Auditor:
    def __init__(self, engine: Engine, params: SamplingParams, num_tokens: int, false_alarm_rate: float, tell: Tell):
        self._engine, self._params, self._num_tokens, self._tell = engine, params, num_tokens, tell
        self._log, self._tests = ProposalLog(engine.drafter.stochastic), TokenTests()
        self._panel = Panel(self._tests.all, false_alarm_rate)
        self._rng = np.random.default_rng(0 if params.seed is None else params.seed)
        self._waiting: deque[Running] = deque()
        self._noises: list[Noise] = []
        self._history: list[tuple[int, list[float]]] = []
        self._judged = self._num_texts = 0
        self._rule = ""
        engine.watchers.append(self._log)

    def run(self, prompts: Sequence[Sequence[int]], batch_size: int) -> None:
        numbers = itertools.count()
        while self._wants_more:
            running = sum(sequence.finish_reason is None for sequence in self._waiting)
            for _ in range(batch_size - running):
                self._waiting.append(self._begin(next(numbers), prompts))
            self._engine.step()
            while self._wants_more and self._waiting and self._waiting[0].finish_reason is not None:
                self._judge(self._waiting.popleft())

    @property
    def _wants_more(self) -> bool:
        return self._judged < self._num_tokens and not self._panel.convicted

    def close(self) -> None:
        """End what still runs, and leave the engine as it was."""
        for sequence in self._waiting:
            self._engine.abort(sequence.request.request_id)
        self._engine.watchers.remove(self._log)

    def _begin(self, number: int, prompts: Sequence[Sequence[int]]) -> Running:
        seed = None if self._params.seed is None else self._params.seed + number
        params = dataclasses.replace(self._params, seed=seed)
        sequence = self._engine.add_request(Request(f"audit-{number}", list(prompts[number % len(prompts)]), params))
        self._rule = sequence.rule
        return sequence

    def _judge(self, sequence: Running) -> None:
        tokens, num_prompt = sequence.output_token_ids, sequence.num_prompt_tokens
        where = sequence.token_ids, num_prompt, self._params
        if len(self._noises) < NUM_NOISE_TEXTS:
            width = self._engine.config.max_draft_tokens + 1
            self._noises.append(measure_noise(self._engine.target, *where, width, sequence.stop_ids))
        logits = text_logits(self._engine.target, sequence.token_ids, len(tokens))
        laws = list(token_laws(logits, *where, sequence.stop_ids))
        noise = self._noise()
        self._tests.add_text(
            tokens, laws, self._log.take(sequence.sequence_id), self._rng.random(len(tokens)), noise.logits,
            noise.total_variation,
        )  # fmt: skip
        self._judged += len(tokens)
        self._num_texts += 1
        self._panel.look()
        self._history.append((self._judged, [_log10(test.log_evidence) for test in self._panel.tests]))
        self._tell(f"{self._judged:,} tokens judged", min(1.0, self._judged / self._num_tokens))

    def _noise(self) -> Noise:
        """Twice the distance that was measured: the engine's passes may err to the one side, ours to the other."""
        return Noise(
            max(noise.logits for noise in self._noises), 2.0 * max(noise.total_variation for noise in self._noises)
        )

    def result(self, interrupted: bool, total_s: float) -> SamplingResult:
        return SamplingResult(
            params=self._params,
            rule=self._rule,
            num_tokens=self._judged,
            num_texts=self._num_texts,
            convicted=self._panel.convicted,
            reason=self._panel.strongest.name,
            evidence=_log10(self._panel.peak_log_evidence),
            false_alarm_rate=self._panel.false_alarm_rate,
            tests=[_result(test, self._panel.limit) for test in self._panel.tests],
            noise=self._noise() if self._noises else Noise(),
            num_draft_tokens=self._log.num_draft_tokens,
            num_accepted_tokens=self._log.num_accepted_tokens,
            history=self._history,
            numbers=self._tests.numbers,
            interrupted=interrupted,
            total_s=total_s,
        )


def _result(test: Bet, limit: float) -> Finding:
    if not isinstance(test, MartingaleTest) or not test.num_observations:
        return Finding(test.name, test.num_observations, None, None, _log10(test.log_evidence), None)
    variance, blur = test.variance / test.num_observations, test.allowance / test.num_observations
    needed = {
        bias: tokens_needed(bias - blur, variance, limit, test.bound) if bias > blur else None for bias in SHOWN_BIASES
    }
    return Finding(
        name=test.name,
        num_tokens=test.num_observations,
        bias=test.bias,
        z_score=test.z_score,
        evidence=_log10(test.log_evidence),
        visible_bias=visible_bias(test.num_observations, variance, limit, test.bound) + blur,
        tokens_needed=needed,
    )


def _log10(log_evidence: float) -> float:
    return log_evidence / math.log(10)
