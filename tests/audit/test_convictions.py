"""Every planted fault is convicted on a tiny model, and the same engine without it is not.

The faults are known to be there: an audit ends when its evidence is certain, after 32 to 9,000 tokens. An audit
of an exact engine convicts with a probability of at most 1e-6; the seeds are fixed.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from foredraft.drafters import Drafter
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.ngram import NGramDrafter
from foredraft.engine import Engine
from foredraft.lab.audit.greedy import GreedyVerdict, audit_greedy
from foredraft.lab.audit.sampling import SamplingResult, audit_sampling
from foredraft.testing import engine_for, noisy_copy, target_for, tiny_model
from foredraft.types import SamplingParams

from . import faults

PROMPTS = [[7], [7, 8, 9, 10, 7, 8, 9], list(range(20, 37)), [3, 5, 3, 5, 3]]
VOCAB_SIZE = 64


@functools.cache
def models() -> tuple[Any, Any]:
    target = tiny_model(3, context=0.01)
    return target, noisy_copy(target, 0.2)


def model_drafter(kind: type[DraftModelDrafter] = DraftModelDrafter) -> DraftModelDrafter:
    return kind(target_for(models()[1]), VOCAB_SIZE)


def ngram_drafter() -> Drafter:
    return NGramDrafter(1, 4)


def engine_with(drafter: Drafter, verifier: type | None = None, rule: str = "rejection") -> Engine:
    engine = engine_for(
        target_for(models()[0]), drafter, num_speculative_tokens=4, acceptance_rule=rule, allow_lossy=rule == "typical"
    )
    if verifier is not None:
        engine.verifier = verifier(engine.config)
    return engine


def audit(engine: Engine, num_tokens: int = 20_000, **options: Any) -> SamplingResult:
    params = SamplingParams(**{"temperature": 1.0, "seed": 0, "max_tokens": 32, **options})
    result = audit_sampling(engine, PROMPTS, params, num_tokens=num_tokens, batch_size=8)
    assert 0 < result.num_accepted_tokens < result.num_draft_tokens
    return result


@pytest.mark.parametrize(
    ("fault", "make_drafter", "options", "reason"),
    [
        (faults.ResidualIsTarget, ngram_drafter, {}, "token proposed by a deterministic draft"),
        (faults.ResidualIsTarget, model_drafter, {}, "token favoured by the draft"),
        (faults.NoTemperature, ngram_drafter, {"temperature": 0.7}, "log-probability"),
        (faults.FiltersOnBonusOnly, ngram_drafter, {"top_k": 4}, "token excluded by the filters"),
        (faults.PositionOffByOne, model_drafter, {}, "log-probability"),
    ],
    ids=["residual-ngram", "residual-model", "temperature", "filters", "position"],
)
def test_a_wrong_verifier_is_convicted(fault: type, make_drafter: Any, options: dict[str, Any], reason: str) -> None:
    """The test that convicts is the one that knows the fault."""
    result = audit(engine_with(make_drafter(), fault), **options)
    assert result.convicted
    assert result.reason == reason


def test_typical_acceptance_is_convicted() -> None:
    assert audit(engine_with(ngram_drafter(), rule="typical")).convicted


def test_a_soft_ratio_for_a_greedy_draft_is_convicted() -> None:
    assert audit(engine_with(model_drafter(faults.SoftGreedyDrafter))).convicted


def test_a_random_number_shared_by_draft_and_recovery_is_convicted() -> None:
    result = audit(engine_with(model_drafter(), faults.SharedStream))
    assert result.convicted
    assert result.reason == "token favoured by a shared random number"


@pytest.mark.slow  # 9,000 tokens: noise of the whole vocabulary hides its trace better than one number does
def test_gumbel_noise_shared_by_draft_and_recovery_is_convicted() -> None:
    result = audit(engine_with(model_drafter(faults.GumbelDrafter), faults.SharedNoise))
    assert result.convicted
    assert result.reason == "token favoured by shared Gumbel noise"


def test_the_verifier_without_a_fault_is_acquitted() -> None:
    """1,000 tokens; the faults above are planted in this very verifier, and one in this drafter."""
    result = audit(engine_with(model_drafter(faults.GumbelDrafter), faults.PlainVerifier), num_tokens=1_000)
    assert not result.convicted
    assert all(abs(finding.z_score or 0.0) < 5.5 for finding in result.tests)


def test_an_audit_leaves_the_engine_as_it_was() -> None:
    engine = engine_with(ngram_drafter())
    audit(engine, num_tokens=100)
    assert not engine.has_unfinished_requests
    assert not engine.watchers
    assert engine.target.slots.num_open == 0


def test_the_same_seed_gives_the_same_audit_in_any_batch() -> None:
    """Texts are judged in the order of their beginning, so neither their ends nor the batch play a part."""
    results = []
    for batch_size in (2, 16):
        params = SamplingParams(seed=5, max_tokens=40, stop_token_ids=(3, 9, 31))
        results.append(
            audit_sampling(engine_with(ngram_drafter()), PROMPTS, params, num_tokens=400, batch_size=batch_size)
        )
    assert results[0].numbers == results[1].numbers
    assert results[0].tests == results[1].tests
    assert results[0].num_texts > 400 / 40


@pytest.mark.parametrize("fault", [faults.PositionOffByOne, None])
def test_the_greedy_audit_tells_a_fault_from_none(fault: type | None) -> None:
    """At temperature 0 a shifted row picks another token; a verifier without a fault keeps every one."""
    engine = engine_with(ngram_drafter(), fault)
    params = SamplingParams(temperature=0.0, max_tokens=40)
    result = audit_greedy(engine, engine_for(target_for(models()[0])), PROMPTS, params)
    assert result.num_tokens == 160
    assert 0 < result.num_accepted_tokens < result.num_draft_tokens
    assert result.verdict is (GreedyVerdict.FAULT if fault else GreedyVerdict.TOKEN_IDENTICAL)
    for divergence in result.divergences:
        assert divergence.behind > 2 * divergence.noise


def test_a_fault_of_plain_decoding_too_is_found() -> None:
    """Both engines take the second best token: their texts agree, and the model's own logits disagree."""

    class SecondBest(faults.PlainVerifier):
        def target_probs(self, sequence: Any, drafted: list[int], logits_NV: Any) -> Any:
            return super().target_probs(sequence, drafted, logits_NV.scatter(-1, logits_NV.argmax(-1, True), -1e9))

    engines = [engine_with(ngram_drafter(), SecondBest) for _ in range(2)]
    result = audit_greedy(*engines, PROMPTS[:1], SamplingParams(temperature=0.0, max_tokens=5))
    assert result.verdict is GreedyVerdict.FAULT
    assert result.divergences[0].token == result.divergences[0].plain_token
    assert result.divergences[0].position == 0
