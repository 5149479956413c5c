"""Every label is in one window, every window in one batch of an epoch, and padding brings in nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foredraft.train.batches import BatchOrder, Window, collate, windows_of
from foredraft.train.dataset import StoreMeta, Text, TextStore

LAYERS = (2, 5, -1)


@pytest.mark.parametrize(("prompt", "length"), [(1, 7), (3, 8), (3, 9), (10, 40), (30, 33), (8, 8), (100, 101)])
def test_each_label_is_in_one_window_with_context(prompt: int, length: int):
    windows = windows_of(5, prompt, length, 8)
    assert [place for w in windows for place in range(w.first_label, w.end)] == list(range(prompt, length))
    for window in windows:
        assert window.num_tokens <= 8
        assert window.first_label - window.start >= min(4, window.first_label)


def test_an_epoch_has_each_window_once_and_no_batch_is_too_large():
    windows = [Window(i, 0, 5 + i % 13, 2) for i in range(150)]
    order = BatchOrder(windows, 40, seed=3)
    seen: list[Window] = []
    update = 0
    while len(seen) < 300:
        batch = order(update)
        assert len(batch) * max(w.num_tokens for w in batch) <= 40
        seen += batch
        update += 1
    assert sorted(w.text for w in seen[:150]) == sorted(w.text for w in seen[150:]) == list(range(150))
    assert seen[:150] != seen[150:]


def test_the_order_follows_from_seed_and_number():
    windows = [Window(i, 0, 5 + i % 7, 2) for i in range(90)]
    one, other = BatchOrder(windows, 30, seed=1), BatchOrder(windows, 30, seed=1)
    assert one(40) == other(40)
    assert [one(i) for i in range(40)] == [other(i) for i in range(40)]
    assert [BatchOrder(windows, 30, seed=2)(i) for i in range(9)] != [one(i) for i in range(9)]


def test_a_window_longer_than_a_batch_is_one():
    assert BatchOrder([Window(0, 0, 50, 2)], 40, seed=0)(3) == [Window(0, 0, 50, 2)]


def test_collated(tmp_path: Path):
    """States and labels of a window are those of its tokens; the state of the last one is not known."""
    store = TextStore(tmp_path, StoreMeta("m", "f", LAYERS, 4, 99))
    texts = [Text(torch.arange(n) + 10 * n, 3, torch.randn(n - 1, 12).bfloat16()) for n in (6, 9)]
    store.append(texts)
    batch = collate(store, [Window(0, 0, 6, 3), Window(1, 4, 9, 6)])
    assert batch.token_ids.tolist() == [[60, 61, 62, 63, 64, 65], [94, 95, 96, 97, 98, 0]]
    assert batch.is_label.int().tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 0]]
    assert torch.equal(batch.states(*LAYERS)[0, :5], texts[0].features)
    assert torch.equal(batch.states(*LAYERS)[1, :4], texts[1].features[4:8])
    assert not batch.features[0, 5].any()
    assert not batch.features[1, 4:].any()
    assert torch.equal(batch.states(-1, 2)[0, 0], torch.cat([texts[0].features[0, 8:], texts[0].features[0, :4]]))
    rows, places = batch.places(first=4)
    assert list(zip(rows.tolist(), places.tolist(), strict=True)) == [(0, 4), (0, 5), (1, 4)]
