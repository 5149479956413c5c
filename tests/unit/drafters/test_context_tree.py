"""Counts of continuations against counting by plain search, as texts come, grow and leave."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.drafters.context_tree import BEGIN, ContextNode, ContextTree

TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=14), min_size=1, max_size=6)
DEPTHS = st.integers(1, 6)


def counted(texts, context):
    """What followed a context in the texts."""
    n = len(context)
    return Counter(text[i] for text in texts for i in range(n, len(text)) if text[i - n : i] == list(context))


def substrings(texts, longest):
    return {tuple(text[i : i + n]) for text in texts for n in range(1, longest + 1) for i in range(len(text) - n + 1)}


def counts_of(tree, context):
    found = tree.find(list(context), len(context))
    return Counter() if found is None else counts_at(tree, found)


def counts_at(tree, context):
    if isinstance(context, int):
        return Counter(tree.following(context, 1))
    assert context.total == sum(context.counts.values())
    assert context.counts[context.likeliest] == max(context.counts.values())
    return Counter(context.counts)


def check_counts(tree, texts, depth):
    for context in substrings(texts, depth):
        assert counts_of(tree, context) == counted(texts, context), context
    for context in [(9,), (0, 9), (2, 2, 2, 2, 2, 2)[:depth]]:
        assert counts_of(tree, context) == counted(texts, context)


def grown(texts, depth):
    tree = ContextTree(depth)
    for text in texts:
        tree.begin_text()
        tree.extend(text)
    return tree


def shape(tree, context=None):
    """The trie as nested dictionaries, without places: what was inserted decides it, not the order."""
    if context is None:
        return {key: shape(tree, child) for key, child in tree._root.children.items()}
    if isinstance(context, int):
        return "once", tree.following(context, 1)
    below = {key: shape(tree, child) for key, child in context.children.items()}
    return context.depth, dict(sorted(context.counts.items())), below


def nodes_under(context):
    if isinstance(context, int):
        return 0
    return 1 + sum(nodes_under(child) for child in context.children.values())


@settings(max_examples=300, deadline=None)
@given(texts=TEXTS, depth=DEPTHS)
def test_every_context_has_the_counts_of_a_search(texts, depth):
    """No context of one text reaches into another."""
    tree = grown(texts, depth)
    check_counts(tree, texts, depth)
    assert len(tree) == sum(map(len, texts))
    assert tree.texts() == texts


@settings(max_examples=100, deadline=None)
@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=25), depth=DEPTHS)
def test_counts_are_right_after_every_token(text, depth):
    """The last token has no continuation yet, and so counts nowhere."""
    tree = grown([[]], depth)
    for end in range(1, len(text) + 1):
        tree.extend(text[end - 1 : end])
        check_counts(tree, [text[:end]], depth)


@settings(max_examples=200, deadline=None)
@given(texts=TEXTS, more=TEXTS, depth=DEPTHS)
def test_a_text_that_leaves_leaves_nothing(texts, more, depth):
    """After each departure the trie is the one that the other texts alone would make, places and all apart."""
    tree = grown(texts, depth)
    held = list(texts)
    for text in more:
        tree.drop_oldest_text()
        held = held[1:]
        assert shape(tree) == shape(grown(held, depth))
        tree.begin_text()
        tree.extend(text)
        held = [*held, text]
        check_counts(tree, held, depth)
    while held:
        tree.drop_oldest_text()
        held = held[1:]
        check_counts(tree, held, depth)
    assert (len(tree), tree.num_texts, tree.num_nodes, shape(tree)) == (0, 0, 0, {})


@settings(max_examples=200, deadline=None)
@given(texts=TEXTS, depth=DEPTHS, pattern=st.lists(st.integers(0, 3), max_size=8))
def test_matches_are_the_suffixes_that_occur(texts, depth, pattern):
    """One for each set of occurrences, the longest suffix of it."""
    tree = grown(texts, depth)
    occurring = [n for n in range(1, min(depth, len(pattern)) + 1) if counted(texts, pattern[-n:])]
    matches = tree.matches(pattern)
    lengths = [length for length, _ in matches]
    assert lengths == sorted(set(lengths))
    assert set(lengths) <= set(occurring)
    assert max(lengths, default=0) == max(occurring, default=0)
    for n in occurring:
        length, context = next((length, context) for length, context in matches if length >= n)
        assert counts_at(tree, context) == counted(texts, pattern[-n:]) == counted(texts, pattern[-length:])


def test_of_equals_the_latest_followed():
    """After "1" came 2 and then 3."""
    tree = grown([[1, 2, 0, 1, 3, 0]], 4)
    context = tree.find([1], 1)
    assert isinstance(context, ContextNode)
    assert context.likeliest == 3


def test_the_number_of_nodes_is_linear_in_the_text():
    """Runs, periods, a text said twice, and one without structure: under a node a token at any depth."""
    texts = {
        "run": [5] * 2000,
        "period": [i % 7 for i in range(2000)],
        "twice": [(i * i * 31 + i) % 997 for i in range(1000)] * 2,
        "mixed": [(i * i * 7 + i // 3) % 11 for i in range(2000)],
    }
    for name, text in texts.items():
        shallow, deep = grown([text], 24), grown([text], 200)
        assert shallow.num_nodes == nodes_under(shallow._root) - 1
        assert 0 < shallow.num_nodes < len(text), name
        assert deep.num_nodes < len(text), name
        continuations = sum(len(node.counts) for node in all_nodes(deep._root) if node.depth)
        assert continuations < 3 * len(text), name


def all_nodes(context):
    if isinstance(context, ContextNode):
        yield context
        for child in context.children.values():
            yield from all_nodes(child)


def test_following_ends_with_the_text():
    """Not in the next one."""
    tree = grown([[1, 2, 3], [4, 5]], 3)
    place = tree.find([1], 1)
    assert isinstance(place, int)
    assert tree.following(place, 9) == [2, 3]
    assert BEGIN not in tree.following(place, 9)
