"""Estimates of acceptance: survival by position, routes as the start, old counts fading."""

from __future__ import annotations

import pytest

from foredraft.policy.acceptance import FIRST_RATE, AcceptanceBook
from foredraft.theory import expected_tokens_by_position


def test_nothing_known_is_worth_a_try():
    assert AcceptanceBook().survival(1, "a", 3) == pytest.approx([FIRST_RATE, FIRST_RATE**2, FIRST_RATE**3])


def test_positions_are_told_apart():
    """The first two are always accepted and the third never: the fourth was never reached."""
    book = AcceptanceBook()
    for _ in range(60):
        book.observe(1, "a", 4, 2)
    first, second, third, fourth = book.survival(1, "a", 4)
    assert first > 0.95
    assert second > 0.9
    assert third < 0.1
    assert fourth <= third
    assert expected_tokens_by_position([first, second]) == pytest.approx(1 + first + second)


def test_survival_falls():
    book = AcceptanceBook()
    for i in range(50):
        book.observe(1, "a", 6, i * 7 % 7)
    survival = book.survival(1, "a", 20)
    assert survival == sorted(survival, reverse=True)


def test_a_sequence_moves_away_from_its_route():
    book = AcceptanceBook()
    for _ in range(100):
        book.observe(1, "a", 2, 0)
    for _ in range(20):
        book.observe(2, "a", 2, 2)
    assert book.survival(2, "a", 1)[0] > 0.5
    assert book.survival(3, "a", 1)[0] < 0.3
    book.forget(2)
    assert book.survival(2, "a", 1)[0] < 0.3


def test_an_empty_draft_tells_nothing():
    book = AcceptanceBook()
    book.observe(1, "a", 0, 0)
    assert book.survival(1, "a", 1) == [FIRST_RATE]
