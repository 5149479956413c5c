"""Prompt lookup against a search written out, and its cost over a long text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.drafters import DraftRow, Offer
from foredraft.drafters.ngram import LONGEST_MATCH, NGramDrafter, NGramIndex, copy_probs
from foredraft.sampling import SamplingRow
from foredraft.types import SamplingParams

HISTORY = [1, 2, 3, 9, 5, 3, 8, 1, 2, 3]


def lookup(tokens, min_n, max_n, k):
    """The rule as it is documented, by plain search: the longest suffix; the latest place that fits, else the first."""
    for n in range(min(max_n, len(tokens) - 1), min_n - 1, -1):
        ends = [e for e in range(n, len(tokens)) if tokens[e - n : e] == tokens[-n:]]
        if ends:
            latest_fits = ends[-1] + k <= len(tokens)
            end = ends[-1] if latest_fits else ends[0]
            agreeing = [
                m for m in range(min(end, LONGEST_MATCH) + 1) if tokens[end - m : end] == tokens[len(tokens) - m :]
            ]
            return tokens[end : end + k], 0 if n == 1 and len(ends) > 1 else max(agreeing)
    return [], 0


def drafted(tokens, min_n, max_n, k):
    index = NGramIndex(min_n, max_n)
    index.extend(tokens)
    return index.continuation(k)[0]


def row(sequence_id, tokens, k):
    return DraftRow(sequence_id, tokens, k, 0, "greedy", lambda _: SamplingRow(SamplingParams(temperature=0)))


@pytest.mark.parametrize(
    ("min_n", "max_n", "draft"),
    [(1, 3, [9, 5]), (2, 2, [9, 5]), (1, 1, [8, 1]), (4, 5, []), (1, 2, [9, 5]), (3, 9, [9, 5])],
)
def test_the_longest_suffix_comes_first(min_n, max_n, draft):
    """[1, 2, 3] was followed by [9, 5]; the last 3 alone, most recently, by [8, 1]."""
    assert drafted(HISTORY, min_n, max_n, 2) == draft


def test_the_most_recent_place_with_a_full_continuation_wins():
    """Of three places of 7: the latest has two tokens after it, so four are taken from the earliest."""
    tokens = [7, 1, 2, 3, 4, 7, 5, 6, 8, 9, 7, 0, 7]
    assert drafted(tokens, 1, 1, 2) == [0, 7]
    assert drafted(tokens, 1, 1, 4) == [1, 2, 3, 4]


@pytest.mark.parametrize("tokens", [[], [5], [5, 6], [5, 6, 7, 8]])
def test_a_short_or_new_text_gives_no_draft(tokens):
    """Shorter than the window, or nothing seen twice: no draft, no error."""
    assert drafted(tokens, 1, 4, 3) == []


def test_a_suffix_never_finds_itself():
    """The only place of [8, 9] is the end of the text."""
    assert drafted([1, 2, 8, 9], 2, 2, 3) == []
    assert drafted([5, 5], 1, 4, 3) == [5]
    assert drafted([5, 5, 5], 2, 2, 3) == [5]


def test_a_continuation_that_is_too_short_is_given_as_it_is():
    """Four wanted, two there."""
    assert drafted([1, 2, 9, 1], 1, 1, 4) == [2, 9, 1]


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), max_size=40),
    cuts=st.lists(st.integers(1, 6), max_size=10),
    min_n=st.integers(1, 3),
    more=st.integers(0, 3),
    k=st.integers(1, 8),
)
def test_the_index_is_the_search(tokens, cuts, min_n, more, k):
    """Fed at once or in pieces, the draft is that of the plain search at every length."""
    index, at = NGramIndex(min_n, min_n + more), 0
    for cut in [*cuts, len(tokens)]:
        at = min(at + cut, len(tokens))
        index.extend(tokens[:at])
        assert index.continuation(k) == lookup(tokens[:at], min_n, min_n + more, k)


def test_a_draft_says_how_well_its_place_agrees():
    """Three tokens of the first text; one of the second, which stood at two places; nothing found in the third."""
    rows = [row(1, HISTORY, 3), row(2, [7, 1, 7, 2, 7], 2), row(3, [1, 2], 2)]
    drafter = NGramDrafter(1, 2)
    assert drafter.offers(rows) == [Offer(3, 3, is_free=True), Offer(2, 0, is_free=True), Offer(0, 0, is_free=True)]
    assert drafter.propose(rows).path_probs == [copy_probs(3, 3), copy_probs(0, 2), []]
    assert copy_probs(3, 2)[1] / copy_probs(3, 2)[0] == pytest.approx(copy_probs(4, 1)[0])
    assert copy_probs(3, 1) > copy_probs(2, 1) > copy_probs(1, 1) > copy_probs(0, 1)


def test_rows_are_kept_apart():
    """Two texts in one batch, one of them wanting nothing; a forgotten id starts anew."""
    drafter = NGramDrafter(1, 3)
    draft = drafter.propose([row(1, [4, 5, 4], 2), row(2, [6, 7, 6], 2), row(3, [4, 5, 4], 0)])
    assert draft.num_draft_tokens == [2, 2, 0]
    assert draft.token_ids.tolist() == [[5, 4], [7, 6], [0, 0]]
    assert draft.probs is None
    drafter.forget(1)
    assert drafter.propose([row(1, [7, 8], 2)]).num_draft_tokens == [0]
    drafter.forget(99)


def test_a_step_over_a_long_text_is_cheap():
    """100,000 tokens: after building, 20 steps of one token in 20 ms (a scan takes longer than one of them)."""
    tokens = [(i * i * 7 + i // 3) % 997 for i in range(100_000)]
    drafter = NGramDrafter(1, 4)
    drafter.propose([row(0, tokens, 8)])
    best = float("inf")
    for _ in range(3):  # the machine may be busy
        started = time.perf_counter()
        for i in range(20):
            tokens.append(i % 997)
            drafter.propose([row(0, tokens, 8)])
        best = min(best, time.perf_counter() - started)
    assert best < 0.02
