"""Estimates of acceptance: by position, routes as the start, old counts fading, drafts that come back short, trees."""

from __future__ import annotations

import random

import numpy as np
import pytest

from foredraft.policy import PlanRow, RowOutcome
from foredraft.policy.acceptance import FIRST_FOUND, FIRST_RATE, AcceptanceBook
from foredraft.theory import expected_tokens_by_position


def chain(sequence_id: int, drafted: int, accepted: int, *, planned: int | None = None, route: str = "a") -> RowOutcome:
    return RowOutcome(sequence_id, route, drafted if planned is None else planned, drafted, range(accepted))


def test_nothing_known_is_worth_a_try():
    found = FIRST_FOUND ** np.arange(1, 4)
    assert AcceptanceBook().survival(1, "a", 3) == pytest.approx(np.minimum(found, FIRST_RATE ** np.arange(1, 4)))


def test_positions_are_told_apart():
    """The first two are always accepted and the third never: the fourth was never reached."""
    book = AcceptanceBook()
    for _ in range(60):
        book.observe([chain(1, 4, 2)])
    first, second, third, fourth = book.survival(1, "a", 4)
    assert first > 0.95
    assert second > 0.9
    assert third < 0.1
    assert fourth <= third
    assert expected_tokens_by_position([first, second]) == pytest.approx(1 + first + second)


def test_survival_falls():
    book = AcceptanceBook()
    for i in range(50):
        book.observe([chain(1, 6, i * 7 % 7)])
    survival = book.survival(1, "a", 20)
    assert survival == sorted(survival, reverse=True)


def test_a_sequence_moves_away_from_its_route():
    book = AcceptanceBook()
    for _ in range(100):
        book.observe([chain(1, 2, 0)])
    for _ in range(20):
        book.observe([chain(2, 2, 2)])
    assert book.survival(2, "a", 1)[0] > 0.5
    assert book.survival(3, "a", 1)[0] < 0.4
    book.forget(2)
    assert book.survival(2, "a", 1)[0] < 0.4


def test_a_step_without_a_plan_tells_nothing_but_makes_old():
    """What a sequence has shown fades towards its route while it gets no drafts."""
    book = AcceptanceBook()
    book.observe([chain(1, 0, 0)])
    assert book.survival(1, "a", 1) == AcceptanceBook().survival(1, "a", 1)
    for _ in range(30):
        book.observe([chain(1, 2, 0), chain(2, 2, 2)])
    low = book.survival(1, "a", 1)[0]
    for _ in range(200):
        book.observe([chain(1, 0, 0, planned=0)])
    assert low < 0.3 < book.survival(1, "a", 1)[0]


def test_a_draft_that_comes_back_empty_counts_as_no_gain_and_no_cost():
    """A match every third step, then four tokens, all accepted: a third of each is expected, at a third of the cost."""
    book = AcceptanceBook()
    for i in range(300):
        book.observe([chain(1, 0 if i % 3 else 4, 0 if i % 3 else 4, planned=4)])
    (chances,), (found,) = book.expected([PlanRow(1, 4, 100, "a")])
    assert chances == pytest.approx([1 / 3] * 4, abs=0.06)
    assert found == pytest.approx([1 / 3] * 4, abs=0.06)
    assert all(chance <= there for chance, there in zip(chances, found, strict=True))


def test_a_copy_is_worth_what_copies_from_such_places_were():
    """A first token behind one agreeing token is never right and behind two always: known of the route, and of any
    place of the draft."""
    book = AcceptanceBook()
    for _ in range(40):
        book.observe([RowOutcome(1, "a", 3, 3, (), match_len=0), RowOutcome(2, "a", 3, 3, range(3), match_len=2)])
    (weak, sure, grown), _ = book.expected(
        [PlanRow(i, 2, 100, "a", match_len) for i, match_len in enumerate((0, 2, 3))]
    )
    assert weak[0] < 0.2
    assert min(sure) > 0.8
    assert min(grown) > 0.8
    most = [PlanRow(9, 64, 100, "a", 1000)]
    assert len(book.expected(most)[0][0]) == 64


def test_sources_of_a_combination_are_told_apart():
    """In the same sequence one source is always right and the other never."""
    book = AcceptanceBook()
    for _ in range(30):
        book.observe([RowOutcome(1, "a", 2, 2, range(2), source="ngram"), RowOutcome(1, "a", 2, 2, (), source="mtp")])
    for sequence_id in (1, 2):
        rows = [PlanRow(sequence_id, 2, 100, "a", source=source) for source in ("ngram", "mtp")]
        (right, wrong), _ = book.expected(rows)
        assert right[0] > 0.8
        assert wrong[0] < 0.3
    book.forget(1)


def test_nodes_of_a_tree_are_counted_each_for_itself():
    """The path goes through the nodes 0 and 3, or through 1 alone: a budget of 2 is worth 1, one of 4 is worth 1.5."""
    book = AcceptanceBook()
    for i in range(400):
        book.observe([RowOutcome(1, "a", 6, 6, (0, 3) if i % 2 else (1,), branches=True)])
    (chances,), _ = book.expected([PlanRow(1, 6, 100, "a", branches=True)])
    worth = np.cumsum(chances)
    assert worth[1] == pytest.approx(1.0, abs=0.1)
    assert worth[5] == pytest.approx(1.5, abs=0.15)


def test_chains_and_trees_of_one_sequence_are_counted_each_in_its_way():
    """Copies are right in full behind three agreeing tokens and never behind none; of each tree the second node is."""
    book = AcceptanceBook()
    for _ in range(60):
        copies = [RowOutcome(1, "a", 2, 2, range(2 * (n > 0)), n, "ngram", True) for n in (0, 3)]
        book.observe([*copies, RowOutcome(1, "a", 2, 2, (1,), source="mtp", branches=True)])
    rows = [PlanRow(1, 2, 100, "a", n, "ngram", True) for n in (0, 3)]
    (weak, sure, nodes), _ = book.expected([*rows, PlanRow(1, 2, 100, "a", source="mtp", branches=True)])
    assert weak[0] < 0.2
    assert min(sure) > 0.8
    assert nodes[0] < 0.2
    assert nodes[1] > 0.8


def test_many_sequences_come_and_go():
    """Nothing of a former one is left."""
    book, rng = AcceptanceBook(), random.Random(0)
    fresh = AcceptanceBook().survival(0, "unknown", 4)
    for generation in range(20):
        ids = range(50 * generation, 50 * (generation + 1))
        book.observe([chain(i, 4, rng.randrange(5)) for i in ids])
        for i in ids:
            book.forget(i)
    assert book.survival(10_000, "unknown", 4) == fresh
