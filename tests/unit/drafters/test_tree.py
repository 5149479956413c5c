"""The builder of draft trees: the most probable nodes of all, parents before children, within the budget."""

from __future__ import annotations

import itertools

import pytest

from foredraft.drafters.tree import grow_tree

CHANCES = {0: 0.5, 1: 0.3, 2: 0.15}
Path = tuple[int, ...]


def expand(path: Path):
    """The same three children everywhere, four levels deep."""
    return [(token, chance, (*path, token)) for token, chance in CHANCES.items()] if len(path) < 4 else []


def prob(path: Path) -> float:
    out = 1.0
    for token in path:
        out *= CHANCES[token]
    return out


@pytest.mark.parametrize("max_nodes", [0, 1, 2, 7, 30, 200])
def test_the_best_nodes_are_taken(max_nodes):
    tree = grow_tree((), expand, max_nodes)
    every = [path for depth in range(1, 5) for path in itertools.product(CHANCES, repeat=depth)]
    best = sorted((prob(path) for path in every), reverse=True)[:max_nodes]
    assert tree.probs == pytest.approx(best)
    assert tree.probs == pytest.approx([prob(path) for path in tree.states])
    assert tree.expected_len == pytest.approx(sum(best))


def test_parents_come_first_and_every_prefix_is_a_tree():
    tree = grow_tree((), expand, 40)
    for node, (token, parent, path) in enumerate(zip(tree.token_ids, tree.parents, tree.states, strict=True)):
        assert parent < node
        assert path == (*(tree.states[parent] if parent >= 0 else ()), token)
    assert len(set(tree.states)) == 40


def test_improbable_paths_are_left_out():
    tree = grow_tree((), expand, 200, min_prob=0.1)
    assert min(tree.probs) >= 0.1
    assert set(tree.states) == {path for path in tree.states if prob(path) >= 0.1}
    assert (0, 0, 0) in tree.states


def test_nodes_that_cannot_be_used_are_not_expanded():
    asked = []

    def counted(path: Path):
        asked.append(path)
        return expand(path)

    grow_tree((), counted, 3)
    assert len(asked) == 3  # the root and all nodes but the last
    asked.clear()
    grow_tree((), counted, 0)
    assert asked == []
