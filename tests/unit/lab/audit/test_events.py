"""What the audit asks of a token: sets that a wrong rule favours, against simulations of the wrong rules."""

from __future__ import annotations

import numpy as np
import pytest

from foredraft.lab.audit.events import TokenTests, favoured_by_shared_noise, favoured_by_shared_number
from foredraft.lab.audit.law import TokenLaw
from foredraft.lab.audit.proposals import Proposal
from foredraft.types import SamplingParams

NUM_DRAWS = 200_000


def laws(seed: int) -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6)), rng


def check_favoured(favoured: np.ndarray, emitted: np.ndarray, target: np.ndarray) -> None:
    """Tokens whose share is off by more than 5 standard deviations (at most 0.0056) are on the right side."""
    shares = np.bincount(emitted, minlength=len(target)) / len(emitted)
    clear = np.abs(shares - target) > 0.0056
    is_favoured = np.isin(np.arange(len(target)), favoured)
    assert clear.any()
    assert (is_favoured[clear] == (shares > target)[clear]).all()


@pytest.mark.parametrize("seed", range(4))
def test_tokens_favoured_by_a_shared_random_number(seed: int) -> None:
    target, draft, rng = laws(seed)
    numbers = rng.random(NUM_DRAWS)
    drafted = np.minimum(np.searchsorted(np.cumsum(draft), numbers), 5)
    residual = np.maximum(target - draft, 0.0)
    recovered = np.minimum(np.searchsorted(np.cumsum(residual) / residual.sum(), numbers), 5)
    rejected = rng.random(NUM_DRAWS) >= (target / draft)[drafted]
    check_favoured(favoured_by_shared_number(target, draft), np.where(rejected, recovered, drafted), target)


@pytest.mark.parametrize("seed", range(4))
def test_tokens_favoured_by_shared_gumbel_noise(seed: int) -> None:
    target, draft, rng = laws(seed)
    clocks = rng.exponential(size=(NUM_DRAWS, 6))  # argmax of log p + Gumbel is argmin of clock / p
    drafted = (clocks / draft).argmin(axis=1)
    residual = np.maximum(target - draft, 1e-300)
    recovered = (clocks / residual).argmin(axis=1)
    rejected = rng.random(NUM_DRAWS) >= (target / draft)[drafted]
    check_favoured(favoured_by_shared_noise(target, draft), np.where(rejected, recovered, drafted), target)


def test_nothing_is_favoured_where_draft_and_target_agree() -> None:
    target, _, _ = laws(0)
    assert not len(favoured_by_shared_number(target, target))
    assert not len(favoured_by_shared_noise(target, target))


def test_each_question_has_the_expectation_and_variance_of_its_law() -> None:
    """Exact: over all tokens, weighted by the law, the differences sum to 0 and their squares to the variance."""
    target, draft, _ = laws(3)
    order = np.argsort(-draft)
    for proposal in (Proposal((2, 4)), Proposal((2,), order.astype(np.int32), draft[order].astype(np.float32))):
        means, squares, variances = {}, {}, {}
        for token, weight in enumerate(target):
            tests = TokenTests()
            law = TokenLaw(np.log(target), target, SamplingParams())
            tests.add_text([token], [law], [proposal], np.array([0.5]), 0.0, 0.0)
            for test in (tests.proposed, tests.favoured, tests.draft_best, tests.best, tests.logprob,
                         tests.shared_number, tests.shared_noise):  # fmt: skip
                means[test.name] = means.get(test.name, 0.0) + weight * test.total
                squares[test.name] = squares.get(test.name, 0.0) + weight * test.total**2
                variances[test.name] = test.variance
        assert means == pytest.approx(dict.fromkeys(means, 0.0), abs=1e-12)
        assert squares == pytest.approx(variances)
        assert max(variances.values()) > 0.1
