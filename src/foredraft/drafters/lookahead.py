"""Lookahead decoding (Fu et al., 2402.02057): n-grams of the target's own guesses, made in the pass that verifies.

    text  |  level 0   g g g g      guesses for the next positions, one column each
          |  level 1     g g g g    what followed them when they were tried
          |  level 2       g g g g  ...

A column's guesses hang on the level-0 guesses up to it, so window and candidates are one tree and go through the
ordinary pass. The target's answer to the last level completes an n-gram, which goes into the pool; then each level
takes the place of the one above. Drafts are the pool's n-grams that begin with the text's last token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from foredraft.config import SpeculativeConfig
from foredraft.drafters.base import Drafter, DraftRow, JudgedDraft, tree_draft
from foredraft.types import Draft

Ngram = tuple[int, ...]


@dataclass(slots=True)
class _Trie:
    """A tree in which equal paths are one."""

    max_nodes: int
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    _children: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, path: Sequence[int]) -> int | None:
        """Put a path from the root in; its last node, or None if there is no room for all of it."""
        node = -1
        for i, token in enumerate(path):
            child = self._children.get((node, token))
            if child is None:
                if len(self.token_ids) + len(path) - i > self.max_nodes:
                    return None
                child = self._children[node, token] = len(self.token_ids)
                self.token_ids.append(token)
                self.parents.append(node)
            node = child
        return node


@dataclass(slots=True)
class _Window:
    """The guesses of a sequence: ``levels[r][c]``, the pool, the current draft, and where the columns lie in it."""

    levels: list[list[int]]
    pool: dict[int, OrderedDict[Ngram, None]] = field(default_factory=dict)
    draft: list[int] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)

    def column(self, c: int) -> Ngram:
        return tuple(level[c] for level in self.levels)


class LookaheadDrafter(Drafter):
    """Drafts n-grams that the target itself produced while decoding; needs no model and no training.

    Args:
        window_size: columns, W in the paper.
        ngram_size: tokens of an n-gram with its key, N in the paper; ``ngram_size - 1`` levels.
        guess_size: n-grams kept for a key, G in the paper.
    """

    makes_trees = True
    num_top_tokens = 1

    def __init__(self, window_size: int, ngram_size: int, guess_size: int):
        self.window_size, self.num_levels, self.guess_size = window_size, ngram_size - 1, guess_size
        self._windows: dict[int, _Window] = {}

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        tries = [self._trie(row) for row in rows]
        return tree_draft([trie.token_ids for trie in tries], [trie.parents for trie in tries])

    def observe_pass(self, judged: JudgedDraft) -> None:
        window = self._windows[judged.sequence_id]
        ends = window.ends if judged.token_ids[1:] == window.draft else {}
        answers = {c: int(judged.top_token_ids[node + 1, 0]) for c, node in ends.items()}
        for c, answer in answers.items():
            key, *rest = (*window.column(c), answer)
            known = window.pool.setdefault(key, OrderedDict())
            known[tuple(rest)] = None
            known.move_to_end(tuple(rest))
            while len(known) > self.guess_size:
                known.popitem(last=False)
        last = [answers.get(c, window.levels[-1][c]) for c in range(self.window_size)]
        gone = len(judged.path)  # one token more was emitted, but each level moves up one position by itself
        window.levels = [_shifted(level, gone) for level in (*window.levels[1:], last)]

    def forget(self, sequence_id: int) -> None:
        self._windows.pop(sequence_id, None)

    def _trie(self, row: DraftRow) -> _Trie:
        window = self._windows.get(row.sequence_id)
        if window is None:
            text = row.token_ids
            num_levels = max(1, min(self.num_levels, row.num_draft_tokens))  # one column at least must fit
            levels = [[text[(r + c) % len(text)] for c in range(self.window_size)] for r in range(num_levels)]
            window = self._windows[row.sequence_id] = _Window(levels)
        trie = _Trie(row.num_draft_tokens)
        for ngram in reversed(window.pool.get(row.token_ids[-1], ())):
            trie.add(ngram)
        window.ends = {}
        for c in range(self.window_size):
            end = trie.add([*window.levels[0][:c], *window.column(c)])
            if end is None:
                break
            window.ends[c] = end
        window.draft = trie.token_ids
        return trie


def _shifted(level: list[int], by: int) -> list[int]:
    """Drop the first guesses; the places at the end are filled with the others again."""
    kept = level[by:] or level[-1:]
    return [kept[i % len(kept)] for i in range(len(level))]


def build(speculative: SpeculativeConfig, *_: Any) -> Drafter:
    return LookaheadDrafter(
        speculative.lookahead_window_size, speculative.lookahead_ngram_size, speculative.lookahead_guess_size
    )
