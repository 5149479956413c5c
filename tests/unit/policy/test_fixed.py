"""The fixed policy: never more than there is room for, with one place left for the token that is always added."""

from __future__ import annotations

import pytest

from foredraft.policy import FixedPolicy


@pytest.mark.parametrize(
    ("k", "rooms", "plan"),
    [
        (4, [100, 5, 4, 2, 1], [4, 4, 3, 1, 0]),
        (0, [100, 1], [0, 0]),
        (64, [65, 64, 3], [64, 63, 2]),
        (4, [0], [0]),
        (4, [], []),
    ],
)
def test_the_draft_and_one_more_token_fit(k, rooms, plan):
    """Room for 5 takes a draft of 4; room for 1 takes none."""
    assert FixedPolicy(k).plan(rooms) == plan
