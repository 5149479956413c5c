"""Draft models of another vocabulary go through the suite like any other drafter.

The target's 64 tokens are 64 characters. The draft model is the suite's own with its ids in another order; for ``tli``
it knows some characters that the target does not know, and the other way round.
"""

from __future__ import annotations

import copy
import string
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from foredraft.config import HETEROGENEOUS_VOCAB_METHODS
from foredraft.drafters import Drafter
from foredraft.drafters.other_vocabulary import SharedVocabularyDrafter, TextAlignmentDrafter
from foredraft.drafters.token_text import TokenText
from foredraft.target.forward import TargetModel
from foredraft.testing import (
    LOSSLESS_RULES,
    MODES,
    MakeDrafter,
    Totals,
    check_distribution,
    check_interface,
    check_tokens,
    target_for,
)

CHARACTERS = string.ascii_letters + string.digits + "+-"
ORDER = [(7 * index + 5) % 64 for index in range(64)]
"""Id i of the draft model is the character ORDER[i]."""
NOT_SHARED = {2: "ä", 33: "ö", 50: "ü"}
"""What the draft model has in place of these of the target's characters."""
MAIN_MODES = ("greedy", "temperature", "top-p")
SOME_MODES = [mode if mode in MAIN_MODES else pytest.param(mode, marks=pytest.mark.slow) for mode in MODES]
"""Penalties and other filters act on the target's rows, and on drafts as in `test_registry`."""
RULES = [rule for rule in LOSSLESS_RULES if rule != "auto"]
FromTokenizer = Callable[[Sequence[str]], Any]


@pytest.fixture
def for_method(character_tokenizer: FromTokenizer) -> Callable[[str], MakeDrafter]:
    kinds = {"tli": SharedVocabularyDrafter, "slem": TextAlignmentDrafter}

    def make(method: str) -> MakeDrafter:
        def build(target: TargetModel, draft_model: Any) -> Drafter:
            model = copy.deepcopy(draft_model)
            for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
                weight.data = weight[torch.tensor(ORDER)]
            spelled = NOT_SHARED if method == "tli" else {}
            draft_characters = [spelled.get(index, CHARACTERS[index]) for index in ORDER]
            texts = [
                TokenText(character_tokenizer(characters), 64, name)
                for characters, name in ((CHARACTERS, "target"), (draft_characters, "draft"))
            ]
            return kinds[method](target_for(model), *texts)

        return build

    return make


@pytest.mark.parametrize("mode", SOME_MODES)
@pytest.mark.parametrize("method", HETEROGENEOUS_VOCAB_METHODS)
def test_tokens(for_method: Callable[[str], MakeDrafter], method: str, mode: str):
    totals = Totals()
    check_tokens(for_method(method), "auto", mode, 4, totals=totals)
    totals.check_not_vacuous()
    assert totals.longest_draft == 4


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", HETEROGENEOUS_VOCAB_METHODS)
def test_every_rule(for_method: Callable[[str], MakeDrafter], method: str, rule: str):
    totals = Totals()
    check_tokens(for_method(method), rule, "top-k", 4, totals=totals)
    totals.check_not_vacuous()


@pytest.mark.parametrize("num_draft_tokens", [1, 8])
@pytest.mark.parametrize("method", HETEROGENEOUS_VOCAB_METHODS)
def test_greedy_at_other_draft_lengths(for_method: Callable[[str], MakeDrafter], method: str, num_draft_tokens: int):
    totals = Totals()
    check_tokens(for_method(method), "auto", "greedy", num_draft_tokens, totals=totals)
    totals.check_not_vacuous()
    assert totals.longest_draft == num_draft_tokens


@pytest.mark.parametrize("method", HETEROGENEOUS_VOCAB_METHODS)
def test_interface(for_method: Callable[[str], MakeDrafter], method: str):
    check_interface(for_method(method))


@pytest.mark.parametrize(("method", "rule"), [("tli", "rejection"), ("slem", "coupled")])
def test_distribution(for_method: Callable[[str], MakeDrafter], method: str, rule: str):
    """4,000 tokens; under ``tli`` the draft model has no word for the third of the language's three."""
    assert 0.05 < check_distribution(for_method(method), rule, num_texts=1000) < 0.95


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", HETEROGENEOUS_VOCAB_METHODS)
def test_distribution_under_every_rule(for_method: Callable[[str], MakeDrafter], method: str, rule: str):
    """Slow: eight times 20,000 tokens, to confirm what enumeration proves."""
    assert 0.05 < check_distribution(for_method(method), rule) < 0.95
