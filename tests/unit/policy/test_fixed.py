"""The fixed policy: the same for all, within their limits."""

from __future__ import annotations

import pytest

from foredraft.policy import FixedPolicy, PlanRow


@pytest.mark.parametrize(
    ("k", "limits", "plan"),
    [(4, [99, 4, 3, 1, 0], [4, 4, 3, 1, 0]), (0, [99, 0], [0, 0]), (64, [64, 63, 2], [64, 63, 2]), (4, [], [])],
)
def test_as_many_as_the_limit_allows(k, limits, plan):
    rows = [PlanRow(i, limit, 10, "") for i, limit in enumerate(limits)]
    assert FixedPolicy(k).plan(rows, 0) == plan
