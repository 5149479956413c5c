"""The table of expected speedups over acceptance rates and draft lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft import theory

SEED_ACCEPTANCE_RATES = (0.5, 0.6, 0.7, 0.8, 0.9)
SEED_DRAFT_LENS = (1, 2, 3, 4, 5, 6, 8)
SEED_DRAFT_COSTS = (0.05, 0.2)


@dataclass(frozen=True, slots=True)
class SpeedupRow:
    """One acceptance rate at one draft cost.

    Speedup by draft length, the best integer length up to a limit and its speedup, the optimum over real
    lengths, and the tokens per target pass that no length exceeds.
    """

    draft_cost: float
    acceptance_rate: float
    speedups: dict[int, float]
    best_num_draft_tokens: int
    best_speedup: float
    continuous_best: float
    saturation: float


def speedup_row(acceptance_rate: float, draft_cost: float, draft_lens: Sequence[int], *, limit: int) -> SpeedupRow:
    """Evaluate the formulas of :mod:`foredraft.theory` for one row."""
    best = theory.best_num_draft_tokens(acceptance_rate, draft_cost, limit=limit)
    return SpeedupRow(
        draft_cost=draft_cost,
        acceptance_rate=acceptance_rate,
        speedups={k: theory.speedup(acceptance_rate, k, draft_cost) for k in draft_lens},
        best_num_draft_tokens=best,
        best_speedup=theory.speedup(acceptance_rate, best, draft_cost),
        continuous_best=theory.continuous_best_num_draft_tokens(acceptance_rate, draft_cost),
        saturation=theory.saturation(acceptance_rate),
    )
