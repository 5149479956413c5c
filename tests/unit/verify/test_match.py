"""Acceptance by equality: counts by hand, and coupled decoding against plain decoding token by token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from foredraft.sampling import Stream, gumbel, most_likely_tokens, sample_gumbel
from foredraft.verify.match import count_matches

from .enumeration import Law, random_law, rows_of

VOCAB_SIZE = 3
LENGTH = 7


def test_counts_the_leading_run() -> None:
    """A match behind the first mismatch, and one in the padding, do not count."""
    drafts = torch.tensor([[5, 6, 7], [5, 0, 7], [0, 6, 7], [5, 6, 7], [5, 6, -1]])
    targets = torch.tensor([[5, 6, 7, 8]] * 5)
    num_draft_tokens = torch.tensor([3, 3, 3, 0, 2])
    assert count_matches(drafts, num_draft_tokens, targets).tolist() == [3, 1, 0, 0, 2]


def test_width_zero() -> None:
    empty = torch.zeros(2, 0, dtype=torch.int64)
    assert count_matches(empty, torch.tensor([0, 0]), torch.tensor([[1], [2]])).tolist() == [0, 0]


def choose(probs_RV: Tensor, seed: int | None, first_position: int) -> Tensor:
    """Greedy without a seed; else the coupled draw at consecutive positions."""
    if seed is None:
        return most_likely_tokens(probs_RV)
    noise = [gumbel(seed, Stream.TARGET, first_position + i, VOCAB_SIZE) for i in range(len(probs_RV))]
    return sample_gumbel(probs_RV, noise)


def plain_decoding(law: Law, seed: int | None) -> list[int]:
    tokens: list[int] = []
    for position in range(LENGTH):
        tokens.append(int(choose(law[position][tuple(tokens)][None], seed, position)[0]))
    return tokens


def speculative_decoding(law: Law, seed: int | None, generator: torch.Generator) -> tuple[list[int], set[int]]:
    """Random drafts of random length up to 3; returns the tokens and the numbers accepted."""
    tokens: list[int] = []
    counts_seen = set()
    while len(tokens) < LENGTH:
        room = LENGTH - len(tokens) - 1
        length = min(int(torch.randint(0, 4, (), generator=generator)), room)
        draft = torch.randint(0, VOCAB_SIZE, (1, length), generator=generator)
        context = torch.cat([torch.tensor([tokens], dtype=torch.int64), draft], dim=1)
        rows = rows_of(law, context, len(tokens) + length + 1)[0, len(tokens) :]
        drawn = choose(rows, seed, len(tokens))[None]
        count = int(count_matches(draft, torch.tensor([length]), drawn)[0])
        counts_seen.add(count)
        tokens += drawn[0, : count + 1].tolist()
    return tokens, counts_seen


@pytest.mark.parametrize("is_greedy", [True, False])
def test_tokens_are_those_of_plain_decoding(is_greedy: bool) -> None:
    """Greedy and coupled, 150 runs each, whatever was drafted; 0 to 3 accepted tokens occurred."""
    generator = torch.Generator().manual_seed(5)
    counts_seen: set[int] = set()
    outputs = set()
    laws = [random_law(generator, VOCAB_SIZE, LENGTH) for _ in range(3)]
    for seed in range(150):
        law = laws[seed % 3]
        plain = plain_decoding(law, None if is_greedy else seed)
        tokens, counts = speculative_decoding(law, None if is_greedy else seed, generator)
        assert tokens == plain
        counts_seen |= counts
        outputs.add(tuple(plain))
    assert counts_seen == {0, 1, 2, 3}
    assert len(outputs) > (1 if is_greedy else 100)


def test_acceptance_of_coupled_drafts() -> None:
    """Equal noise: the exact agreement is sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), above (1-TV)/(1+TV).

    10,000 positions per pair. By Hoeffding the observed rate is off by more than 0.027 with a probability
    below 2 exp(-2 * 10,000 * 0.027^2) = 9.3e-7 per pair. With independent noise the rate is sum p q, far off.
    """
    num_positions, vocab_size, error = 10_000, 6, 0.027
    assert 2 * math.exp(-2 * num_positions * error**2) < 1e-6
    generator = torch.Generator().manual_seed(11)
    noise = torch.stack([gumbel(1, Stream.TARGET, i, vocab_size) for i in range(num_positions)])
    other_noise = torch.stack([gumbel(1, Stream.DRAFT, i, vocab_size) for i in range(num_positions)])
    for difference in (0.2, 0.5, 1.0):
        logits, change = torch.randn(2, vocab_size, generator=generator).double()
        target, draft = logits.softmax(-1), (logits + difference * change).softmax(-1)
        spread_target, spread_draft = target.expand(num_positions, -1), draft.expand(num_positions, -1)
        from_target = sample_gumbel(spread_target, noise)
        rate = (from_target == sample_gumbel(spread_draft, noise)).double().mean().item()
        ratios = torch.maximum(target[None] / target[:, None], draft[None] / draft[:, None])
        expected = (1.0 / ratios.sum(dim=-1)).sum().item()
        distance = 0.5 * (target - draft).abs().sum().item()
        assert expected >= (1 - distance) / (1 + distance) - 1e-12
        assert abs(rate - expected) < error
        assert rate > (1 - distance) / (1 + distance) - error
        independent = (from_target == sample_gumbel(spread_draft, other_noise)).double().mean().item()
        assert abs(independent - (target * draft).sum().item()) < error
        assert expected - independent > 3 * error
