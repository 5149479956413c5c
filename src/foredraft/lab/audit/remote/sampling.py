"""A server's sampled tokens against its own log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from foredraft.errors import ForedraftError
from foredraft.lab.audit.remote.answers import INTERRUPTED, Ask, answers
from foredraft.lab.audit.remote.client import Client
from foredraft.lab.audit.remote.judge import Judge, Judged
from foredraft.lab.audit.remote.probe import Abilities
from foredraft.lab.audit.remote.scoring import Scorer

MOST_ASKED = 4
"""Tokens that may be asked for, in multiples of those that are wanted; most may turn out untestable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """What is asked for.

    Attributes:
        temperature: above 0.
        prompts: each is asked twice in turn.
        max_tokens: of one answer.
        num_tokens: tokens to judge before an acquittal.
        concurrency: requests under way at a time.
        request_seed: the i-th request carries this plus i as its seed; None sends none, as most users do.
        false_alarm_rate: of all tests together.
        auditor_seed: of the auditor's own random numbers.
        score_missing: see :class:`Scorer`.
    """

    temperature: float
    prompts: Sequence[str]
    max_tokens: int
    num_tokens: int
    concurrency: int
    request_seed: int | None
    false_alarm_rate: float
    auditor_seed: int = 0
    score_missing: bool = False


@dataclass(slots=True)
class SamplingResult:
    """What was found; complete if ``trouble`` is None.

    Attributes:
        num_scored: tokens whose log-probabilities were asked for afterwards.
        scoring_difference: see :attr:`Scorer.difference`.
        pit: transformed tokens, for pictures.
        trouble: why it ended before its time.
    """

    plan: SamplingPlan
    judge: Judge
    conditional: bool
    num_answers: int = 0
    num_tested: int = 0
    num_untestable: int = 0
    num_scored: int = 0
    scoring_difference: float = 0.0
    pit: list[float] = field(default_factory=list)
    trouble: str | None = None

    @property
    def convicted(self) -> bool:
        return self.judge.panel.convicted


def audit_sampling(
    client: Client, abilities: Abilities, plan: SamplingPlan, tell: Callable[[int], None]
) -> SamplingResult:
    """Sample until a bias is certain or ``num_tokens`` were judged. A server that dies leaves a partial result.

    Args:
        tell: called with the number of tokens judged so far.
    """
    missing = abilities.missing_temperature(plan.temperature)
    generator = np.random.default_rng(plan.auditor_seed)
    result = SamplingResult(
        plan, Judge(abilities.num_top, missing, plan.false_alarm_rate, generator), conditional=missing is not None
    )
    last: tuple[int, Judged] | None = None
    scorer = Scorer(client, abilities) if plan.score_missing else None
    stream = answers(client, _asks(abilities, plan), plan.concurrency, scorer)
    try:
        for ask, answer in stream:
            twin = last[1] if last and ask.index % 2 and last[0] == ask.index - 1 else None
            judged = result.judge.add(answer, twin)
            last = ask.index, judged
            result.num_answers += 1
            result.num_tested += judged.num_tested
            result.num_untestable += judged.num_untestable
            result.pit += judged.pit[~np.isnan(judged.pit)].tolist()
            tell(result.num_tested)
            if result.judge.panel.look() or result.num_tested >= plan.num_tokens:
                break
            if result.num_answers * plan.max_tokens >= MOST_ASKED * plan.num_tokens:
                result.trouble = f"of {MOST_ASKED} times as many tokens as wanted, too few could be tested"
                break
    except (ForedraftError, KeyboardInterrupt) as error:
        result.trouble = str(error) or INTERRUPTED
    finally:
        stream.close()
    if scorer is not None:
        result.num_scored, result.scoring_difference = scorer.num_scored, scorer.difference
    return result


def _asks(abilities: Abilities, plan: SamplingPlan) -> Iterator[Ask]:
    index = 0
    while True:
        options = {**abilities.options, "temperature": plan.temperature, "max_tokens": plan.max_tokens}
        if plan.request_seed is not None:
            options["seed"] = plan.request_seed + index
        prompt_index = index // 2 % len(plan.prompts)
        yield Ask(index, prompt_index, plan.prompts[prompt_index], options)
        index += 1
