"""Predicted outputs: following, losing the place after an edit, finding it again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.drafters import DraftRow
from foredraft.drafters.prediction import SURE_AFTER, PredictionCursor, PredictionDrafter
from foredraft.sampling import SamplingRow
from foredraft.types import SamplingParams

PREDICTION = [(i * i * 7 + 3 * i) % 101 for i in range(120)]


def row(tokens, k, prediction=()):
    params = SamplingParams(temperature=0)
    return DraftRow(0, list(tokens), k, 0, "greedy", lambda _: SamplingRow(params), prediction_token_ids=prediction)


def passes(prediction, answer, k):
    """Target passes that a greedy answer takes with a prediction."""
    cursor, text, count = PredictionCursor(prediction), [200, 201], 0
    prompt_len = len(text)
    while len(text) - prompt_len < len(answer):
        rest = answer[len(text) - prompt_len :]
        draft = cursor.continuation(k)
        right = 0
        while right < min(len(draft), len(rest)) and draft[right] == rest[right]:
            right += 1
        new = rest[: right + 1]
        text += new
        cursor.advance(text, len(new))
        count += 1
    return count


def test_an_answer_as_predicted_is_drafted_throughout():
    """120 tokens, 9 a pass."""
    assert passes(PREDICTION, PREDICTION, 8) == 14


@pytest.mark.parametrize(
    "answer",
    [
        [*PREDICTION[:50], 300, 301, 302, *PREDICTION[50:]],
        [*PREDICTION[:50], *PREDICTION[70:]],
        [*PREDICTION[:50], 300, *PREDICTION[51:]],
        [*PREDICTION[:50], *PREDICTION[45:50], *PREDICTION[50:]],
        [300, 301, *PREDICTION],
    ],
    ids=["put in", "left out", "replaced", "said twice", "begun otherwise"],
)
def test_after_an_edit_the_place_is_found_again(answer):
    """An edit costs the tokens that it puts in, and few passes more; drafting goes on to the end."""
    smooth = len(answer) // 9 + 1
    assert passes(PREDICTION, answer, 8) <= smooth + 7
    assert passes(PREDICTION, answer, 8) < len(answer) / 4


def test_the_nearest_place_behind_the_pointer_is_taken():
    """7 stands three times; the first one is left behind."""
    prediction = [7, 1, 2, 3, 4, 7, 5, 6, 7, 8]
    cursor = PredictionCursor(prediction)
    cursor.advance([7, 1, 2, 3], 4)
    cursor.advance([7, 1, 2, 3, 9], 1)
    assert cursor.continuation(3) == []
    cursor.advance([7, 1, 2, 3, 9, 7], 1)
    assert cursor.continuation(3) == [5, 6, 7]


def test_a_longer_match_goes_before_a_nearer_one():
    cursor = PredictionCursor([1, 2, 3, 4, 9, 5, 6, 8, 5, 7])
    cursor.advance([1, 2, 3, 4, 0, 8, 5], 7)
    assert cursor.continuation(2) == [7]


def test_a_wrong_guess_loses_nothing():
    """The answer says 5 in passing, as the prediction does much later; then it goes on where it was."""
    prediction = [*range(10, 20), 20, 21, 22, 23, 24, 25, 5, 26, 27]
    answer = [*range(10, 20), 5, 99, 20]
    cursor = PredictionCursor(prediction)
    cursor.advance(answer[:11], 11)
    assert cursor.continuation(2) == [26, 27]
    cursor.advance(answer[:12], 1)
    assert cursor.continuation(2) == []
    cursor.advance(answer, 1)
    assert cursor.continuation(2) == [21, 22]


def place_by_search(prediction, text, pointer):
    """Behind the longest match of the text's end that ends at or behind the pointer; of several the first."""
    best, found = 0, None
    for end in range(pointer + 1, len(prediction) + 1):
        n = 0
        while n < min(end, len(text)) and prediction[end - 1 - n] == text[-1 - n]:
            n += 1
        if n > best:
            best, found = n, end
    return best, found


@settings(max_examples=300, deadline=None)
@given(
    prediction=st.lists(st.integers(0, 2), min_size=1, max_size=25),
    answer=st.lists(st.integers(0, 3), min_size=1, max_size=25),
    cuts=st.lists(st.integers(1, 4), max_size=25),
)
def test_the_cursor_is_the_rule_written_out(prediction, answer, cuts):
    """Token by token or several at once: following as long as it goes, else the search."""
    pointer, following, agreeing = 0, 0, 0
    cursor, fed = PredictionCursor(prediction), 0
    for cut in [*cuts, len(answer)]:
        end = min(fed + cut, len(answer))
        for at in range(fed, end):
            if following is not None and following < len(prediction) and prediction[following] == answer[at]:
                following, agreeing = following + 1, agreeing + 1
            else:
                agreeing, following = place_by_search(prediction, answer[: at + 1], pointer)
            if following is not None and agreeing >= SURE_AFTER:
                pointer = following
        cursor.advance(answer[:end], end - fed)
        fed = end
        assert cursor.continuation(3) == ([] if following is None else prediction[following : following + 3])


def test_rows_without_a_prediction_get_no_draft():
    """Others do, as many tokens as are wanted; the drafter forgets with the request."""
    drafter = PredictionDrafter()
    assert drafter.propose([row([1, 2], 4)]).num_draft_tokens == [0]
    drafter.observe(0, [1, 2, 3])
    rows = [row([1, 2], 3, (5, 6, 7, 8)), replace(row([3], 0, (5, 6)), sequence_id=1)]
    draft = drafter.propose(rows)
    assert (draft.token_ids[0].tolist(), draft.num_draft_tokens) == ([5, 6, 7], [3, 0])
    drafter.observe(0, [1, 2, 5, 6, 9])
    assert drafter.propose([row([1, 2, 5, 6, 9], 3, (5, 6, 7, 8))]).num_draft_tokens == [0]
    drafter.forget(0)
    drafter.forget(1)
    assert drafter.propose([row([9], 2, (5, 6))]).token_ids.tolist() == [[5, 6]]
