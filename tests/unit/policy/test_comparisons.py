"""The policies of the field that are there for comparison: what they say, step by step."""

from __future__ import annotations

import pytest

from foredraft.policy import HeuristicPolicy, PlanRow, Policy, RowOutcome, SpecDecPolicy, StepOutcome, TiersPolicy

from .simulation import Kind, simulate


def outcome(*rows: tuple[int, int, int]) -> StepOutcome:
    """Rows of (sequence, drafted, accepted)."""
    found = [RowOutcome(i, "", drafted, drafted, range(accepted)) for i, drafted, accepted in rows]
    return StepOutcome(found, len(rows), 0, 0, 0, 0.0, 0.01, 0.0, 0.0)


def lengths(policy: Policy, accepted: list[int | None], limit: int = 99) -> list[int]:
    """The lengths for one sequence; None accepts all."""
    found = []
    for count in accepted:
        (planned,) = policy.plan([PlanRow(0, limit, 10, "")], 0)
        found.append(planned)
        policy.observe(outcome((0, planned, planned if count is None else count)))
    return found


def test_heuristic_adds_two_or_takes_one_away():
    assert lengths(HeuristicPolicy(6), [0, 0, None, 1, None, None, None, 0]) == [6, 5, 4, 6, 5, 6, 6, 6]
    assert lengths(HeuristicPolicy(2), [0, 0, 0, None]) == [2, 1, 1, 1]


def test_heuristic_keeps_each_sequence_for_itself():
    policy = HeuristicPolicy(6)
    rows = [PlanRow(i, limit, 10, "") for i, limit in ((0, 99), (1, 99), (2, 3))]
    assert policy.plan(rows, 0) == [6, 6, 3]
    policy.observe(outcome((0, 6, 0), (1, 6, 6), (2, 0, 0)))
    assert policy.plan(rows, 0) == [5, 6, 3]
    policy.forget(0)
    assert policy.plan(rows, 0) == [6, 6, 3]


@pytest.mark.parametrize(("most", "tiers"), [(1, [1]), (2, [1, 2]), (3, [1, 3]), (5, [1, 3, 5]), (9, [1, 3, 7])])
def test_tiers_end_with_the_limit(most: int, tiers: list[int]):
    assert TiersPolicy(most).tiers == tiers


def test_tiers_follow_the_mean_accepted_length():
    """Up with full acceptance, down again without any; a change every five steps at most, after ten."""
    policy = TiersPolicy(7)
    up = lengths(policy, [None] * 40)
    assert up[:15] == [3] * 15
    assert up[-1] == 7
    down = lengths(policy, [0] * 40)
    assert down[-1] == 1
    assert set(down) == {7, 3, 1}
    assert lengths(policy, [None] * 3, limit=0) == [0, 0, 0]


def test_tiers_are_blind_to_the_load():
    """With 32 rows at acceptance 0.9 they draft as much as with one, and are slower than plain decoding."""
    one = simulate(TiersPolicy(7), [Kind(0.9)])
    many = simulate(TiersPolicy(7), [Kind(0.9)] * 32)
    assert one.plans[-1] == [7]
    assert many.plans[-1] == [7] * 32


@pytest.mark.parametrize(("alpha", "low", "high"), [(0.95, 5, 8), (0.7, 1, 3), (0.1, 1, 1)])
def test_specdec_ends_a_draft_where_a_rejection_gets_likely(alpha: float, low: int, high: int):
    """The chance that all of n tokens are accepted is alpha ** n: at 0.95 it is below 0.7 for n = 7."""
    plans = simulate(SpecDecPolicy(), [Kind(alpha)], steps=300).plans[150:]
    mean = sum(plan[0] for plan in plans) / len(plans)
    assert low <= mean <= high
