"""Block verification: its formulas by hand, and the count as the longest prefix that passes."""

from __future__ import annotations

import pytest
import torch

from foredraft.verify import block, rejection

IDS = torch.tensor([[0, 0]])
TARGET = torch.tensor([[[0.4, 0.6], [0.9, 0.1], [0.5, 0.5]]], dtype=torch.float64)
DRAFT = torch.tensor([[[0.8, 0.2], [0.3, 0.7]]], dtype=torch.float64)


def test_stop_probabilities_by_hand() -> None:
    """P = (0.5, min(0.5 * 3, 1)) = (0.5, 1). R_1 = max(.45 - .3, 0); h_1 = .15 / (.15 + .5); h_2 = P_2."""
    inputs = (IDS, torch.tensor([2]), TARGET, DRAFT)
    assert block.prefix_probs(*inputs)[0].tolist() == pytest.approx([0.5, 1.0])
    assert block.stop_probs(*inputs)[0].tolist() == pytest.approx([0.15 / 0.65, 1.0])
    assert rejection.accept_probs(*inputs)[0].tolist() == pytest.approx([0.5, 1.0])


def test_deterministic_by_hand() -> None:
    """R_1 = P_1 (1 - target(x_2)) = .4 * .1; h_1 = .04 / (.04 + .6)."""
    inputs = (IDS, torch.tensor([2]), TARGET, None)
    assert block.prefix_probs(*inputs)[0].tolist() == pytest.approx([0.4, 0.36])
    assert block.stop_probs(*inputs)[0].tolist() == pytest.approx([0.04 / 0.64, 0.36])


def test_last_draft_token_of_a_shorter_row() -> None:
    """With one token of two, h_1 is P_1 and not R_1's formula; the padding has no chance."""
    inputs = (IDS, torch.tensor([1]), TARGET, DRAFT)
    assert block.stop_probs(*inputs)[0].tolist() == pytest.approx([0.5, 0.0])


def test_a_longer_prefix_can_rescue_a_shorter_one() -> None:
    """Unlike a leading run: the first test fails, the second passes, both tokens stay."""
    stop = torch.tensor([[0.2, 0.9, 0.4], [0.2, 0.9, 0.4], [0.2, 0.9, 0.4]])
    uniforms = torch.tensor([[0.5, 0.5, 0.5], [0.1, 0.95, 0.5], [0.5, 0.95, 0.5]])
    assert block.count_accepted(stop, uniforms).tolist() == [2, 1, 0]


def test_residual_is_scaled_by_the_prefix() -> None:
    """After one token: norm(max(.5 * (.9, .1) - (.3, .7), 0)) = (1, 0); after none: norm((0, .4))."""
    inputs = (IDS, torch.tensor([2]), TARGET, DRAFT)
    assert block.next_token_probs(*inputs, torch.tensor([1]))[0].tolist() == pytest.approx([1.0, 0.0])
    assert block.next_token_probs(*inputs, torch.tensor([0]))[0].tolist() == pytest.approx([0.0, 1.0])
    assert block.next_token_probs(*inputs, torch.tensor([2]))[0].tolist() == [0.5, 0.5]


def test_equal_laws_accept_everything() -> None:
    """P = 1 and R = 0 at every place: 0 / 0 is 1, not nan."""
    inputs = (IDS, torch.tensor([2]), TARGET, TARGET[:, :2])
    assert block.stop_probs(*inputs)[0].tolist() == [1.0, 1.0]


def test_a_tiny_residual_is_not_lost_in_float32() -> None:
    """P_1 = 1 and R_1 = 3e-8: h_1 = R / (R + 0) = 1. Summed as (R + 1) - 1 it came out as 0.25 or 0 / 0."""
    shift = torch.tensor([3e-8, 0.0])
    draft = torch.tensor([[[0.5, 0.5], [0.25, 0.75]]])
    target = torch.stack([draft[0, 0], draft[0, 1] + shift, draft[0, 0]])[None]
    residual = (target[0, 1] - draft[0, 1]).clamp(min=0.0).sum()
    assert residual > 0
    assert (residual + 1.0) - 1.0 != residual
    assert block.stop_probs(IDS, torch.tensor([2]), target, draft)[0, 0] == 1.0
