"""NG: prompt lookup tries the longest suffix first."""

from __future__ import annotations

import pytest

from foredraft.drafters.ngram import NGramIndex

HISTORY = [1, 2, 3, 9, 5, 3, 8, 1, 2, 3]


@pytest.mark.parametrize(
    ("shortest", "longest", "expected"),
    [(1, 3, [9, 5]), (2, 2, [9, 5]), (1, 1, [8, 1]), (4, 5, []), (3, 3, [9, 5]), (1, 5, [9, 5])],
)
def test_o24_the_longest_suffix_wins(shortest: int, longest: int, expected: list[int]):
    """[1, 2, 3] stood at the beginning; 3 alone stood last before 8, and the most recent place counts."""
    index = NGramIndex(shortest, longest)
    index.extend(HISTORY)
    assert index.continuation(2)[0] == expected
    grown = NGramIndex(shortest, longest)
    for length in range(1, len(HISTORY) + 1):
        grown.extend(HISTORY[:length])
        grown.continuation(2)
    assert grown.continuation(2)[0] == expected


@pytest.mark.parametrize("history", [[], [1], [1, 2], [1, 2, 3]])
def test_o24_a_short_history_has_no_draft(history: list[int]):
    index = NGramIndex(2, 5)
    index.extend(history)
    assert index.continuation(4)[0] == []


def test_o24_a_continuation_shorter_than_asked_is_proposed_as_it_is():
    index = NGramIndex(1, 3)
    index.extend([4, 5, 4])
    assert index.continuation(6)[0] == [5, 4]


@pytest.mark.parametrize("history", [[1, 2, 3, 4], [7], [1, 2, 1, 3]])
def test_o24_a_suffix_never_finds_itself(history: list[int]):
    index = NGramIndex(1, 4)
    index.extend(history)
    assert index.continuation(3)[0] == []
