"""What followed each context of a set of texts, with exact counts, in memory linear in the texts.

The contexts are kept read backwards, as a compressed trie: the branch of "a b c" is c, b, a. A text that grows by a
token adds one context, the one that ends before that token, so counts are exact after every token. The trie is the
suffix tree of the reversed texts, cut at ``max_depth``: at most two nodes a token, and at most three counted
continuations (the edges of a suffix automaton).

    texts     | a b c a b d a b        contexts   b ── a ┬─ | ....... seen once, at position 3: c followed
              BEGIN                                      └─ c ─ b ... seen once, at position 6: d followed

A context seen once is a number, the position behind it; only those seen more often are nodes. Labels of edges are
not stored: a node knows the latest place of its context. Texts leave in the order in which they came, so that place
outlives the others.
"""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Iterable, Sequence

BEGIN = -1
"""Stands before each text, so that no context reaches into the text before."""


class ContextNode:
    """A context seen at least twice.

    Attributes:
        depth: its length; contexts that end inside the edge above have the same occurrences.
        latest: position behind its latest occurrence.
        counts: how often each token followed.
        total: sum of ``counts``.
        likeliest: the token that followed most often, among equals the latest one counted.
        children: by the token before the context.
    """

    __slots__ = ("children", "counts", "depth", "latest", "likeliest", "total")

    def __init__(self, depth: int, latest: int, counts: dict[int, int], likeliest: int):
        self.depth, self.latest, self.counts, self.likeliest = depth, latest, counts, likeliest
        self.total = sum(counts.values())
        self.children: dict[int, ContextNode | int] = {}

    def count(self, token: int, position: int) -> None:
        count = self.counts[token] = self.counts.get(token, 0) + 1
        self.total += 1
        self.latest = position
        if count >= self.counts[self.likeliest]:
            self.likeliest = token

    def uncount(self, token: int) -> None:
        self.total -= 1
        self.counts[token] -= 1
        if not self.counts[token]:
            del self.counts[token]
        if token == self.likeliest and self.counts:
            self.likeliest = max(self.counts, key=self.counts.__getitem__)


Context = ContextNode | int
"""A node, or the position behind the only occurrence."""


class ContextTree:
    """Texts that grow at the end and leave from the front, and what followed their contexts.

    Args:
        max_depth: longest context.
    """

    def __init__(self, max_depth: int):
        self.max_depth = max_depth
        self.num_nodes = 0
        self._root = ContextNode(0, 0, {}, BEGIN)
        self._tokens = array("i")
        self._starts: deque[int] = deque()  # where each text has its BEGIN
        self._base = 0  # position of _tokens[0]; positions are never used again

    def __len__(self) -> int:
        """Tokens held, all texts together."""
        return len(self._tokens) - len(self._starts)

    @property
    def num_texts(self) -> int:
        return len(self._starts)

    def texts(self) -> list[list[int]]:
        """The texts, oldest first."""
        bounds = [start - self._base for start in self._starts] + [len(self._tokens)]
        return [self._tokens[a + 1 : b].tolist() for a, b in itertools.pairwise(bounds)]

    def begin_text(self) -> None:
        """What is appended from here on is another text."""
        self._starts.append(self._base + len(self._tokens))
        self._tokens.append(BEGIN)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the latest text."""
        start = self._starts[-1]
        for token in token_ids:
            self._tokens.append(token)
            position = self._base + len(self._tokens) - 1
            if position > start + 1:
                self._insert(position, min(self.max_depth, position - start))

    def drop_oldest_text(self) -> None:
        """Take a text out; all counts are then those of the other texts alone."""
        start = self._starts.popleft()
        end = self._starts[0] if self._starts else self._base + len(self._tokens)
        for position in range(start + 2, end):
            self._remove(position, min(self.max_depth, position - start))
        del self._tokens[: end - start]
        self._base = end

    def matches(self, text: Sequence[int]) -> list[tuple[int, Context]]:
        """The suffixes of a text that occur as contexts, shortest first.

        Returns:
            Length and context. Of suffixes with the same occurrences only the longest is given.
        """
        longest = min(self.max_depth, len(text))
        found: list[tuple[int, Context]] = []
        node = self._root
        while node.depth < longest:
            child = node.children.get(text[-1 - node.depth])
            if child is None:
                break
            if isinstance(child, int):
                found.append((self._agreement(text, child, node.depth + 1, longest), child))
                break
            length = self._agreement(text, child.latest, node.depth + 1, min(longest, child.depth))
            found.append((length, child))
            if length < child.depth:
                break
            node = child
        return found

    def find(self, text: list[int], length: int) -> Context | None:
        """The context of the last ``length`` tokens of a text; None if nothing ever followed it."""
        node = self._root
        while True:  # down without looking at labels, which are compared at the end
            child = node.children.get(text[-1 - node.depth])
            if child is None:
                return None
            if isinstance(child, int) or child.depth >= length:
                break
            node = child
        at = (child if isinstance(child, int) else child.latest) - self._base
        return child if at >= length and self._tokens[at - length : at].tolist() == text[-length:] else None

    def following(self, position: int, num_tokens: int) -> list[int]:
        """Up to ``num_tokens`` tokens of the text from a position on."""
        at = position - self._base
        tokens = self._tokens[at : at + num_tokens].tolist()
        return tokens[: tokens.index(BEGIN)] if BEGIN in tokens else tokens

    def _agreement(self, text: Sequence[int], position: int, length: int, longest: int) -> int:
        """How many tokens before ``position`` are the last of ``text``; ``length`` are known to be."""
        tokens, at, end = self._tokens, position - self._base, len(text)
        longest = min(longest, at)
        while length < longest and tokens[at - 1 - length] == text[end - 1 - length]:
            length += 1
        return length

    def _insert(self, position: int, length: int) -> None:
        """Count the token at ``position`` behind the ``length`` tokens before it (the text's BEGIN among them)."""
        tokens = self._tokens
        at = position - self._base
        token = tokens[at]
        node = self._root
        while node.depth < length:
            key = tokens[at - 1 - node.depth]
            child = node.children.get(key)
            if child is None:
                node.children[key] = position
                return
            if isinstance(child, int):
                other, end = child - self._base, length
            else:
                other, end = child.latest - self._base, min(length, child.depth)
            depth = node.depth + 1
            while depth < end and tokens[other - 1 - depth] == tokens[at - 1 - depth]:
                depth += 1
            if isinstance(child, int):
                between = ContextNode(depth, position, {tokens[other]: 1}, tokens[other])
            elif depth < child.depth:
                between = ContextNode(depth, position, dict(child.counts), child.likeliest)
            else:
                child.count(token, position)
                node = child
                continue
            if depth < length:
                between.children = {tokens[other - 1 - depth]: child, tokens[at - 1 - depth]: position}
            between.count(token, position)
            node.children[key] = between
            self.num_nodes += 1
            return

    def _remove(self, position: int, length: int) -> None:
        """Undo :meth:`_insert`. Nodes that no longer tell contexts apart go."""
        tokens = self._tokens
        at = position - self._base
        token = tokens[at]
        node = above = self._root
        key_above = key = BEGIN
        while node.depth < length:
            key_above, key = key, tokens[at - 1 - node.depth]
            child = node.children[key]
            if isinstance(child, int):
                del node.children[key]
                if node is not self._root and len(node.children) == 1:
                    (above.children[key_above],) = node.children.values()
                    self.num_nodes -= 1
                return
            child.uncount(token)
            if child.total == 1 and not child.children:
                node.children[key] = child.latest
                self.num_nodes -= 1
                return
            above, node = node, child
