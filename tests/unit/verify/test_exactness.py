"""The distribution-exact rules return the target's joint law: enumeration over a vocabulary of 3, float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foredraft.verify import match

from .enumeration import (
    BLOCK,
    REJECTION,
    Law,
    Rule,
    accumulate,
    all_drafts,
    emitted_law,
    joint,
    random_law,
    rows_of,
    total_variation,
    with_zeros,
)

VOCAB_SIZE = 3
NUM_PAIRS = 120
EXACT = 1e-12
RULES = {"rejection": REJECTION, "block": BLOCK}


def law_pairs(length: int) -> list[tuple[Law, Law]]:
    """Target (length + 1 tables) and draft (length tables): a third each dense, with zeros, disjoint."""
    generator = torch.Generator().manual_seed(1000 + length)
    pairs = []
    for index in range(NUM_PAIRS):
        target_allowed = draft_allowed = None
        if index % 3 == 2:
            target_allowed = torch.ones(VOCAB_SIZE, dtype=torch.bool)
            target_allowed[index // 3 % VOCAB_SIZE] = False
            draft_allowed = ~target_allowed
            if index % 2:
                target_allowed, draft_allowed = draft_allowed, target_allowed
        target = random_law(generator, VOCAB_SIZE, length + 1, target_allowed)
        draft = random_law(generator, VOCAB_SIZE, length, draft_allowed)
        if index % 3 == 1:
            target, draft = with_zeros(generator, target), with_zeros(generator, draft)
        pairs.append((target, draft))
    return pairs


@pytest.mark.parametrize("num_padding", [0, 2])
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("name", RULES)
def test_drawn_drafts(name: str, length: int, num_padding: int) -> None:
    """Padding holds nan and token id -1, so anything read from it shows."""
    means = []
    for target, draft in law_pairs(length):
        law, mean_accepted = emitted_law(RULES[name], target, draft, joint(draft).flatten(), num_padding=num_padding)
        assert total_variation(law, joint(target)) <= EXACT
        means.append(mean_accepted)
    assert means[2::3] == [0.0] * (NUM_PAIRS // 3), "disjoint supports accept nothing"
    assert all(0.1 < mean < length - 1e-3 for mean in means[::3]), "dense pairs accept and reject"


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("name", RULES)
def test_deterministic_drafts(name: str, length: int) -> None:
    """Exact for each single draft, so for any deterministic drafter whatever it looks at."""
    drafts = all_drafts(VOCAB_SIZE, length)
    for index, (target, _) in enumerate(law_pairs(length)):
        chosen = range(len(drafts)) if index < 6 else [index % len(drafts)]
        for draft_index in chosen:
            weights = torch.zeros(len(drafts), dtype=torch.float64)
            weights[draft_index] = 1.0
            law, mean_accepted = emitted_law(RULES[name], target, None, weights, num_padding=index % 2)
            assert total_variation(law, joint(target)) <= EXACT
            expected = rows_of(target, drafts, length).gather(-1, drafts[..., None])[draft_index, :, 0]
            assert mean_accepted == pytest.approx(float(expected.cumprod(0).sum()), abs=1e-12)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("drawn", [True, False])
def test_sample_and_match(length: int, drawn: bool) -> None:
    """All drafts times all independent draws from the target's rows, judged by `count_matches`."""
    for index, (target, draft) in enumerate(law_pairs(length)):
        weights = joint(draft).flatten()
        if not drawn:
            weights = torch.zeros_like(weights)
            weights[index % len(weights)] = 1.0
        law, _ = match_law(target, weights, num_padding=index % 2)
        assert total_variation(law, joint(target)) <= EXACT


def match_law(target: Law, weights: Tensor, num_padding: int = 0) -> tuple[Tensor, float]:
    """As `emitted_law`, for sample-and-match: each row's target token is enumerated."""
    length = len(target) - 1
    drafts = all_drafts(VOCAB_SIZE, length)
    draws = all_drafts(VOCAB_SIZE, length + 1)
    pair_drafts = drafts.repeat_interleave(len(draws), dim=0)
    pair_draws = draws.repeat(len(drafts), 1)
    rows = rows_of(target, pair_drafts, length + 1)
    pair_weights = weights.repeat_interleave(len(draws))
    pair_weights = pair_weights * rows.gather(-1, pair_draws[..., None]).squeeze(-1).prod(dim=-1)
    counts = match.count_matches(
        torch.nn.functional.pad(pair_drafts, (0, num_padding), value=-1),
        torch.full((len(pair_drafts),), length),
        torch.nn.functional.pad(pair_draws, (0, num_padding), value=-1),
    )
    emissions = []
    for num_accepted in range(length + 1):
        emitted = torch.nn.functional.one_hot(pair_draws[:, num_accepted], VOCAB_SIZE).double()
        emissions.append((pair_weights * (counts == num_accepted), emitted))
    return accumulate(target, pair_drafts, emissions), float((pair_weights * counts).sum())


def stopping_after_low_confidence(draft: Law, keep_token: bool) -> Tensor:
    """Number of draft tokens if the first one of draft probability below 0.45 is the last, or is dropped."""
    drafts = all_drafts(VOCAB_SIZE, len(draft))
    confident = rows_of(draft, drafts, len(draft)).gather(-1, drafts[..., None]).squeeze(-1) >= 0.45
    run = confident.long().cumprod(dim=-1).sum(dim=-1)
    return (run + 1).clamp(max=len(draft)) if keep_token else run


@pytest.mark.parametrize("name", RULES)
def test_length_that_depends_on_earlier_tokens_is_exact(name: str) -> None:
    """Ragged drafts, 1 to 3 tokens in one batch: stop after the low-confidence token (methods.md 0.6)."""
    lengths_seen = set()
    for target, draft in law_pairs(3):
        num_draft_tokens = stopping_after_low_confidence(draft, keep_token=True)
        lengths_seen.update(num_draft_tokens.tolist())
        weights = joint(draft).flatten()
        law, _ = emitted_law(RULES[name], target, draft, weights, num_draft_tokens=num_draft_tokens)
        assert total_variation(law, joint(target)) <= EXACT
    assert lengths_seen == {1, 2, 3}


@pytest.mark.parametrize("name", RULES)
def test_dropping_the_token_after_seeing_it_is_convicted(name: str) -> None:
    """The same with the token itself dropped: biased, however well the rule works.

    Only where the first token is sometimes dropped and sometimes kept; a drafter that never drafts is exact.
    """
    distances = []
    for target, draft in law_pairs(3)[::3]:
        num_draft_tokens = stopping_after_low_confidence(draft, keep_token=False)
        weights = joint(draft).flatten()
        law, _ = emitted_law(RULES[name], target, draft, weights, num_draft_tokens=num_draft_tokens)
        if draft[0].min() < 0.45 <= draft[0].max():
            distances.append(total_variation(law, joint(target)))
    assert len(distances) > 20
    assert min(distances) > 0.01


def test_expected_number_accepted() -> None:
    """rejection: sum min(p, q). match: sum p q. block: never fewer than rejection, often more."""
    for target, draft in law_pairs(1):
        weights = joint(draft).flatten()
        overlap = float(torch.minimum(target[0], draft[0]).sum())
        assert emitted_law(REJECTION, target, draft, weights)[1] == pytest.approx(overlap, abs=1e-12)
        assert match_law(target, weights)[1] == pytest.approx(float((target[0] * draft[0]).sum()), abs=1e-12)
    gains = []
    for target, draft in law_pairs(3):
        weights = joint(draft).flatten()
        by_token = emitted_law(REJECTION, target, draft, weights)[1]
        gains.append(emitted_law(BLOCK, target, draft, weights)[1] - by_token)
        assert match_law(target, weights)[1] <= by_token + 1e-12
    assert min(gains) >= -1e-12
    assert max(gains) > 0.02


def test_a_small_excess_of_acceptance_is_convicted() -> None:
    """The enumerator finds 2 % too much acceptance, and says how far off the law is."""
    target, draft = law_pairs(2)[0]
    weights = joint(draft).flatten()

    def too_much(ids: Tensor, num: Tensor, target_probs: Tensor, draft_probs: Tensor | None) -> Tensor:
        assert draft_probs is not None
        return REJECTION.count_law(ids, num, target_probs, draft_probs / 1.02)

    law, _ = emitted_law(Rule(too_much, REJECTION.next_token_probs), target, draft, weights)
    assert 1e-4 < total_variation(law, joint(target)) < 0.02


@pytest.mark.parametrize("name", RULES)
def test_places_with_laws_of_their_own(name: str) -> None:
    """PARD and DFlash: a place's token is drawn from one law, whatever stands before it in the draft; and it is this
    law that the rule must be told, not one that knows the tokens before."""
    farthest = 0.0
    for target, draft in law_pairs(3)[::6]:
        alone = [table[(0,) * place].expand(table.shape) for place, table in enumerate(draft)]
        law, mean_accepted = emitted_law(RULES[name], target, alone, joint(alone).flatten())
        assert total_variation(law, joint(target)) <= EXACT
        assert 0.1 < mean_accepted < 3.0 - 1e-3
        wrong, _ = emitted_law(RULES[name], target, draft, joint(alone).flatten())
        farthest = max(farthest, total_variation(wrong, joint(target)))
    assert farthest > 0.05
