"""The whole step with the real draws: uniforms on a midpoint grid, so that the counts must come out exactly.

Probabilities are multiples of 1 / grid, so a grid of midpoints stays clear of every boundary, and the
frequencies are exact whole numbers, not estimates.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from foredraft.sampling import sample_inverse_cdf
from foredraft.verify import block, rejection


def midpoints(size: int) -> list[float]:
    return [(i + 0.5) / size for i in range(size)]


def test_inverse_cdf_counts() -> None:
    probs = torch.tensor([0.30, 0.0, 0.55, 0.15, 0.0])
    drawn = sample_inverse_cdf(probs.expand(20, -1), torch.tensor(midpoints(20), dtype=torch.float64))
    assert drawn.bincount(minlength=5).tolist() == [6, 0, 11, 3, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_block", [False, True])
def test_one_draft_token(dtype: torch.dtype, is_block: bool) -> None:
    """target (.5, .3, .1, .1), draft (.1, .2, .2, .5): ratios 1, 1, 1/2, 1/5; residual (.8, .2, 0, 0).

    Grids: draft 10, acceptance 10, residual and bonus 10: 1000 runs. Bonus row (0, 0, .4, .6).
    """
    target = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.0, 0.0, 0.4, 0.6]], dtype=dtype)
    draft = torch.tensor([0.1, 0.2, 0.2, 0.5], dtype=dtype)
    grid = torch.tensor(list(itertools.product(midpoints(10), repeat=3)), dtype=torch.float64)
    num_rows = len(grid)
    ids = sample_inverse_cdf(draft.expand(num_rows, -1), grid[:, 0])[:, None]
    inputs = (
        ids,
        torch.ones(num_rows, dtype=torch.int64),
        target.expand(num_rows, -1, -1),
        draft.expand(num_rows, 1, -1),
    )
    rule = block if is_block else rejection
    probs = block.stop_probs(*inputs) if is_block else rejection.accept_probs(*inputs)
    counts = rule.count_accepted(probs, grid[:, 1:2])
    next_ids = sample_inverse_cdf(rule.next_token_probs(*inputs, counts), grid[:, 2])
    first = torch.where(counts == 1, ids[:, 0], next_ids)
    assert first.bincount(minlength=4).tolist() == [500, 300, 100, 100]
    assert int(counts.sum()) == 500
    assert next_ids[counts == 1].bincount(minlength=4).tolist() == [0, 0, 200, 300]
    assert next_ids[counts == 0].bincount(minlength=4).tolist() == [400, 100, 0, 0]


def test_two_draft_tokens_in_a_block() -> None:
    """Block verification of two equal positions: the law of the first token, exactly.

    target (3/4, 1/4), draft (1/4, 3/4), so all P, R and h are fractions of small numbers.
    """
    target = torch.tensor([0.75, 0.25], dtype=torch.float64)
    draft = torch.tensor([0.25, 0.75], dtype=torch.float64)
    # h_1 is 1 after token 0 and 0 after token 1 (R_1 = 0); h_2 is 1, 1/3 or 1/9: a grid of 9.
    grid = torch.tensor(
        list(itertools.product(midpoints(4), midpoints(4), midpoints(4), midpoints(9), midpoints(4))),
        dtype=torch.float64,
    )
    num_rows = len(grid)
    ids = torch.stack([sample_inverse_cdf(draft.expand(num_rows, -1), grid[:, i]) for i in (0, 1)], dim=1)
    inputs = (
        ids,
        torch.full((num_rows,), 2),
        target.expand(num_rows, 3, -1),
        draft.expand(num_rows, 2, -1),
    )
    stop = block.stop_probs(*inputs)
    counts = block.count_accepted(stop, torch.cat([grid[:, 2:3], grid[:, 3:4]], dim=1))
    next_ids = sample_inverse_cdf(block.next_token_probs(*inputs, counts), grid[:, 4])
    assert set(counts.tolist()) == {0, 1, 2}
    assert first_tokens(ids, counts, next_ids).bincount().tolist() == [num_rows * 3 // 4, num_rows // 4]


def first_tokens(ids: Tensor, counts: Tensor, next_ids: Tensor) -> Tensor:
    return torch.where(counts >= 1, ids[:, 0], next_ids)
