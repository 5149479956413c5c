"""Cases on branching drafts: O11 (temperature with filters), O27 (positions)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from foredraft.drafters import Drafter, DraftRow
from foredraft.drafters.base import tree_draft
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.draft_tree import DraftTreeDrafter
from foredraft.drafters.lookahead import LookaheadDrafter
from foredraft.drafters.ngram import NGramDrafter
from foredraft.drafters.recycling import RecyclingDrafter
from foredraft.target.layout import PassRow
from foredraft.testing import check_caches, constant_bigram, engine_for, reference, run, target_for, tiny_model
from foredraft.types import Draft, SamplingParams

PROMPT = list(range(3, 15))
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(3)


@pytest.fixture(scope="module")
def text(model: Any) -> list[int]:
    """The prompt with its greedy continuation, and some tokens more for the last draft."""
    longer = SamplingParams(temperature=0.0, max_tokens=50)
    return PROMPT + reference(model, PROMPT, longer).token_ids


class OracleTree(Drafter):
    """Root to {x, g1}, g1 to {g2, y}, g2 to {g3}, with the g's known and x and y wrong; in a given order."""

    makes_trees = True

    def __init__(self, text: list[int], order: list[int]):
        self.text, self.order = text, order

    def propose(self, rows: Any) -> Draft:
        trees = [self.tree(row) for row in rows]
        return tree_draft([tokens for tokens, _ in trees], [parents for _, parents in trees])

    def tree(self, row: DraftRow) -> tuple[list[int], list[int]]:
        if row.num_draft_tokens < 5:
            return [], []
        g1, g2, g3 = self.text[len(row.token_ids) :][:3]
        tokens, parents = [(g1 + 1) % 64, g1, g2, (g2 + 1) % 64, g3], [-1, -1, 1, 1, 2]
        at = {old: new for new, old in enumerate(self.order)}
        return [tokens[i] for i in self.order], [at.get(parents[i], -1) for i in self.order]


def orders() -> list[list[int]]:
    """x before g1, and five others with parents before children."""
    parents, rng, found = [-1, -1, 1, 1, 2], random.Random(0), [[0, 1, 2, 3, 4]]
    while len(found) < 6:
        order = rng.sample(range(5), 5)
        if order not in found and all(p < 0 or order.index(p) < order.index(i) for i, p in enumerate(parents)):
            found.append(order)
    return found


@pytest.mark.parametrize("order", orders(), ids=str)
def test_o27_a_nodes_position_is_its_depth_whatever_the_order(model: Any, text: list[int], order: list[int]):
    drafter = OracleTree(text, order)
    target = target_for(model)
    row = DraftRow(0, PROMPT, 5, 0, "greedy", lambda _: None)  # type: ignore[arg-type, return-value]
    tokens, parents = drafter.tree(row)
    target.slots.open(0)
    target.prefill(0, PROMPT[:-1])
    together = target.forward([PassRow(0, [PROMPT[-1], *tokens], 6, parents)]).clone()
    for node in range(5):
        path, at = [], node
        while at >= 0:
            path.append(tokens[at])
            at = parents[at]
        alone = target.forward([PassRow(0, [PROMPT[-1], *path[::-1]], 1)])[0]
        assert torch.allclose(together[node + 1], alone, atol=1e-4), f"node {node}"
    target.slots.close(0)
    engine = engine_for(target, drafter, num_speculative_tokens=5)
    (sequence,) = run(engine, [PROMPT], GREEDY, after_step=lambda engine, _: check_caches(engine))
    assert sequence.output_token_ids == text[len(PROMPT) : len(PROMPT) + 40]
    assert sequence.metrics.tokens_per_target_pass > 3.0


PROBS = (0.50, 0.30, 0.15, 0.05)
DRAFTERS: dict[str, Callable[[Any], Drafter]] = {
    "draft chain": lambda draft: DraftModelDrafter(target_for(draft), 64),
    "draft tree": lambda draft: DraftTreeDrafter(target_for(draft), 64, width=2, depth=2),
    "prompt lookup": lambda draft: NGramDrafter(1, 4),
    "token recycling": lambda draft: RecyclingDrafter(),
    "lookahead": lambda draft: LookaheadDrafter(3, 3, 2),
}


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("method", DRAFTERS)
def test_o11_temperature_and_filters_together(method: str, width: int):
    """Every mix runs, in one batch, and no token is emitted that the filters leave out."""
    target, draft = (constant_bigram([math.log(p) for p in probs]) for probs in (PROBS, PROBS[::-1]))
    engine = engine_for(target, DRAFTERS[method](draft), num_speculative_tokens=width)
    grid = [(t, p, k) for t in (0.5, 1.0, 2.0) for p in (1.0, 0.9) for k in (0, 2)]
    params = [SamplingParams(temperature=t, top_p=p, top_k=k, max_tokens=20) for t, p, k in grid]
    sequences = run(engine, [[0, 1, 2, 3, 0]] * len(grid), params)
    for (temperature, top_p, top_k), sequence in zip(grid, sequences, strict=True):
        weights = [p ** (1 / temperature) for p in PROBS]
        mass, kept = 0.0, 0
        while kept < (top_k or 4) and mass < top_p * sum(weights) - 1e-9:
            mass += weights[kept]
            kept += 1
        assert set(sequence.output_token_ids) <= set(range(kept)), (temperature, top_p, top_k)


@pytest.mark.parametrize("method", DRAFTERS)
def test_o11_frequencies_at_temperature_and_top_p(method: str):
    """Squared and normalised 0.6849 0.2466 0.0616 0.0068, the first two kept: 0.7353 and 0.2647, 2,400 tokens."""
    target, draft = (constant_bigram([math.log(p) for p in probs]) for probs in (PROBS, PROBS[::-1]))
    engine = engine_for(target, DRAFTERS[method](draft), num_speculative_tokens=4)
    params = [SamplingParams(temperature=0.5, top_p=0.9, max_tokens=40, seed=i) for i in range(60)]
    emitted = [t for s in run(engine, [[0, 1, 2, 3, 0]] * 60, params) for t in s.output_token_ids]
    assert emitted.count(0) / len(emitted) == pytest.approx(0.7353, abs=0.02)
    assert emitted.count(0) + emitted.count(1) == len(emitted)
