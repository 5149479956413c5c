"""Suffix decoding against its definition written out, and the store of responses."""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.drafters import DraftRow, Offer
from foredraft.drafters.context_tree import ContextTree
from foredraft.drafters.response_store import ResponseStore
from foredraft.drafters.suffix import SuffixDrafter, SuffixRule, best_candidate, likeliest_tree
from foredraft.errors import InvalidOptionError
from foredraft.sampling import SamplingRow
from foredraft.types import SamplingParams

RULE = SuffixRule()


def row(sequence_id, tokens, k):
    return DraftRow(sequence_id, list(tokens), k, 0, "greedy", lambda _: SamplingRow(SamplingParams(temperature=0)))


def proposed(drafter, sequence_id, tokens, k):
    draft = drafter.propose([row(sequence_id, tokens, k)])
    return draft.token_ids[0, : draft.num_draft_tokens[0]].tolist()


def places(texts, context):
    """Where a context ends and something follows, as (text, index)."""
    n = len(context)
    return [(t, i) for t, text in enumerate(texts) for i in range(n, len(text)) if text[i - n : i] == context]


def path_after(texts, text, length, budget, depth, min_prob):
    """The likeliest path as it is defined, by search; of equally frequent tokens the one that came last."""
    tokens, probs, prob = [], [], 1.0
    where = places(texts, text[-length:])
    while where and len(tokens) < budget:
        following = [texts[t][i] for t, i in where]
        token = max(set(following), key=lambda x: (following.count(x), len(following) - following[::-1].index(x)))
        prob *= following.count(token) / len(following)
        if prob < min_prob:
            break
        tokens.append(token)
        probs.append(prob)
        length = min(length + 1, depth)
        if len(where) == 1:  # one place is followed to its end
            ((t, i),) = where
            where = [(t, i + 1)] if i + 1 < len(texts[t]) else []
        else:
            where = places(texts, (text + tokens)[-length:])
    return tokens, probs


def best_by_search(texts, text, k, depth, rule):
    """Every suffix gives a candidate; the highest score, then the longest suffix wins."""
    best = ([], [])
    for length in range(1, min(depth, len(text)) + 1):
        budget = min(k, int(length * rule.max_spec_factor + 1e-6))
        path = path_after(texts, text, length, budget, depth, rule.min_token_prob)
        if path[0] and sum(path[1]) >= sum(best[1]) - 1e-12:
            best = path
    return best


@settings(max_examples=400, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 2), max_size=16), min_size=1, max_size=4),
    depth=st.integers(1, 6),
    k=st.integers(1, 8),
    factor=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    min_prob=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
)
def test_the_candidate_is_that_of_the_definition(texts, depth, k, factor, min_prob):
    """Its tokens, the probabilities, and so the choice among suffixes; what is not followed up could not have won."""
    tree = ContextTree(depth)
    for text in texts:
        tree.begin_text()
        tree.extend(text)
    rule = SuffixRule(max_spec_factor=factor, min_token_prob=min_prob)
    found, match_len = best_candidate(tree, texts[-1], k, rule)
    tokens, probs = best_by_search(texts, texts[-1], k, depth, rule)
    assert found.expected_len == pytest.approx(sum(probs))
    if found.token_ids != tokens:  # another suffix with the same score
        candidates = [
            path_after(texts, texts[-1], n, min(k, int(n * factor + 1e-6)), depth, min_prob)
            for n in range(1, depth + 1)
        ]
        assert found.token_ids in [path for path, p in candidates if sum(p) == pytest.approx(sum(probs))]
    assert len(found.probs) == len(found.token_ids) <= k
    if found.token_ids:
        assert places(texts, texts[-1][-match_len:])
        assert len(found.token_ids) <= match_len * factor
    else:
        assert match_len == 0


def tree_after(texts, text, length, budget, depth, rule):
    """Of all paths the budget's most probable ones, by search: path -> probability."""
    found, frontier = {}, {(): 1.0}
    while frontier and len(found) < budget:
        path = max(frontier, key=frontier.__getitem__)
        prob = frontier.pop(path)
        if path:
            found[path] = prob
        if len(path) == rule.depth:
            continue
        where = places(texts, (text + list(path))[-min(depth, length + len(path)) :])
        following = Counter(texts[t][i] for t, i in where)
        for token, count in following.most_common(rule.width):
            if prob * count / following.total() >= rule.min_token_prob:
                frontier[*path, token] = prob * count / following.total()
    return found


@settings(max_examples=200, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 2), max_size=16), min_size=1, max_size=4),
    length=st.integers(1, 4),
    budget=st.integers(0, 9),
    width=st.integers(2, 3),
    path_len=st.sampled_from([None, 1, 3]),
)
def test_a_tree_has_the_most_probable_paths(texts, length, budget, width, path_len):
    """With a depth that nothing reaches, so that contexts are whole; ties may fall either way."""
    tree, text = ContextTree(50), texts[-1]
    for each in texts:
        tree.begin_text()
        tree.extend(each)
    rule = SuffixRule(min_token_prob=0.15, width=width, depth=path_len)
    if len(text) < length:
        return
    found = likeliest_tree(tree, text, length, budget, rule)
    expected = tree_after(texts, text, length, budget, 50, rule)
    if width == 3:  # all children: no ties among those left out
        assert sorted(found.probs) == pytest.approx(sorted(expected.values()))
    assert len(found.token_ids) <= budget
    for node, (parent, state) in enumerate(zip(found.parents, found.states, strict=True)):
        assert state.path[-1] == found.token_ids[node]
        assert state.path[:-1] == (found.states[parent].path if parent >= 0 else ())
        assert len(state.path) <= (path_len or 99)
        assert sum(other == parent for other in found.parents) <= width
    assert len({state.path for state in found.states}) == len(found.states)


def test_a_longer_match_drafts_more():
    """A suffix of n tokens gives n draft tokens, twice as many with a factor of 2."""
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    for factor, draft in ((1.0, [4, 5, 6]), (2.0, [4, 5, 6, 7, 8, 9]), (0.5, [4])):
        drafter = SuffixDrafter(8, SuffixRule(max_spec_factor=factor))
        assert proposed(drafter, 0, text, 8) == draft


def test_frequent_continuations_beat_recent_ones():
    """After 1 came 2 twice and then 3: n-gram lookup would say 3."""
    drafter = SuffixDrafter(8, RULE)
    draft = drafter.propose([row(0, [1, 2, 9, 1, 2, 8, 1, 3, 7, 1], 4)])
    assert draft.token_ids.tolist() == [[2]]
    assert draft.path_probs == [[pytest.approx(2 / 3)]]


def test_the_better_of_two_sources_wins():
    """Its own text on a tie; earlier responses where they promise more."""
    store = ResponseStore(8, 4)
    store.add([5, 6, 7, 8, 9])
    drafter = SuffixDrafter(8, RULE, store)
    assert proposed(drafter, 0, [5, 6, 7], 4) == [8, 9]
    assert proposed(drafter, 1, [5, 6, 1, 5, 6], 4) == [1, 5]


def test_responses_are_kept_only_if_asked():
    """Without a store a text of one request is unknown to the next; with one, its response is known, not its prompt."""
    for store, draft in ((None, []), (ResponseStore(8, 4), [13, 14])):
        drafter = SuffixDrafter(8, RULE, store)
        proposed(drafter, 0, [1, 2, 3], 4)
        drafter.observe(0, [1, 2, 3, 11, 12, 13, 14])
        drafter.forget(0)
        assert proposed(drafter, 1, [11, 12], 4) == draft
        assert proposed(drafter, 2, [1, 2], 4) == []


def test_the_oldest_response_leaves_first():
    """Two are kept of three; the counts are those of the two."""
    store = ResponseStore(8, 2)
    for response in ([1, 2], [1, 3], [1, 3, 4]):
        store.add(response)
    assert len(store) == 2
    assert best_candidate(store.tree, [1], 4, RULE)[0].probs == [1.0]


def test_a_store_is_saved_and_loaded(tmp_path):
    """The same texts in the same order; a smaller store takes the latest ones."""
    path = tmp_path / "deep" / "store.npz"
    store = ResponseStore(8, 5, path, "64 tokens")
    store.save()
    assert len(ResponseStore(8, 5, path, "64 tokens")) == 0
    for response in ([1, 2, 3], [4, 5], [6, 7, 8, 9]):
        store.add(response)
    store.save()
    assert [file.name for file in path.parent.iterdir()] == ["store.npz"]
    assert ResponseStore(8, 5, path, "64 tokens").tree.texts() == [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    assert ResponseStore(8, 2, path, "64 tokens").tree.texts() == [[4, 5], [6, 7, 8, 9]]


def test_what_is_no_store_of_this_model_is_refused(tmp_path):
    """Another vocabulary; a file of something else."""
    path = tmp_path / "store.npz"
    ResponseStore(8, 5, path, "64 tokens").save()
    with pytest.raises(InvalidOptionError, match="another vocabulary .'64 tokens', the target's is '65 tokens'"):
        ResponseStore(8, 5, path, "65 tokens")
    path.write_text("no zip file")
    with pytest.raises(InvalidOptionError, match="is not a store of responses .*name another file"):
        ResponseStore(8, 5, path, "64 tokens")
    np.savez(path.with_suffix(".other.npz"), a=1)
    with pytest.raises(InvalidOptionError, match="is not a store of responses"):
        ResponseStore(8, 5, path.with_suffix(".other.npz"), "64 tokens")


def test_a_step_over_a_long_text_does_little_work():
    """Lines of Python run for a step, with 100,000 tokens stored: some hundreds, no more than with 10,000."""
    rng = np.random.default_rng(0)
    tokens: list[int] = []
    while len(tokens) < 100_000:  # words of a skewed vocabulary, and passages said again
        if len(tokens) > 100 and rng.random() < 0.1:
            start = int(rng.integers(0, len(tokens) - 50))
            tokens += tokens[start : start + int(rng.integers(5, 50))]
        tokens.append(int(min(rng.zipf(1.3), 5000)))
    work = {}
    for size in (10_000, 100_000):
        store, drafter = ResponseStore(24, 1000), SuffixDrafter(24, RULE)
        for start in range(0, size // 2, 500):
            store.add(tokens[start : start + 500])
        drafter.responses = store
        text = tokens[-size // 2 : -200]
        drafter.propose([row(0, text, 16)])
        work[size] = lines_run(lambda drafter=drafter, text=text: steps(drafter, text, tokens[-200:])) / 50
    assert work[100_000] < 1500
    assert work[100_000] < 2 * work[10_000]


def steps(drafter, text, following):
    """50 steps of four tokens each."""
    for start in range(0, 200, 4):
        text.extend(following[start : start + 4])
        drafter.observe(0, text)
        drafter.propose([row(0, text, 16)])


def lines_run(work):
    count = 0

    def tracer(frame, event, arg):
        nonlocal count
        if "drafters" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_what_was_offered_is_drafted_as_far_as_it_is_wanted():
    """Asked for less than was offered, its first tokens come; of a text that grew, another candidate's."""
    drafter, text = SuffixDrafter(8, RULE), [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    assert drafter.offers([row(0, text, 3)]) == [Offer(3, 3, is_free=True)]
    assert proposed(drafter, 0, text, 2) == [4, 5]
    assert proposed(drafter, 0, [*text, 4], 2) == [5, 6]
