"""Every drafter of the registry under every acceptance rule, in every sampling mode, in batches of 1, 3 and 5."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from foredraft.config import ACCEPTANCE_RULES
from foredraft.errors import IncompatibleDrafterError
from foredraft.testing import (
    MODES,
    MakeDrafter,
    Totals,
    check_distribution,
    check_interface,
    check_tokens,
    makes_trees,
)

pytestmark = pytest.mark.filterwarnings("ignore:no tokenizer to compare draft model")

FromRegistry = Callable[[str], MakeDrafter]


MAIN_MODES = ("greedy", "temperature", "top-p")
RULES_AND_MODES = [
    pytest.param(rule, mode, marks=() if rule == "auto" or mode in MAIN_MODES else pytest.mark.slow)
    for rule in ACCEPTANCE_RULES
    for mode in MODES
]
"""All of them; by default every mode under ``auto``, and greedy, sampled and filtered under the other rules."""


@pytest.mark.parametrize(("rule", "mode"), RULES_AND_MODES)
def test_tokens(from_registry: FromRegistry, name: str, rule: str, mode: str):
    """Identical to plain decoding where the rule promises it, independent of the batch under every rule."""
    totals = Totals()
    if rule == "block" and makes_trees(from_registry(name)):
        with pytest.raises(IncompatibleDrafterError, match="'block' judges chains"):
            check_tokens(from_registry(name), rule, mode, 4)
        return
    check_tokens(from_registry(name), rule, mode, 4, totals=totals)
    if name != "none":
        totals.check_not_vacuous()
        assert totals.longest_draft > 1
    else:
        assert totals.num_draft_tokens == 0


@pytest.mark.parametrize(
    "num_draft_tokens", [1, 8, *(pytest.param(k, marks=pytest.mark.slow) for k in (2, 3, 5, 6, 7))]
)
def test_greedy_at_every_draft_length(from_registry: FromRegistry, drafting: str, num_draft_tokens: int):
    totals = Totals()
    check_tokens(from_registry(drafting), "auto", "greedy", num_draft_tokens, totals=totals)
    totals.check_not_vacuous()
    assert totals.longest_draft == num_draft_tokens or makes_trees(from_registry(drafting))


def test_interface(from_registry: FromRegistry, name: str):
    """Caches after every step, nothing kept of ended requests, the engine's lists left alone."""
    check_interface(from_registry(name))


@pytest.mark.parametrize(
    "rule", ["rejection", "coupled", *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("block", "match"))]
)
def test_distribution(from_registry: FromRegistry, drafting: str, rule: str):
    """4,000 tokens, 20,000 in the slow test. Acceptance says that drafts were judged both ways."""
    if rule == "block" and makes_trees(from_registry(drafting)):
        return  # refused, see test_tokens
    assert 0.01 < check_distribution(from_registry(drafting), rule, num_texts=1000) < 0.95


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.8, "temperature": 0.9}, {"min_p": 0.3}])
@pytest.mark.parametrize("rule", ["rejection", "coupled", "match"])
def test_distribution_with_filters(from_registry: FromRegistry, drafting: str, rule: str, options: dict[str, float]):
    assert 0.0 < check_distribution(from_registry(drafting), rule, **options) < 1.0
