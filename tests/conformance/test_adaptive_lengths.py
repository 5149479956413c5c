"""Whatever a policy makes of the past, the law of the output stays the target's: by enumeration of every branch.

And the enumeration convicts lengths that depend on the token that they drop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.lab.adaptive import adaptive_law
from foredraft.lab.enumeration import Instance, continuations, random_instance
from foredraft.policy import (
    GoodputPolicy,
    HeuristicPolicy,
    PassTable,
    PlanRow,
    Policy,
    SpecDecPolicy,
    StepCost,
    StepOutcome,
    TiersPolicy,
)
from foredraft.testing import engine_for, noisy_copy, reference, run, target_for, tiny_model
from foredraft.types import SamplingParams

LENGTH, LIMIT = 4, 3
RULES = ("rejection", "block", "coupled", "greedy")


class Adversary:
    """Lengths from everything that a policy may see, as unevenly as can be: what was accepted, planned and emitted, the
    text's length, parity."""

    forecast = None

    def __init__(self) -> None:
        self.planned, self.accepted = [0], [0]

    def rests(self, num_rows: int) -> bool:
        return False

    def plan(self, rows: Sequence[PlanRow], num_other_tokens: int) -> list[int]:
        mixed = 3 * sum(self.accepted) + 5 * self.accepted[-1] + self.planned[-1] * len(self.planned)
        return [min(row.limit, (mixed + row.context_len + 2) % 4) for row in rows]

    def observe(self, step: StepOutcome) -> None:
        self.planned.append(step.rows[0].planned)
        self.accepted.append(step.rows[0].num_accepted)

    def forget(self, sequence_id: int) -> None:
        self.planned, self.accepted = [0], [0]


POLICIES: dict[str, Any] = {
    "adversary": Adversary,
    "goodput": lambda: GoodputPolicy(StepCost(PassTable((1, 4), (0.01, 0.013), 0.0, 0.0))),
    "heuristic": lambda: HeuristicPolicy(LIMIT),
    "specdec++": SpecDecPolicy,
    "tiers": lambda: TiersPolicy(LIMIT),
}


def texts(seed: int, rule: str, vocab_size: int = 2) -> Instance:
    """Laws after every prefix of a text; for the greedy rule the target has one token each."""
    found = random_instance(np.random.default_rng(seed), vocab_size=vocab_size, num_draft_tokens=LENGTH)
    target = found.target[:LENGTH]
    if rule == "greedy":
        target = tuple((probs == probs.max(axis=-1, keepdims=True)).astype(float) for probs in target)
    return Instance(target, found.draft)


def distance(instance: Instance, law: np.ndarray) -> float:
    joint = continuations(Instance(instance.target, instance.draft[: LENGTH - 1]))[0]
    return 0.5 * float(np.abs(law - joint).sum())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_leaves_the_law_as_it_is(name: str, rule: str):
    for seed in range(2):
        instance = texts(seed, rule)
        law, plans = adaptive_law(instance, POLICIES[name](), rule, limit=LIMIT)
        assert distance(instance, law) < 1e-12
        if name == "adversary" and rule != "greedy":
            assert {count for plan in plans for count in plan} == {0, 1, 2, 3}, "lengths of all kinds"
            assert len(plans) > 4, "which depend on what happened"


def test_three_words_too():
    instance = texts(5, "block", vocab_size=3)
    for rule in ("rejection", "block"):
        assert distance(instance, adaptive_law(instance, Adversary(), rule, limit=2)[0]) < 1e-12


def dropped_when_seen(tokens: tuple[int, ...]) -> int:
    """Ends before the first 0."""
    return tokens.index(0) if 0 in tokens else len(tokens)


def ended_when_seen(tokens: tuple[int, ...]) -> int:
    """Ends with the first 0, which stays: as ``confidence`` ends a draft with the first unlikely token."""
    return min(len(tokens), dropped_when_seen(tokens) + 1)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_dropping_a_token_after_seeing_it_is_convicted(rule: str):
    """The same enumeration, the same adversary; and the honest twin, which keeps the token, is exact."""
    for seed in range(3):
        instance = texts(seed, rule)
        law, _ = adaptive_law(instance, Adversary(), rule, limit=LIMIT, cut=dropped_when_seen)
        assert distance(instance, law) > 0.01
        law, _ = adaptive_law(instance, Adversary(), rule, limit=LIMIT, cut=ended_when_seen)
        assert distance(instance, law) < 1e-12


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_draft_that_is_a_function_of_the_text_may_be_cut_by_what_it_is(rule: str):
    """As copies are: the policy is told how much was found, and how well its place agrees."""
    for seed in range(3):
        drawn = texts(seed, rule)
        certain = tuple((probs == probs.max(axis=-1, keepdims=True)).astype(float) for probs in drawn.draft)
        instance = Instance(drawn.target, certain)
        for cut in (dropped_when_seen, ended_when_seen):
            assert distance(instance, adaptive_law(instance, Adversary(), rule, limit=LIMIT, cut=cut)[0]) < 1e-12


@pytest.mark.parametrize("stop_below", [0.0, 0.5])
def test_tokens_of_an_engine_with_an_adversary_are_those_of_plain_decoding(stop_below: float):
    """Greedy and seeded, with lengths that jump about and drafts that end at unlikely tokens."""
    model = tiny_model(3)
    drafter = DraftModelDrafter(target_for(noisy_copy(model)), 64)
    drafter.stop_below = stop_below
    policy: Policy = Adversary()
    engine = engine_for(model, drafter, policy=policy)
    for params in (SamplingParams(temperature=0.0, max_tokens=24), SamplingParams(seed=7, max_tokens=24)):
        (sequence,) = run(engine, [[1, 2, 3]], params)
        assert sequence.output_token_ids == reference(model, [1, 2, 3], params).token_ids
        counted = sequence.metrics
        assert 0 < counted.num_accepted_tokens < counted.num_draft_tokens
        assert len(set(map(int, counted.drafted_per_position))) > 1
