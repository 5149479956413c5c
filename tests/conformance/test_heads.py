"""Draft heads as chain, tree and mixed with another source: a choice of the suite, which is slow as a whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from foredraft.testing import MakeDrafter, Totals, check_distribution, check_interface, check_tokens

pytestmark = pytest.mark.filterwarnings("ignore:no tokenizer to compare draft model")

FromRegistry = Callable[[str], MakeDrafter]


@pytest.mark.parametrize(("rule", "mode"), [("auto", "greedy"), ("auto", "top-p"), ("rejection", "temperature")])
def test_tokens(from_registry: FromRegistry, headed: str, rule: str, mode: str):
    totals = Totals()
    check_tokens(from_registry(headed), rule, mode, 4, totals=totals)
    totals.check_not_vacuous()
    assert totals.longest_draft > 1


def test_interface(from_registry: FromRegistry, headed: str):
    check_interface(from_registry(headed))


def test_distribution(from_registry: FromRegistry, headed: str):
    assert 0.01 < check_distribution(from_registry(headed), "rejection", num_texts=500) < 0.95
