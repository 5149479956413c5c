"""Trees: the product's own walk under every choice of its tests, over all drafts; vocabulary of 3, float64."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from foredraft.verify.tree import children_of, longest_path, match_path, path_to, rejection_path

VOCAB = 3
DEPTH = 2
EXACT = 1e-12
Law = Callable[[tuple[int, ...]], Tensor]
Joint = dict[tuple[int, ...], float]


@dataclass
class Nodes:
    """A tree with the law that each node was drawn from."""

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)

    def prefix(self, node: int) -> tuple[int, ...]:
        return tuple(self.token_ids[i] for i in path_to(node, self.parents))

    def with_child(self, parent: int, token: int, law: Tensor) -> Nodes:
        return Nodes([*self.token_ids, token], [*self.parents, parent], [*self.laws, law])


@dataclass(frozen=True)
class Decision:
    """Stands for a uniform number: takes the branch it is told to and notes the chance of it."""

    accept: bool
    chances: list[float]

    def __lt__(self, threshold: float) -> bool:
        chance = min(1.0, threshold)
        self.chances.append(chance if self.accept else 1.0 - chance)
        return self.accept


def random_law(seed: int, zeros: bool) -> Law:
    @functools.cache
    def law(prefix: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 1000 + sum(3**i * (t + 1) for i, t in enumerate(prefix)))
        weights = torch.rand(VOCAB, generator=generator, dtype=torch.float64) ** 2
        if zeros:
            weights[int(torch.randint(VOCAB, (), generator=generator))] = 0.0
        return weights / weights.sum()

    return law


def joint(law: Law) -> Joint:
    texts = itertools.product(range(VOCAB), repeat=DEPTH + 1)
    return {text: float(torch.stack([law(text[:i])[t] for i, t in enumerate(text)]).prod()) for text in texts}


def drawn(draft: Law, nodes: Nodes, parent: int, num_children: int, replace: bool) -> Iterator[tuple[float, Nodes]]:
    """All ways to draw children of ``parent``, with their probabilities."""

    def more(nodes: Nodes, law: Tensor, left: int) -> Iterator[tuple[float, Nodes]]:
        if left == 0:
            yield 1.0, nodes
            return
        for token in law.nonzero().flatten().tolist():
            rest = law if replace else law.index_fill(0, torch.tensor([token]), 0.0)
            mass = float(rest.sum())
            following = more(nodes.with_child(parent, token, law), rest / mass, left - 1) if mass > 0 else None
            for weight, grown in following or [(1.0, nodes.with_child(parent, token, law))]:
                yield float(law[token]) * weight, grown

    return more(nodes, draft(nodes.prefix(parent)), num_children)


def drawn_trees(draft: Law, replace: bool) -> Iterator[tuple[float, Nodes]]:
    """Two children of the root; the likelier of them gets two children, the other one: the shape is adaptive."""
    for weight, nodes in drawn(draft, Nodes(), -1, 2, replace):
        order = sorted(range(len(nodes.token_ids)), key=lambda i: -float(draft(())[nodes.token_ids[i]]))
        grown = [(weight, nodes)]
        for parent, count in zip(order, (2, 1), strict=False):
            grown = [(w * v, tree) for w, n in grown for v, tree in drawn(draft, n, parent, count, replace)]
        yield from grown


def listed_tree(draft: Law) -> Nodes:
    """Deterministic children: the drafter's two best at the root, its two best again below each."""
    nodes = Nodes()
    for token in draft(()).topk(2).indices.tolist():
        nodes = nodes.with_child(-1, token, draft(()))
    for parent in (0, 1):
        for token in draft(nodes.prefix(parent)).topk(2).indices.tolist():
            nodes = nodes.with_child(parent, token, draft(nodes.prefix(parent)))
    return nodes


def emit(target: Law, out: Joint, prefix: tuple[int, ...], weight: float) -> None:
    """Add a text that begins with ``prefix`` and goes on as the target would."""
    for rest in itertools.product(range(VOCAB), repeat=DEPTH + 1 - len(prefix)):
        text, chance = prefix + rest, weight
        for i in range(len(prefix), DEPTH + 1):
            chance *= float(target(text[:i])[text[i]])
        out[text] = out.get(text, 0.0) + chance


def rejection_law(target: Law, trees: Iterator[tuple[float, Nodes]], stochastic: bool) -> tuple[Joint, float]:
    """The law of what `rejection_path` emits, and the mean number of accepted tokens."""
    out: Joint = {}
    mean = 0.0
    for weight, nodes in trees:
        count = len(nodes.token_ids)
        draft_probs = torch.stack(nodes.laws) if stochastic else None
        seen = set()
        for accepts in itertools.product([True, False], repeat=count):
            chances: list[float] = []
            numbers = [Decision(accept, chances) for accept in accepts]
            path, probs = rejection_path(
                nodes.token_ids,
                nodes.parents,
                lambda node, nodes=nodes: target(nodes.prefix(node)),
                draft_probs,
                numbers,  # type: ignore[arg-type]
            )
            branch = (tuple(path), tuple(chances))
            if branch in seen:  # choices that this walk does not look at
                continue
            seen.add(branch)
            chance = weight * float(torch.tensor(chances, dtype=torch.float64).prod())
            mean += chance * len(path)
            for token in range(VOCAB):
                emit(target, out, (*(nodes.token_ids[i] for i in path), token), chance * float(probs[token]))
    return out, mean


def distance(law: Joint, expected: Joint) -> float:
    return 0.5 * sum(abs(law.get(text, 0.0) - expected.get(text, 0.0)) for text in law.keys() | expected.keys())


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("seed", [0, 1, 3])
def test_drawn_children(seed: int, replace: bool):
    target, draft = random_law(seed, zeros=seed % 2 == 1), random_law(seed + 50, zeros=seed == 3)
    law, mean = rejection_law(target, drawn_trees(draft, replace), stochastic=True)
    assert distance(law, joint(target)) <= EXACT
    assert 0.1 < mean < DEPTH


@pytest.mark.parametrize("seed", range(20))
def test_deterministic_children(seed: int):
    """The walk by rejection and the walk by equality accept the same number and both are exact."""
    target, draft = random_law(seed, zeros=seed % 3 == 1), random_law(seed + 50, zeros=False)
    nodes = listed_tree(draft)
    law, mean = rejection_law(target, iter([(1.0, nodes)]), stochastic=False)
    assert distance(law, joint(target)) <= EXACT
    matched, mean_matched = match_law(target, nodes)
    assert distance(matched, joint(target)) <= EXACT
    assert mean_matched == pytest.approx(mean, abs=1e-12)


def match_law(target: Law, nodes: Nodes) -> tuple[Joint, float]:
    """The law of what `match_path` emits when the target's token at each node is drawn."""
    out: Joint = {}
    mean = 0.0
    inner = [-1, *range(len(nodes.token_ids))]
    for draws in itertools.product(range(VOCAB), repeat=len(inner)):
        asked: list[int] = []

        def target_token(node: int, depth: int, draws=draws, asked=asked) -> int:
            assert depth == len(nodes.prefix(node))
            asked.append(node)
            return draws[node + 1]

        path, token = match_path(nodes.token_ids, nodes.parents, target_token)
        unasked = VOCAB ** (len(inner) - len(asked))
        chance = 1.0 / unasked
        for node in asked:
            chance *= float(target(nodes.prefix(node))[draws[node + 1]])
        mean += chance * len(path)
        emit(target, out, (*(nodes.token_ids[i] for i in path), token), chance)
    return out, mean


@pytest.mark.parametrize("mistake", ["law of a sibling not renormalised", "soft law for listed children"])
def test_wrong_laws_are_convicted(mistake: str):
    """The two classics (methods.md 0): the enumeration is able to see a bias."""
    target, draft = random_law(0, zeros=False), random_law(50, zeros=False)
    if mistake == "soft law for listed children":
        law, _ = rejection_law(target, iter([(1.0, listed_tree(draft))]), stochastic=True)
    else:
        trees = (
            (weight, Nodes(n.token_ids, n.parents, [draft(n.prefix(p)) for p in n.parents]))
            for weight, n in drawn_trees(draft, replace=False)
        )
        law, _ = rejection_law(target, trees, stochastic=True)
    assert distance(law, joint(target)) > 1e-3


def test_a_child_of_draft_probability_zero_is_never_accepted():
    law = torch.tensor([0.5, 0.5, 0.0])
    path, probs = rejection_path([2], [-1], lambda _: torch.tensor([0.2, 0.2, 0.6]), law[None], [0.0])
    assert path == []
    assert probs.sum() == pytest.approx(1.0)


def test_residual_that_vanishes_keeps_the_target():
    """Draft and target agree but for rounding and the number says reject."""
    law = torch.tensor([0.5, 0.5, 0.0])
    path, probs = rejection_path([0], [-1], lambda _: law, law[None], [1.0])
    assert path == []
    assert probs.tolist() == law.tolist()


def test_walks_on_shapes():
    """Nothing drafted, an unordered tree, a bonus behind a leaf."""
    assert match_path([], [], lambda node, depth: 7) == ([], 7)
    tokens, parents = [4, 5, 6, 7, 8], [-1, -1, 1, 0, 2]
    wanted = {-1: 5, 1: 6, 2: 8, 4: 9}
    assert match_path(tokens, parents, lambda node, depth: wanted[node]) == ([1, 2, 4], 9)
    assert children_of(parents) == {-1: [0, 1], 1: [2], 0: [3], 2: [4]}
    assert path_to(4, parents) == [1, 2, 4]
    assert path_to(-1, parents) == []
    assert longest_path(parents, [True, True, True, True, False]) == [1, 2]
    assert longest_path(parents, [True, False, True, True, True]) == [0, 3]
    assert longest_path(parents, [False] * 5) == []
