"""Every drafter of the registry under every acceptance rule, in every sampling mode, in batches of 1, 3 and 5."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

from .conftest import VARIANTS

pytestmark = pytest.mark.filterwarnings("ignore:no tokenizer to compare draft model")

FromRegistry = Callable[[str], MakeDrafter]


MAIN_MODES = ("greedy", "temperature", "top-p")
OTHER_MODES = [mode for mode in MODES if mode not in MAIN_MODES]
RULES = [rule for rule in ACCEPTANCE_RULES if rule != "auto"]
NAMES = list(VARIANTS)


def turn(name: str, choices: Sequence[str], after: int = 0) -> str:
    """One of the choices for each drafter, so that all of them have theirs."""
    return choices[(NAMES.index(name) + after) % len(choices)]


def check(from_registry: FromRegistry, name: str, rule: str, mode: str) -> None:
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


@pytest.mark.parametrize("mode", MAIN_MODES)
def test_tokens(from_registry: FromRegistry, name: str, mode: str):
    """Greedy, sampled and filtered."""
    check(from_registry, name, "auto", mode)


@pytest.mark.parametrize("after", [0, 1])
def test_processors_and_other_filters(from_registry: FromRegistry, name: str, after: int):
    """Two of the other modes for each drafter; they act on the target's rows, which no drafter sees."""
    check(from_registry, name, "auto", turn(name, OTHER_MODES, 2 * after))


@pytest.mark.parametrize("rule", RULES)
def test_every_rule(from_registry: FromRegistry, name: str, rule: str):
    """With and without a filter by turns."""
    check(from_registry, name, rule, turn(name, ("temperature", "top-p"), RULES.index(rule)))


def test_greedy_rows_heed_no_rule(from_registry: FromRegistry, name: str):
    """One rule for each drafter: a greedy row is judged in the same way under all of them."""
    check(from_registry, name, turn(name, RULES), "greedy")


@pytest.mark.slow  # two minutes for what the tests above take by turns
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", ACCEPTANCE_RULES)
def test_every_rule_in_every_mode(from_registry: FromRegistry, name: str, rule: str, mode: str):
    check(from_registry, name, rule, mode)


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


def distribution(from_registry: FromRegistry, drafting: str, rule: str, num_texts: int) -> None:
    if rule == "block" and makes_trees(from_registry(drafting)):
        return  # refused, see check
    assert 0.01 < check_distribution(from_registry(drafting), rule, num_texts=num_texts) < 0.95


def test_distribution(from_registry: FromRegistry, drafting: str):
    """4,000 tokens under the rule that draws most. Acceptance says that drafts were judged both ways."""
    distribution(from_registry, drafting, "rejection", 1000)


@pytest.mark.parametrize("drafting", ["ngram", "draft_model", "draft_model-tree"], indirect=True)
def test_distribution_of_coupled_drafts(from_registry: FromRegistry, drafting: str):
    """Fixed drafts, drawn ones and a drawn tree; of all drafters `test_tokens` has shown the tokens to be plain."""
    distribution(from_registry, drafting, "coupled", 1000)


@pytest.mark.slow  # minutes, to confirm what enumeration proves
@pytest.mark.parametrize("rule", ["rejection", "block", "coupled", "match"])
def test_distribution_under_every_rule(from_registry: FromRegistry, drafting: str, rule: str):
    distribution(from_registry, drafting, rule, 5000)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.8, "temperature": 0.9}, {"min_p": 0.3}])
@pytest.mark.parametrize("rule", ["rejection", "coupled", "match"])
def test_distribution_with_filters(from_registry: FromRegistry, drafting: str, rule: str, options: dict[str, float]):
    assert 0.0 < check_distribution(from_registry(drafting), rule, **options) < 1.0
