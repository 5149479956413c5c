"""Every drafter of the registry under every exact rule is acquitted, at several temperatures and filters.

An exact engine is convicted with a probability of at most 1e-6 an audit; the seeds are fixed, so a result does not
change from run to run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from foredraft.lab.audit.sampling import audit_sampling
from foredraft.testing import (
    LOSSLESS_RULES,
    MakeDrafter,
    engine_for,
    makes_trees,
    noisy_copy,
    target_for,
    tiny_model,
)
from foredraft.types import SamplingParams

from .conftest import VARIANTS

pytestmark = pytest.mark.filterwarnings("ignore:no tokenizer to compare draft model")

PROMPTS = [[7], [7, 8, 9, 10, 7, 8, 9], list(range(20, 37)), [3, 5, 3, 5, 3]]
RULES = [rule for rule in LOSSLESS_RULES if rule != "auto"]
MODES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 1.4, "top_k": 5},
    {"min_p": 0.1, "repetition_penalty": 1.2},
    {"frequency_penalty": 0.5, "logit_bias": {5: 1.0}, "min_tokens": 8, "stop_token_ids": (3, 9)},
]
FromRegistry = Callable[[str], MakeDrafter]


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    target = tiny_model(3, context=0.01)
    return target, noisy_copy(target, 0.08)


def check_acquitted(make: MakeDrafter, models: tuple[Any, Any], name: str, rule: str, mode: int, tokens: int) -> None:
    if rule == "block" and makes_trees(make):
        pytest.skip("the rule 'block' judges chains")
    target = target_for(models[0])
    drafter = make(target, models[1])
    engine = engine_for(target, drafter, num_speculative_tokens=4, acceptance_rule=rule)
    params = SamplingParams(**{"seed": 0, "max_tokens": 24, **MODES[mode]})
    result = audit_sampling(engine, PROMPTS, params, num_tokens=tokens, batch_size=4)
    assert not result.convicted, result.tests
    assert result.num_tokens >= tokens
    if name != "none":
        assert result.num_accepted_tokens < result.num_draft_tokens
        assert result.num_accepted_tokens or tokens < 4_000, "a head without training is right by chance only"
        asked = any(test.num_tokens > tokens / 10 for test in result.tests if "draft" in test.name)
        # Children that were drawn with the target's own noise are fixed beforehand by nobody.
        assert asked != (rule == "coupled" and drafter.makes_trees and drafter.stochastic)


@pytest.mark.parametrize("after", [0, 2])
def test_exact_rules_are_acquitted(from_registry: FromRegistry, models: Any, name: str, after: int) -> None:
    """200 tokens each; two rules for every drafter, all rules and modes by turns."""
    place = list(VARIANTS).index(name) + after
    check_acquitted(from_registry(name), models, name, RULES[place % len(RULES)], place % len(MODES), 200)


@pytest.mark.slow  # 4,000 tokens of each combination
@pytest.mark.parametrize("mode", range(len(MODES)))
@pytest.mark.parametrize("rule", RULES)
def test_exact_rules_are_acquitted_in_every_mode(
    from_registry: FromRegistry, models: Any, name: str, rule: str, mode: int
) -> None:
    check_acquitted(from_registry(name), models, name, rule, mode, 4_000)
