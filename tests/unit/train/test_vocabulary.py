"""Which tokens can be drafted."""

from __future__ import annotations

import torch

from foredraft.train.vocabulary import default_size, draft_vocabulary


def test_the_most_frequent_and_those_that_must_be_there():
    counts = torch.tensor([0, 5, 0, 9, 1, 9, 0, 2])
    assert draft_vocabulary(counts, 4, ()).tolist() == [1, 3, 5, 7]
    assert draft_vocabulary(counts, 4, (6,)).tolist() == [1, 3, 5, 6]
    assert draft_vocabulary(counts, 7, (6,)).tolist() == [0, 1, 3, 4, 5, 6, 7]  # of those never seen the lowest id
    assert draft_vocabulary(counts, 99, ()).tolist() == list(range(8))


def test_the_default_makes_a_small_head_fit_16_megabytes():
    """SmolLM2-135M: a layer over twice 576, of 9 and 3 heads of 64, an MLP of 1536, fc over three layers."""
    body = 3 * 576 * 576 + 2 * 576 * (576 + 2 * 192) + 576 * 576 + 3 * 576 * 1536 + 5 * 576
    size = default_size(body, 576, 49152)
    assert size >= 4096
    assert 15.8e6 < 2 * (body + 576 * size) + 8 * size + 49152 <= 16e6
    assert default_size(4 * 576 * 577, 576, 49152, num_projections=4) == 4096  # four Medusa heads are larger
    assert default_size(60_000_000, 2048, 128_256) == 32_000
    assert default_size(60_000, 64, 300) == 300
