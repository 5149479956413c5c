"""Rules known to be wrong, or lossy on purpose, are far from the target: the enumerator can tell."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.verify import rejection, typical

from .enumeration import (
    REJECTION,
    Law,
    Rule,
    all_drafts,
    emitted_law,
    joint,
    leading_run_law,
    random_law,
    rows_of,
    total_variation,
)

VOCAB_SIZE = 3
NUM_PAIRS = 30


def pairs(length: int) -> list[tuple[Law, Law]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (random_law(generator, VOCAB_SIZE, length + 1), random_law(generator, VOCAB_SIZE, length))
        for _ in range(NUM_PAIRS)
    ]


def greedy_weights(draft: Law) -> Tensor:
    """All weight on the draft that is the argmax at each place."""
    drafts = all_drafts(VOCAB_SIZE, len(draft))
    is_argmax = rows_of(draft, drafts, len(draft)).argmax(dim=-1) == drafts
    return is_argmax.all(dim=-1).double()


def bonus_row_as_residual(
    draft_token_ids: Tensor,
    num_draft_tokens: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    n: Tensor,
) -> Tensor:
    return target_probs[torch.arange(len(n)), n]


def softmax_of_residual(
    draft_token_ids: Tensor,
    num_draft_tokens: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    n: Tensor,
) -> Tensor:
    """transformers#28508: softmax where a division by the sum belongs."""
    assert draft_probs is not None
    every_row = torch.arange(len(n))
    target = target_probs[every_row, n]
    drafted = draft_probs[every_row, n.clamp(max=draft_probs.shape[1] - 1)]
    wrong = (target - drafted).clamp(min=0.0).softmax(dim=-1)
    return torch.where((n < num_draft_tokens)[:, None], wrong, target)


def test_soft_ratio_for_a_greedy_draft() -> None:
    """The draft is an argmax, the ratio uses its softmax. Told as deterministic, the same draft is exact."""
    distances = []
    for target, draft in pairs(2):
        weights = greedy_weights(draft)
        assert weights.sum() == 1.0
        wrong, _ = emitted_law(REJECTION, target, draft, weights)
        distances.append(total_variation(wrong, joint(target)))
        right, _ = emitted_law(REJECTION, target, None, weights)
        assert total_variation(right, joint(target)) <= 1e-12
    assert min(distances) > 0.01


def test_residual_replaced_by_the_target() -> None:
    rule = Rule(REJECTION.count_law, bonus_row_as_residual)
    for target, draft in pairs(2):
        law, _ = emitted_law(rule, target, draft, joint(draft).flatten())
        assert total_variation(law, joint(target)) > 0.01


def test_residual_normalised_by_softmax() -> None:
    rule = Rule(REJECTION.count_law, softmax_of_residual)
    for target, draft in pairs(2):
        law, _ = emitted_law(rule, target, draft, joint(draft).flatten())
        assert total_variation(law, joint(target)) > 0.01


def test_softmax_fault_has_the_published_frequencies() -> None:
    """Case O09: p = (.50, .30, .15, .05), q = (.10, .20, .30, .40) gives (.262, .320, .259, .159)."""
    target = torch.tensor([0.50, 0.30, 0.15, 0.05], dtype=torch.float64)
    draft = torch.tensor([0.10, 0.20, 0.30, 0.40], dtype=torch.float64)
    laws = ([target, target.expand(4, 4)], [draft])
    wrong, _ = emitted_law(Rule(REJECTION.count_law, softmax_of_residual), *laws, weights=draft)
    published = torch.tensor([0.262, 0.320, 0.259, 0.159], dtype=torch.float64)
    right, mean_accepted = emitted_law(REJECTION, *laws, weights=draft)
    assert abs(mean_accepted - 0.5) < 1e-12
    assert (right.sum(dim=-1) - target).abs().max() < 1e-12
    assert total_variation(wrong.sum(dim=-1), target) > 0.1
    assert (wrong.sum(dim=-1) - published).abs().max() < 1e-3


def test_residual_of_case_o09() -> None:
    """After a rejection: (0.80, 0.20, 0, 0)."""
    target = torch.tensor([0.50, 0.30, 0.15, 0.05], dtype=torch.float64).expand(1, 2, 4)
    draft = torch.tensor([0.10, 0.20, 0.30, 0.40], dtype=torch.float64).expand(1, 1, 4)
    inputs = (torch.tensor([[3]]), torch.tensor([1]), target, draft)
    after_rejection = rejection.next_token_probs(*inputs, torch.tensor([0]))
    assert torch.allclose(after_rejection, torch.tensor([[0.8, 0.2, 0.0, 0.0]], dtype=torch.float64))


def test_typical_acceptance_is_lossy() -> None:
    """With Medusa's values the law moves by more than 0.01, for a higher acceptance than `rejection` has."""
    rule = Rule(
        lambda ids, num, target, draft: leading_run_law(typical.accept_probs(ids, num, target, 0.09, 0.3)),
        lambda ids, num, target, draft, n: typical.next_token_probs(target, n),
    )
    distances, gains = [], []
    for target, draft in pairs(2):
        weights = joint(draft).flatten()
        law, mean_accepted = emitted_law(rule, target, draft, weights)
        distances.append(total_variation(law, joint(target)))
        gains.append(mean_accepted - emitted_law(REJECTION, target, draft, weights)[1])
    assert min(distances) > 0.01
    assert sum(gains) > 0
