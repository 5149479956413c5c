"""NG, BAT: what prompt lookup proposes, and rows with drafts of unequal lengths."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from foredraft import SamplingParams
from foredraft.drafters.ngram import NGramDrafter, NGramIndex
from foredraft.testing import RecordingDrafter, engine_for, reference, run

HISTORY = [1, 2, 3, 9, 5, 3, 8, 1, 2, 3]


@pytest.mark.parametrize(
    ("shortest", "longest", "expected"),
    [(1, 3, [9, 5]), (2, 2, [9, 5]), (1, 1, [8, 1]), (4, 5, []), (3, 3, [9, 5]), (1, 5, [9, 5])],
)
def test_o24_the_longest_suffix_wins(shortest: int, longest: int, expected: list[int]):
    """[1, 2, 3] stood at the beginning; 3 alone stood last before 8, and the most recent place counts."""
    index = NGramIndex(shortest, longest)
    index.extend(HISTORY)
    assert index.continuation(2) == expected
    grown = NGramIndex(shortest, longest)
    for length in range(1, len(HISTORY) + 1):
        grown.extend(HISTORY[:length])
        grown.continuation(2)
    assert grown.continuation(2) == expected


@pytest.mark.parametrize("history", [[], [1], [1, 2], [1, 2, 3]])
def test_o24_a_short_history_has_no_draft(history: list[int]):
    index = NGramIndex(2, 5)
    index.extend(history)
    assert index.continuation(4) == []


def test_o24_a_continuation_shorter_than_asked_is_proposed_as_it_is():
    index = NGramIndex(1, 3)
    index.extend([4, 5, 4])
    assert index.continuation(6) == [5, 4]


@pytest.mark.parametrize("history", [[1, 2, 3, 4], [7], [1, 2, 1, 3]])
def test_o24_a_suffix_never_finds_itself(history: list[int]):
    index = NGramIndex(1, 4)
    index.extend(history)
    assert index.continuation(3) == []


O33_PROMPTS = (
    [3, 4, 5, 6, 3, 4, 5, 6, 3],
    [11, 12, 13, 14, 15],
    [30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 60, 41],
)
GREEDY_30 = SamplingParams(temperature=0, max_tokens=30)


@pytest.fixture(scope="module")
def solo(tiny: Any) -> list[list[int]]:
    return [reference(tiny, prompt, GREEDY_30).token_ids for prompt in O33_PROMPTS]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_o33_a_row_of_a_ragged_batch_is_what_it_is_alone(tiny: Any, solo: list[list[int]], order: tuple[int, ...]):
    """The first step drafts 4, 0 and 1 or 2 tokens for the three rows, in any order of them."""
    recorder = RecordingDrafter(NGramDrafter(1, 4))
    engine = engine_for(tiny, recorder, num_speculative_tokens=4)
    sequences = run(engine, [O33_PROMPTS[i] for i in order], GREEDY_30)
    assert [s.output_token_ids for s in sequences] == [solo[i] for i in order]
    first = dict(zip(order, recorder.widths[0], strict=True))
    assert first[0] == 4
    assert first[1] == 0
    assert first[2] in (1, 2)


@pytest.mark.parametrize("lengths", [(30, 3, 12), (1, 30, 30), (7, 30, 2)], ids=str)
def test_o33_a_row_that_ends_early_does_not_change_the_others(
    tiny: Any, solo: list[list[int]], lengths: tuple[int, ...]
):
    engine = engine_for(tiny, NGramDrafter(1, 4), num_speculative_tokens=4)
    params = [SamplingParams(temperature=0, max_tokens=n) for n in lengths]
    sequences = run(engine, O33_PROMPTS, params)
    assert [s.output_token_ids for s in sequences] == [out[:n] for out, n in zip(solo, lengths, strict=True)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_o33_batches_of_every_size(tiny: Any, solo: list[list[int]], size: int):
    """Copies of the rows, so that equal prompts in one batch are kept apart too."""
    engine = engine_for(tiny, NGramDrafter(1, 4), num_speculative_tokens=4)
    chosen = [i % 3 for i in range(size)]
    sequences = run(engine, [O33_PROMPTS[i] for i in chosen], GREEDY_30)
    assert [s.output_token_ids for s in sequences] == [solo[i] for i in chosen]
