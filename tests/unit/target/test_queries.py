"""The queries of a prompt's end are the same however the prompt was fed."""

from __future__ import annotations

import pytest
import torch

from foredraft.target.layout import PassRow
from foredraft.target.queries import QueryLog
from foredraft.testing import target_for, tiny_model

PROMPT = [(7 * i + 3) % 64 for i in range(20)]


@pytest.fixture
def target():
    target = target_for(tiny_model(0))
    target.query_log = QueryLog(6)
    for key in range(3):
        target.slots.open(key)
    return target


def feed(target, key, *chunks, neighbour=None):
    at = 0
    for size in chunks:
        rows = [PassRow(key, PROMPT[at : at + size], 1)]
        if neighbour is not None:
            rows.insert(0, PassRow(neighbour, [5, 6], 2))
        target.forward(rows)
        target.slots.commit(key, size)
        at += size


def test_chunks_and_neighbours_change_nothing(target):
    """One pass, chunks of which the last is shorter than the window, and a neighbour with a draft before it."""
    feed(target, 0, 20)
    feed(target, 2, 9, 8, 2, 1, neighbour=1)
    whole, chunked = target.query_log.take(0), target.query_log.take(2)
    assert len(whole) == 2
    for ours, theirs in zip(chunked, whole, strict=True):
        assert ours.shape == (6, 4, 16)
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_draft_is_not_part_of_the_text(target):
    """Of a row with two tokens and two logits the second token is a draft."""
    target.forward([PassRow(0, [5, 6], 2)])
    assert len(target.query_log.take(0)[0]) == 1


def test_taken_once_and_forgotten(target):
    """After that nothing is noted until the sequence's number is free again."""
    feed(target, 0, 8)
    assert target.query_log.take(0) is not None
    feed(target, 0, 8)
    assert target.query_log.take(0) is None
    target.query_log.forget(0)
    assert not target.query_log._held
