"""The outcomes of a position must not depend on the token drawn: checked on every shape of list, by enumeration."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foredraft.lab.audit.remote.cells import cells
from foredraft.lab.audit.remote.judge import copied_token
from foredraft.lab.audit.remote.logprobs import Position, positions
from foredraft.lab.audit.remote.scoring import total_variation

PROBS = {5: 0.3, 2: 0.2, 9: 0.2, 7: 0.1, 1: 0.1, 4: 0.06, 3: 0.04}
"""Token ids and probabilities, with ties, one of them at the edge of the list."""
NUM_TOP = 5


def listing(drawn: int, shape: str) -> Position:
    """What a server with ``NUM_TOP`` log-probabilities says when ``drawn`` is the token."""
    best = sorted(PROBS, key=lambda token: -PROBS[token])[:NUM_TOP]
    if shape == "with emitted":
        best = [drawn, *(token for token in best if token != drawn)]
    elif shape == "emitted for last":
        best = [drawn, *(token for token in best if token != drawn)][:NUM_TOP]
    return Position(drawn, "", math.log(PROBS[drawn]), {token: math.log(PROBS[token]) for token in best})


@pytest.mark.parametrize("shape", ["without emitted", "with emitted", "emitted for last"])
def test_outcomes_are_the_same_whatever_was_drawn_and_have_its_law(shape: str) -> None:
    total = np.zeros(4)
    for token, prob in PROBS.items():
        found = cells(listing(token, shape), NUM_TOP)
        assert found is not None
        assert found.keys == (5, 2, 9)
        np.testing.assert_allclose(found.probs, [0.3, 0.2, 0.2, 0.3], atol=1e-12)
        total[found.drawn] += prob
    np.testing.assert_allclose(total, [0.3, 0.2, 0.2, 0.3], atol=1e-12)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_before_temperature_only_the_choice_among_known_tokens_is_judged(temperature: float) -> None:
    powers = np.array([PROBS[token] ** (1 / temperature) for token in (5, 2, 9)])
    for token in PROBS:
        found = cells(listing(token, "with emitted"), NUM_TOP, temperature)
        if token not in (5, 2, 9):
            assert found is None
        else:
            assert found is not None
            np.testing.assert_allclose(found.probs, [*(powers / powers.sum()), 0.0], atol=1e-12)


def test_a_place_whose_texts_cannot_be_told_apart_is_left_out() -> None:
    broken = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0, "\ufffd": -1.2, "b": -2.0}]}
    (position,) = positions({"logprobs": broken})
    assert position.ambiguous
    assert cells(position, 3) is None
    same = [{"token": "x", "logprob": -1.0}, {"token": "x", "logprob": -2.0}, {"token": "y", "logprob": -3.0}]
    (position,) = positions({"logprobs": {"content": [{"token": "x", "logprob": -1.0, "top_logprobs": same}]}})
    assert position.ambiguous


def test_three_shapes_of_the_same_answer_are_read_alike() -> None:
    tops = {11: -0.5, 12: -1.0}
    columns = {
        "tokens": ["token_id:12"],
        "token_logprobs": [-1.0],
        "top_logprobs": [{f"token_id:{token}": value for token, value in tops.items()}],
    }
    entries = [{"id": token, "token": "?", "logprob": value} for token, value in tops.items()]
    content = [{"id": 12, "token": "?", "logprob": -1.0, "top_logprobs": entries}]
    first, second = (positions({"logprobs": each})[0] for each in (columns, {"content": content}))
    assert (first.key, first.logprob, first.top) == (second.key, second.logprob, second.top) == (12, -1.0, tops)
    chat = [{"token": "é", "bytes": [195, 169], "logprob": -1.0, "top_logprobs": []}]
    (untold,) = positions({"logprobs": {"content": chat}})
    assert (untold.key, untold.logprob) == ("é".encode(), None)
    assert positions({"logprobs": None}) == ()


def test_the_difference_of_two_lists_is_that_of_their_common_tokens() -> None:
    one, other = {1: math.log(0.5), 2: math.log(0.3), 3: -5.0}, {1: math.log(0.4), 2: math.log(0.4), 9: -5.0}
    assert total_variation(one, other) == pytest.approx(0.1)


def test_copied_token_is_the_one_after_the_last_longest_match() -> None:
    assert copied_token([1, 2, 3, 1, 2, 4, 1, 2]) == 4
    assert copied_token([7, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2]) == 3
    assert copied_token([1, 2, 3]) is None
