"""Greedy answers over HTTP: identical, near-tie and fault are told apart (the remote side of case O34)."""

from __future__ import annotations

import pytest

from foredraft.lab.audit.remote.client import Client, Endpoint
from foredraft.lab.audit.remote.greedy import GreedyResult, Likeness, audit_greedy
from foredraft.lab.audit.remote.probe import probe

from .table_server import Behaviour, serve, wait_briefly

PROMPTS = tuple("x" * length for length in range(1, 13))


def compare(ours: Behaviour, theirs: Behaviour | None = None) -> GreedyResult:
    with serve(ours) as (url, _), Client(Endpoint(url=url, model="table", max_retries=1), sleep=wait_briefly) as client:
        abilities = probe(client)
        if theirs is None:
            return audit_greedy(client, abilities, PROMPTS, 30, 2, lambda done: None)
        with serve(theirs) as (other_url, _), Client(Endpoint(url=other_url, model="table")) as other:
            return audit_greedy(client, abilities, PROMPTS, 30, 2, lambda done: None, (other, probe(other)))


def test_the_same_server_twice_is_identical() -> None:
    result = compare(Behaviour(), Behaviour(rule="plain"))
    assert result.verdict is Likeness.IDENTICAL
    assert result.num_identical == result.num_compared == len(PROMPTS)
    assert result.noise == 0.0
    assert result.num_checked == result.num_tokens == 30 * len(PROMPTS)


def test_other_kernels_are_a_near_tie() -> None:
    result = compare(Behaviour(logit_noise=0.15), Behaviour())
    assert result.verdict is Likeness.NEAR_TIE
    assert not result.convicted
    assert result.noise is not None
    assert result.noise > 0.05
    assert all(0.0 <= each.gap <= 2 * result.noise for each in result.divergences if each.gap is not None)


@pytest.mark.parametrize("slips", ["here", "there"])
def test_a_wrong_token_is_a_fault_and_its_place_is_given(slips: str) -> None:
    wrong, right = Behaviour(greedy_slip=11, logit_noise=0.01), Behaviour()
    result = compare(wrong, right) if slips == "here" else compare(right, wrong)
    assert result.verdict is Likeness.FAULT
    assert result.convicted
    assert bool(result.self_faults) == (slips == "here")
    assert {each.position for each in result.divergences if result.likeness(each) is Likeness.FAULT} == {10}


def test_one_server_is_held_against_its_own_log_probabilities() -> None:
    assert compare(Behaviour()).verdict is Likeness.IDENTICAL
    result = compare(Behaviour(greedy_slip=11))
    assert result.convicted
    assert {each.position % 11 for each in result.self_faults} == {10}
    assert min(each.gap for each in result.self_faults) > 1e-3


def test_without_log_probabilities_a_difference_cannot_be_judged() -> None:
    result = compare(Behaviour(num_top=0, greedy_slip=11), Behaviour(num_top=0))
    assert result.verdict is Likeness.UNKNOWN
    assert not result.convicted
    assert result.num_checked == 0
    assert {result.likeness(each) for each in result.divergences} == {Likeness.UNKNOWN}
    assert compare(Behaviour(num_top=0), Behaviour(num_top=0)).verdict is Likeness.IDENTICAL


def test_the_answers_before_a_server_died_count() -> None:
    result = compare(Behaviour(dies_after=8), Behaviour())
    assert result.trouble is not None
    assert 0 < result.num_compared == result.num_identical < len(PROMPTS)
