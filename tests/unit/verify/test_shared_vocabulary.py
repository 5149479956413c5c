"""Drafts from shared tokens leave the target's law as it is: enumeration with the probabilities that a drafter reports.

Target tokens a, b, c, d; draft tokens b, ab, a, x, c: a, b and c are shared. Every draft of two tokens is made by the
drafter itself, with real models of both vocabularies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from foredraft.drafters import DraftRow
from foredraft.drafters.other_vocabulary import SharedVocabularyDrafter
from foredraft.drafters.token_text import TokenText
from foredraft.sampling import SamplingRow
from foredraft.testing import last_logits, target_for, tiny_model
from foredraft.types import SamplingParams

from .enumeration import BLOCK, REJECTION, Law, emitted_law, joint, total_variation

RULES = {"rejection": REJECTION, "block": BLOCK}
LENGTH = 2
PROMPT = [0, 1, 3, 0]
"""abda: the draft model reads ab, a, for it has no d."""
SHARED = [0, 1, 2]
DRAFT_IDS = [2, 0, 4]
NUM_SEEDS = 60
TEMPERATURE = 4.0
"""So that every draft is made by one seed or another."""
FLOAT32 = 1e-6


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_model(1, vocab_size=4)


@pytest.fixture(scope="module")
def draft_model() -> Any:
    return tiny_model(2, vocab_size=5)


def draft_tokenizer() -> Any:
    tokenizer = Tokenizer(models.BPE({"b": 0, "ab": 1, "a": 2, "x": 3, "c": 4}, [("a", "b")]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def reported(draft_model: Any, character_tokenizer: Callable[[str], Any]) -> dict[tuple[int, ...], Tensor]:
    """By draft prefix, the probabilities over the target's ids that the drafter drew the next token from."""
    texts = TokenText(character_tokenizer("abcd"), 4, "target"), TokenText(draft_tokenizer(), 5, "draft")
    drafter = SharedVocabularyDrafter(target_for(draft_model), *texts)
    params = SamplingParams(temperature=TEMPERATURE)
    found: dict[tuple[int, ...], Tensor] = {}
    for seed in range(NUM_SEEDS):
        row = DraftRow(seed, PROMPT, LENGTH, seed, "rejection", lambda prefix: SamplingRow(params, draft_prefix=prefix))
        draft = drafter.propose([row])
        assert draft.probs is not None
        tokens = draft.token_ids[0].tolist()
        for place in range(LENGTH):
            probs = found.setdefault(tuple(tokens[:place]), draft.probs[0, place])
            assert torch.equal(probs, draft.probs[0, place]), "not a function of what stands before"
        drafter.forget(seed)
    return found


def own_logits(draft_model: Any, prefix: tuple[int, ...]) -> Tensor:
    """Of the draft model over its own five tokens, after ab, a and the drafted ones."""
    return last_logits(draft_model, [1, 2, *(DRAFT_IDS[token] for token in prefix)]) / TEMPERATURE


def draft_law(reported: dict[tuple[int, ...], Tensor]) -> Law:
    """As tables; after drafts that cannot be made anything may stand."""
    law = []
    for place in range(LENGTH):
        table = torch.full([4] * (place + 1), 0.25, dtype=torch.float64)
        for prefix in itertools.product(SHARED, repeat=place):
            table[prefix] = reported[prefix].double()
        law.append(table / table.sum(-1, keepdim=True))
    return law


def target_law(target: Any) -> Law:
    law = []
    for place in range(LENGTH + 1):
        table = torch.empty([4] * (place + 1), dtype=torch.float64)
        for prefix in itertools.product(range(4), repeat=place):
            table[prefix] = (last_logits(target, [*PROMPT, *prefix]).double() / TEMPERATURE).softmax(-1)
        law.append(table)
    return law


def test_the_law_is_that_of_the_draft_model_on_shared_tokens(reported: dict[tuple[int, ...], Tensor], draft_model: Any):
    """Restricted and renormalised, after the text in its own tokens; nothing on what is not shared."""
    assert set(reported) == {prefix for n in range(LENGTH) for prefix in itertools.product(SHARED, repeat=n)}
    for prefix, probs in reported.items():
        own = own_logits(draft_model, prefix)
        expected = own[DRAFT_IDS].softmax(-1)
        assert torch.allclose(probs[SHARED], expected, atol=1e-5)
        assert probs[3] == 0
        assert own.softmax(-1)[DRAFT_IDS].sum() < 0.99, "the draft model would have said something else"


@pytest.mark.parametrize("rule", RULES)
def test_the_emitted_law_is_the_targets(reported: dict[tuple[int, ...], Tensor], target: Any, rule: str):
    target_tables, draft_tables = target_law(target), draft_law(reported)
    law, accepted = emitted_law(RULES[rule], target_tables, draft_tables, joint(draft_tables).flatten())
    assert total_variation(law, joint(target_tables)) < FLOAT32
    assert 0.05 < accepted < LENGTH - 0.05


@pytest.mark.parametrize("rule", RULES)
def test_the_draft_models_own_probabilities_would_be_wrong(
    reported: dict[tuple[int, ...], Tensor], target: Any, draft_model: Any, rule: str
):
    """The ratio with what the draft model gave a token before the others were taken away."""
    told = []
    for place, table in enumerate(draft_law(reported)):
        unscaled = table.clone()
        for prefix in itertools.product(SHARED, repeat=place):
            unscaled[prefix][SHARED] = own_logits(draft_model, prefix).double().softmax(-1)[DRAFT_IDS]
        told.append(unscaled)
    target_tables, draft_tables = target_law(target), draft_law(reported)
    law, _ = emitted_law(RULES[rule], target_tables, told, joint(draft_tables).flatten())
    assert total_variation(law, joint(target_tables)) > 0.01
