"""Typical acceptance: the threshold by hand."""

from __future__ import annotations

import math

import torch

from foredraft.verify import typical


def test_threshold_by_hand() -> None:
    """A sharp row is capped by epsilon = 0.09, a flat one accepts less likely tokens: delta exp(-H)."""
    sharp = [0.90, 0.08, 0.01, 0.01]
    flat = [0.25, 0.25, 0.25, 0.25]
    target = torch.tensor([[sharp, flat, flat]] * 3, dtype=torch.float64)
    entropy = -sum(p * math.log(p) for p in sharp)
    assert 0.3 * math.exp(-entropy) > 0.09
    assert 0.3 * math.exp(-math.log(4)) < 0.09
    ids = torch.tensor([[0, 3], [1, 3], [0, -1]])
    accept = typical.accept_probs(ids, torch.tensor([2, 2, 1]), target, 0.09, 0.3)
    assert accept.tolist() == [[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]]
    # With a smaller epsilon the token of probability 0.08 becomes typical.
    assert typical.accept_probs(ids, torch.tensor([2, 2, 1]), target, 0.07, 0.3)[1, 0] == 1.0


def test_the_more_undecided_the_target_the_lower_the_threshold() -> None:
    """Without the cap: delta exp(-H) is 0.5 / 4 for four equal tokens and nearly 0.5 for a sharp row."""
    target = torch.tensor([[[0.25, 0.25, 0.25, 0.25]] * 2, [[0.97, 0.01, 0.01, 0.01]] * 2], dtype=torch.float64)
    accept = typical.accept_probs(torch.tensor([[0], [1]]), torch.tensor([1, 1]), target, 1.0, 0.5)
    assert accept.tolist() == [[1.0], [0.0]]
    accept = typical.accept_probs(torch.tensor([[0], [0]]), torch.tensor([1, 1]), target, 1.0, 1.01)
    assert accept.tolist() == [[0.0], [1.0]]


def test_next_token_is_always_the_targets_row() -> None:
    target = torch.rand(2, 3, 4)
    assert torch.equal(typical.next_token_probs(target, torch.tensor([0, 2])), target[[0, 1], [0, 2]])
