"""Several sources at once, by name: the suite for combinations that nobody wrote code for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from foredraft.testing import (
    MODES,
    MakeDrafter,
    Totals,
    check_distribution,
    check_drafter,
    check_interface,
    check_tokens,
    makes_trees,
)

pytestmark = pytest.mark.filterwarnings("ignore:no tokenizer to compare draft model")

FromRegistry = Callable[[str], MakeDrafter]


@pytest.mark.parametrize("mode", ["greedy", "greedy-stop", "top-p"])
def test_tokens_by_mode(from_registry: FromRegistry, combination: str, mode: str):
    totals = Totals()
    check_tokens(from_registry(combination), "auto", mode, 5, totals=totals)
    totals.check_not_vacuous()
    assert totals.longest_draft > 1


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_tokens_by_rule(from_registry: FromRegistry, combination: str, rule: str):
    """Rows with a law and rows without in one batch; the other rules are among the slow tests."""
    if rule == "block" and makes_trees(from_registry(combination)):
        return  # refused, as it is for every drafter of trees
    check_tokens(from_registry(combination), rule, "top-k", 4)


def test_distribution(from_registry: FromRegistry, combination: str):
    """The choice of a source does not look at what it would draw."""
    assert 0.05 < check_distribution(from_registry(combination), "rejection", num_texts=1000) < 0.95


def test_interface(from_registry: FromRegistry, combination: str):
    """Upkeep goes to every source, asked or not."""
    check_interface(from_registry(combination))


@pytest.mark.slow
def test_the_whole_suite(from_registry: FromRegistry, combination: str):
    """As a user of the suite runs it, and every mode under rejection; two minutes each."""
    check_drafter(from_registry(combination))
    for mode in MODES:
        check_tokens(from_registry(combination), "rejection", mode, 7)
