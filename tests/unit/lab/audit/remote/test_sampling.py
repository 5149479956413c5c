"""A server's faults are seen over HTTP, and right servers are acquitted.

Each audit convicts an exact server with a probability of at most 1e-6, over all its tests and looks; there are
under 20 audits of exact servers here, so together a false alarm in 50,000 runs of this file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from foredraft.lab.audit.remote.client import Client, Endpoint
from foredraft.lab.audit.remote.probe import Abilities, probe
from foredraft.lab.audit.remote.sampling import SamplingPlan, SamplingResult, audit_sampling

from .table_server import Behaviour, TableServer, serve, wait_briefly

ACQUITTAL_TOKENS = 2_500
CONVICTION_TOKENS = 20_000
PROMPTS = ("a", "bb", "ccc", "dddd", "eeeee")


def audit(
    behaviour: Behaviour, temperature: float = 1.0, num_tokens: int = ACQUITTAL_TOKENS, **changes: Any
) -> tuple[SamplingResult, Abilities, TableServer]:
    endpoint = {"model": "table", "chat": behaviour.shape == "emitted_first", "max_retries": 2}
    with serve(behaviour) as (url, server), Client(Endpoint(url=url, **endpoint), sleep=wait_briefly) as client:
        abilities = probe(client)
        plan = {
            "temperature": temperature, "prompts": PROMPTS, "max_tokens": 64, "num_tokens": num_tokens,
            "concurrency": 3, "request_seed": None, "false_alarm_rate": 1e-6, "auditor_seed": 11,
        }  # fmt: skip
        result = audit_sampling(client, abilities, SamplingPlan(**{**plan, **changes}), lambda done: None)
    return result, abilities, server


@pytest.mark.parametrize(
    ("behaviour", "temperature"),
    [
        (Behaviour(), 1.0),
        (Behaviour(), 0.6),
        (Behaviour(raw=False), 0.6),
        (Behaviour(raw=False), 1.6),
        (Behaviour(shape="entries", num_top=5), 1.0),
        (Behaviour(shape="emitted_first"), 1.0),
        (Behaviour(hides_end=True), 1.0),
    ],
    ids=["default", "raw at 0.6", "processed at 0.6", "processed at 1.6", "five listed", "chat", "hidden ends"],
)
def test_exact_speculation_is_acquitted(behaviour: Behaviour, temperature: float) -> None:
    result, abilities, server = audit(behaviour, temperature)
    assert not result.convicted, result.judge.panel.strongest
    assert result.trouble is None
    assert result.num_tested >= ACQUITTAL_TOKENS
    assert server.num_rejections > 100
    assert abilities.num_top == behaviour.num_top
    assert abilities.processed is not behaviour.raw
    assert result.conditional == (behaviour.raw and temperature != 1.0)
    assert result.judge.twin.num_observations > 5
    assert (result.num_untestable > 0) == (behaviour.hides_end or result.conditional)


FAULTS = {
    "after a rejection, drawn from the target": (Behaviour(rule="target_fallback"), 1.0),
    "greedy draft, ratio of a soft one": (Behaviour(rule="soft_ratio"), 1.0),
    "a quarter of what should be rejected is kept": (Behaviour(rule="favour"), 1.0),
    "one number decides and recovers": (Behaviour(rule="shared_draw"), 1.0),
    "greedy whatever is asked": (Behaviour(fixed_temperature=0.0), 1.0),
    "slightly too cold": (Behaviour(fixed_temperature=0.9), 1.0),
    "temperature ignored, raw": (Behaviour(fixed_temperature=1.0), 0.7),
    "temperature ignored, processed": (Behaviour(fixed_temperature=1.0, raw=False), 1.5),
    "temperature ignored, over chat": (Behaviour(fixed_temperature=0.7, shape="emitted_first"), 1.0),
    "all requests draw the same numbers": (Behaviour(same_noise=True), 1.0),
    "wrong rule behind hidden ends": (Behaviour(rule="soft_ratio", hides_end=True), 1.0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_convicted(fault: str) -> None:
    behaviour, temperature = FAULTS[fault]
    result, _, _ = audit(behaviour, temperature, CONVICTION_TOKENS)
    assert result.convicted
    assert result.num_tested < CONVICTION_TOKENS


def test_a_fault_in_shared_noise_is_told_by_the_tests_that_look_for_it() -> None:
    result, _, _ = audit(Behaviour(same_noise=True), num_tokens=CONVICTION_TOKENS)
    assert result.judge.panel.strongest in (result.judge.twin, *result.judge.in_step)


def test_requests_with_seeds_carry_one_each() -> None:
    _, _, server = audit(Behaviour(), num_tokens=200, request_seed=40)
    seeds = [body["seed"] for body in server.bodies if "seed" in body]
    assert len(seeds) >= 4
    assert sorted(seeds) == list(range(40, 40 + len(seeds)))
    assert {body["top_p"] for body in server.bodies} == {1.0}


def test_a_server_without_more_than_openai_s_fields_is_audited_by_text() -> None:
    result, abilities, server = audit(Behaviour(strict=True, num_top=5), num_tokens=500)
    assert not abilities.knows_tokens
    assert abilities.num_top == 5
    assert any("without ids" in note for note in abilities.notes)
    assert all("top_k" not in body for body in server.bodies)
    assert not result.convicted
    assert result.num_tested >= 500


def test_rate_limits_are_waited_out() -> None:
    # one request at a time: with several, chance may refuse the same one three times
    result, _, server = audit(Behaviour(busy_every=3), num_tokens=1_000, concurrency=1)
    assert server.num_requests > server.num_answers > 15
    assert result.trouble is None
    assert result.num_tested >= 1_000


def test_what_was_answered_before_a_server_died_is_kept() -> None:
    exact, _, _ = audit(Behaviour(dies_after=23))
    assert exact.trouble is not None
    assert "did not answer in 3 attempts" in exact.trouble
    assert exact.num_answers >= 20 - 2 * 3
    assert exact.num_tested >= 64 * exact.num_answers - exact.num_untestable > 500
    assert not exact.convicted
    faulty, _, _ = audit(Behaviour(rule="soft_ratio", dies_after=40))
    assert faulty.convicted


UNTOLD = Behaviour(shape="entries", untold_drafts=True)


def test_tokens_without_log_probabilities_are_counted_and_not_judged() -> None:
    result, _, _ = audit(UNTOLD, num_tokens=50)
    assert result.trouble is not None
    assert "too few could be tested" in result.trouble
    assert result.num_tested == result.num_answers
    assert result.num_untestable == 63 * result.num_answers


ENDS_HIDDEN = pytest.param(replace(UNTOLD, hides_end=True), marks=pytest.mark.slow)


@pytest.mark.parametrize("behaviour", [replace(UNTOLD, rule="soft_ratio"), ENDS_HIDDEN])
def test_they_are_judged_when_they_are_asked_for_afterwards(behaviour: Behaviour) -> None:
    result, _, server = audit(behaviour, num_tokens=300, score_missing=True)
    assert result.convicted == (behaviour.rule == "soft_ratio")
    assert result.num_scored >= 0.8 * result.num_tested > 100
    assert result.scoring_difference == 0.0
    assert (result.num_untestable > 0) == behaviour.hides_end
    assert all(isinstance(body["prompt"], list) for body in server.bodies if body["max_tokens"] == 64)


def test_a_server_that_cannot_tokenize_is_not_scored() -> None:
    result, _, _ = audit(replace(UNTOLD, strict=True), num_tokens=50, score_missing=True)
    assert result.trouble is not None
    assert "/tokenize" in result.trouble
