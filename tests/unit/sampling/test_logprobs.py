"""Log-probabilities and ranks by hand."""

from __future__ import annotations

import math

import pytest
import torch

from foredraft.sampling import top_logprobs

LOGITS = torch.tensor([[0.60, 0.25, 0.10, 0.05]]).log() + 3.0


def test_case_o28() -> None:
    """The two best with the emitted token among them: -0.5108 and -1.3863."""
    (mapping,) = top_logprobs(LOGITS, torch.tensor([0]), 2)
    assert list(mapping) == [0, 1]
    assert mapping[0].logprob == pytest.approx(-0.5108, abs=1e-4)
    assert mapping[1].logprob == pytest.approx(-1.3863, abs=1e-4)
    assert [entry.rank for entry in mapping.values()] == [1, 2]


def test_the_emitted_token_is_always_there() -> None:
    """Also below the best ones, and alone with num_top = 0; num_top may exceed the vocabulary."""
    (mapping,) = top_logprobs(LOGITS, torch.tensor([3]), 2)
    assert list(mapping) == [3, 0, 1]
    assert mapping[3].logprob == pytest.approx(math.log(0.05), abs=1e-6)
    assert mapping[3].rank == 4
    assert list(top_logprobs(LOGITS, torch.tensor([2]), 0)[0]) == [2]
    assert list(top_logprobs(LOGITS, torch.tensor([2]), 9)[0]) == [2, 0, 1, 3]


def test_tokens_that_tie_share_a_rank() -> None:
    (mapping,) = top_logprobs(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), torch.tensor([2]), 4)
    assert {token_id: entry.rank for token_id, entry in mapping.items()} == {2: 1, 1: 1, 0: 3, 3: 4}


def test_rows_are_independent_and_bf16_is_computed_in_float32() -> None:
    logits = torch.randn(5, 3001, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.tensor([0, 5, 9, 100, 3000])
    together = top_logprobs(logits, ids, 3)
    for row in range(5):
        assert top_logprobs(logits[row : row + 1], ids[row : row + 1], 3) == [together[row]]
    exact = logits.double().log_softmax(dim=-1)
    assert together[3][100].logprob == pytest.approx(exact[3, 100].item(), abs=1e-5)
