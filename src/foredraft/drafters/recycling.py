"""Token recycling (Luo et al., 2408.08696): what the target found likely behind a token is tried again behind it.

Every verified node leaves its token's likeliest successors in a table; the next draft is a tree through that table.
The probability of a successor is that of its rank: how often the target's token was the first, the second, ... of the
list, over the request so far. Before the target has judged a token, the table holds what followed it in the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from foredraft.config import SpeculativeConfig
from foredraft.drafters.base import Drafter, DraftRow, JudgedDraft, tree_draft
from foredraft.drafters.tree import DraftTree, grow_tree
from foredraft.types import Draft

NUM_SUCCESSORS = 8
PRIOR_HITS = (40.0, 12.0, 7.0, 5.0, 4.0, 3.0, 3.0, 2.0)
"""Hits of each rank before the first observation, out of ``PRIOR_TRIALS``."""
PRIOR_TRIALS = 100.0


@dataclass(slots=True)
class Table:
    """Successors by token, and how good the ranks are."""

    successors: dict[int, list[int]] = field(default_factory=dict)
    hits: list[float] = field(default_factory=lambda: list(PRIOR_HITS))
    trials: float = PRIOR_TRIALS

    @classmethod
    def of_prompt(cls, token_ids: Sequence[int]) -> Table:
        """What followed each token in a text, the latest first."""
        table = cls()
        for token, following in zip(token_ids[-2::-1], token_ids[:0:-1], strict=True):
            known = table.successors.setdefault(token, [])
            if len(known) < NUM_SUCCESSORS and following not in known:
                known.append(following)
        return table

    def learn(self, token: int, successors: list[int], actual: int | None) -> None:
        """Replace a token's successors; ``actual`` is what followed it, if it was accepted."""
        if actual is not None and token in self.successors:
            self.trials += 1
            if actual in self.successors[token]:
                self.hits[self.successors[token].index(actual)] += 1
        self.successors[token] = successors

    def expand(self, token: int) -> Iterator[tuple[int, float, int]]:
        for rank, successor in enumerate(self.successors.get(token, ())):
            yield successor, self.hits[rank] / self.trials, successor


class RecyclingDrafter(Drafter):
    """Drafts trees from the target's own second thoughts; needs no model and no training."""

    makes_trees = True
    num_top_tokens = NUM_SUCCESSORS

    def __init__(self) -> None:
        self._tables: dict[int, Table] = {}

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        trees = [self._tree(row) for row in rows]
        return tree_draft([tree.token_ids for tree in trees], [tree.parents for tree in trees])

    def observe_pass(self, judged: JudgedDraft) -> None:
        table = self._tables[judged.sequence_id]
        follows = dict(zip([-1, *judged.path], judged.path, strict=False))
        for node, (token, top) in enumerate(zip(judged.token_ids, judged.top_token_ids.tolist(), strict=True), -1):
            kept = node < 0 or node in judged.path
            next_token = judged.token_ids[follows[node] + 1] if node in follows else top[0]
            table.learn(token, top, next_token if kept else None)

    def forget(self, sequence_id: int) -> None:
        self._tables.pop(sequence_id, None)

    def _tree(self, row: DraftRow) -> DraftTree[int]:
        if row.sequence_id not in self._tables:
            self._tables[row.sequence_id] = Table.of_prompt(row.token_ids)
        return grow_tree(row.token_ids[-1], self._tables[row.sequence_id].expand, row.num_draft_tokens)


def build(speculative: SpeculativeConfig, *_: Any) -> Drafter:
    return RecyclingDrafter()
