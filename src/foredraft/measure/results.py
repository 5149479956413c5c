"""From timed runs to figures: one row an arm and prompt, ratios between engines, the JSON document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.measure import metrics
from foredraft.measure.arms import Run, TimeSplit

FOREDRAFT, TRANSFORMERS = "foredraft", "transformers"

Round = list[Run]
"""Runs of one arm over the prompts of a workload, once each, in the order of the prompts."""


def cell_name(prompt: str, temperature: float) -> str:
    """A prompt at a temperature, as people say it."""
    return f"{prompt}, greedy" if temperature == 0.0 else f"{prompt}, temperature {temperature:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmResult:
    """What one arm did on one workload; figures with prefill count every second of a run.

    Attributes:
        num_tokens: new tokens of one round over the workload's prompts.
        tokens_per_s, decode_tokens_per_s: medians over the rounds; the second is without prefill.
        first_s: median seconds to the first delivery, per prompt.
        tokens_per_target_pass: over all rounds.
        first_difference: earliest token that differs from the same engine's plain arm with the same seed, in
            any round; None if all are the same.
        num_identical: prompts of all rounds whose tokens are those of the plain arm, of ``num_runs``.
        acceptance_rate: accepted per draft token; None without drafts.
        split: of the round whose total is the median.
    """

    engine: str
    method: str
    prompt: str
    temperature: float
    num_speculative_tokens: int
    num_prompts: int
    num_prompt_tokens: int
    num_tokens: int
    repeats: int
    tokens_per_s: float
    decode_tokens_per_s: float
    first_s: float
    num_target_passes: int
    tokens_per_target_pass: float
    first_difference: int | None
    num_identical: int
    num_runs: int
    acceptance_rate: float | None
    acceptance_len: float | None
    acceptance_per_position: tuple[float, ...]
    split: TimeSplit

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def summarise(
    rounds: Sequence[Round], plain: Sequence[Round], *, num_speculative_tokens: int, num_prompt_tokens: int,
    engine: str, method: str, prompt: str, temperature: float,
) -> ArmResult:  # fmt: skip
    """Figures of an arm from its rounds, of which there is at least one.

    ``plain`` are the rounds of the same engine's plain arm; those that both have are compared.
    """
    runs = [run for one in rounds for run in one]
    emitted = [count for run in runs for count in run.emitted]
    drafted = [count for run in runs for count in run.drafted]
    accepted = metrics.accepted_per_pass(emitted)
    tokens = [sum(len(run.token_ids) for run in one) for one in rounds]
    totals = [sum(run.total_s for run in one) for one in rounds]
    middle = metrics.middle_index(totals)
    differences = [
        metrics.first_difference(run.token_ids, reference.token_ids)
        for one, other in zip(rounds, plain, strict=False)
        for run, reference in zip(one, other, strict=False)
    ]
    return ArmResult(
        engine=engine,
        method=method,
        prompt=prompt,
        temperature=temperature,
        num_speculative_tokens=num_speculative_tokens,
        num_prompts=len(rounds[0]),
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=tokens[middle],
        repeats=len(rounds),
        tokens_per_s=metrics.median_of([metrics.token_rate(n, s) for n, s in zip(tokens, totals, strict=True)]),
        decode_tokens_per_s=metrics.median_of([_decode_rate(one) for one in rounds]),
        first_s=metrics.median_of([run.first_s for run in runs]),
        num_target_passes=sum(run.num_target_passes for run in rounds[middle]),
        tokens_per_target_pass=metrics.tokens_per_target_pass(sum(tokens), sum(run.num_target_passes for run in runs)),
        first_difference=min((d for d in differences if d is not None), default=None),
        num_identical=differences.count(None),
        num_runs=len(differences),
        acceptance_rate=metrics.acceptance_rate(accepted, drafted),
        acceptance_len=metrics.acceptance_len(accepted, drafted),
        acceptance_per_position=tuple(metrics.acceptance_per_position(accepted, drafted)),
        split=_sum_splits([run.split for run in rounds[middle]]),
    )


def _decode_rate(runs: Round) -> float:
    """Of a whole round: tokens after the first deliveries over the time after them."""
    return metrics.decode_rate(
        sum(len(run.token_ids) for run in runs),
        sum(run.first_s for run in runs),
        sum(run.total_s for run in runs),
        sum(run.emitted[0] for run in runs),
    )


def _sum_splits(splits: Sequence[TimeSplit]) -> TimeSplit:
    return TimeSplit(
        sum(s.draft_s for s in splits),
        sum(s.target_s for s in splits),
        sum(s.verify_s for s in splits),
        sum(s.host_s for s in splits),
    )


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast ``arm`` is as ``base``, each named as (engine, method)."""

    prompt: str
    temperature: float
    arm: tuple[str, str]
    base: tuple[str, str]
    tokens_per_s: float | None
    decode_tokens_per_s: float | None


def ratios(results: Sequence[ArmResult]) -> list[Ratio]:
    """Each method against the same method of the peer, and against its own engine's plain arm."""
    found = []
    by_key = {(r.prompt, r.temperature, r.engine, r.method): r for r in results}
    for result in results:
        arm = (result.engine, result.method)
        bases = [(result.engine, "none")] if result.method != "none" else []
        if result.engine == FOREDRAFT:
            bases = [(TRANSFORMERS, result.method), *bases]
        for base in bases:
            other = by_key.get((result.prompt, result.temperature, *base))
            if other is not None:
                found.append(
                    Ratio(
                        result.prompt,
                        result.temperature,
                        arm,
                        base,
                        metrics.ratio(result.tokens_per_s, other.tokens_per_s),
                        metrics.ratio(result.decode_tokens_per_s, other.decode_tokens_per_s),
                    )
                )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchResult:
    """Prompts decoded together, compared with each of them decoded alone.

    Attributes:
        tokens_per_s: of all rows together, prefill included.
        alone_tokens_per_s: median over the same prompts one by one, prefill included.
        num_identical: rows whose tokens are the same as alone.
    """

    method: str
    temperature: float
    batch_size: int
    num_tokens: int
    tokens_per_s: float
    alone_tokens_per_s: float
    num_identical: int


def arm_document(result: ArmResult) -> dict[str, Any]:
    """One entry of ``arms`` in the JSON document."""
    split = result.split
    return {
        "engine": result.engine,
        "method": result.method,
        "prompt": result.prompt,
        "temperature": result.temperature,
        "num_speculative_tokens": result.num_speculative_tokens,
        "num_prompts": result.num_prompts,
        "num_prompt_tokens": result.num_prompt_tokens,
        "num_tokens": result.num_tokens,
        "repeats": result.repeats,
        "tokens_per_s": round(result.tokens_per_s, 2),
        "decode_tokens_per_s": round(result.decode_tokens_per_s, 2),
        "first_token_s": round(result.first_s, 4),
        "num_target_passes": result.num_target_passes,
        "tokens_per_target_pass": round(result.tokens_per_target_pass, 3),
        "first_difference": result.first_difference,
        "num_identical": result.num_identical,
        "num_runs": result.num_runs,
        "acceptance_rate": _rounded(result.acceptance_rate),
        "acceptance_len": _rounded(result.acceptance_len),
        "acceptance_per_position": [round(rate, 3) for rate in result.acceptance_per_position],
        "time_s": {
            "draft": round(split.draft_s, 4),
            "target": round(split.target_s, 4),
            "verify": round(split.verify_s, 4),
            "host": round(split.host_s, 4),
        },
    }


def ratio_documents(found: Iterable[Ratio]) -> list[dict[str, Any]]:
    """The entries of ``ratios`` in the JSON document."""
    return [
        {
            "prompt": each.prompt,
            "temperature": each.temperature,
            "arm": " ".join(each.arm),
            "base": " ".join(each.base),
            "tokens_per_s": _rounded(each.tokens_per_s),
            "decode_tokens_per_s": _rounded(each.decode_tokens_per_s),
        }
        for each in found
    ]


def batch_document(result: BatchResult) -> dict[str, Any]:
    """One entry of ``batches`` in the JSON document."""
    return {
        "engine": FOREDRAFT,
        "method": result.method,
        "temperature": result.temperature,
        "batch_size": result.batch_size,
        "num_tokens": result.num_tokens,
        "tokens_per_s": round(result.tokens_per_s, 2),
        "alone_tokens_per_s": round(result.alone_tokens_per_s, 2),
        "ratio": _rounded(metrics.ratio(result.tokens_per_s, result.alone_tokens_per_s)),
        "num_identical": result.num_identical,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
