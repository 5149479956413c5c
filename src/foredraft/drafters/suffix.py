"""SuffixDecoding (Oliaro et al., 2411.04975): propose what followed the longest suffixes of the text most often.

Two sources: the request's own text, and the responses of earlier requests, if they are kept. Every suffix found in
one of them gives a candidate, a path or a tree, which may be the larger, the longer the suffix; the candidate with
the most expected accepted tokens wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from pathlib import Path
from typing import Any

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters.base import Drafter, DraftRow, Offer, tree_draft
from foredraft.drafters.context_tree import Context, ContextTree
from foredraft.drafters.response_store import ResponseStore
from foredraft.drafters.tree import DraftTree, grow_tree
from foredraft.drafters.vocabulary import vocabulary_name
from foredraft.target.forward import TargetModel
from foredraft.types import Draft


@dataclass(frozen=True, slots=True)
class Place:
    """A node of a candidate: the tokens up to it, and the position behind them, if they stand only there."""

    path: tuple[int, ...]
    position: int | None = None


Candidate = DraftTree[Place]


@dataclass(frozen=True, kw_only=True, slots=True)
class SuffixRule:
    """What a candidate is made of.

    Attributes:
        max_spec_factor: a suffix of n tokens gives at most ``n * max_spec_factor`` draft tokens.
        min_token_prob: tokens are left out whose path was taken less often than that.
        width, depth: most children of a token, and longest path; width 1 makes paths.
    """

    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1
    width: int = 1
    depth: int | None = None


def best_candidate(tree: ContextTree, text: Sequence[int], max_tokens: int, rule: SuffixRule) -> tuple[Candidate, int]:
    """The candidate with the highest score, among equals that of the longest suffix (Oliaro et al., algorithm 1), and
    the length of its suffix.

    A suffix is not followed up if even its first token, as often as it may be repeated, can't win.
    """
    best, match_len = Candidate(), 0
    recent = list(text[-tree.max_depth :])
    for length, context in reversed(tree.matches(recent)):
        budget = min(max_tokens, int(length * rule.max_spec_factor + 1e-6))
        if budget * _first_prob(context) > best.expected_len:
            grow = likeliest_tree if rule.width > 1 else likeliest_path
            found = grow(tree, recent, length, budget, rule)
            if found.expected_len > best.expected_len:
                best, match_len = found, length
    return best, match_len


def likeliest_path(tree: ContextTree, text: list[int], length: int, max_tokens: int, rule: SuffixRule) -> Candidate:
    """What followed the last ``length`` tokens of a text most often, what followed that, and so on."""
    path = Candidate()
    prob, max_tokens = 1.0, min(max_tokens, rule.depth or max_tokens)
    context = tree.find(text, length)
    while context is not None and len(path.token_ids) < max_tokens:
        if isinstance(context, int):
            tokens = tree.following(context, max_tokens - len(path.token_ids))
            path.token_ids += tokens
            path.probs += [prob] * len(tokens)
            break
        prob *= _first_prob(context)
        if prob < rule.min_token_prob:
            break
        path.token_ids.append(context.likeliest)
        path.probs.append(prob)
        context = tree.find(text + path.token_ids, min(length + len(path.token_ids), tree.max_depth))
    path.parents += range(-1, len(path.token_ids) - 1)
    return path


def likeliest_tree(tree: ContextTree, text: list[int], length: int, max_tokens: int, rule: SuffixRule) -> Candidate:
    """The most frequent paths behind the last ``length`` tokens of a text."""

    def expand(place: Place) -> Iterator[tuple[int, float, Place]]:
        if len(place.path) == rule.depth:
            return
        context: Context | None = place.position
        if context is None:
            context = tree.find([*text, *place.path], min(length + len(place.path), tree.max_depth))
        if isinstance(context, int):
            for token in tree.following(context, 1):
                yield token, 1.0, Place((*place.path, token), context + 1)
        elif context is not None:
            for token in nlargest(rule.width, context.counts, key=context.counts.__getitem__):
                yield token, context.counts[token] / context.total, Place((*place.path, token))

    return grow_tree(Place(()), expand, max_tokens, min_prob=rule.min_token_prob)


def _first_prob(context: Context) -> float:
    return 1.0 if isinstance(context, int) else context.counts[context.likeliest] / context.total


class _Text:
    """A running request: its text with the counts, where its response begins, and what was offered last: how long the
    text was, how many tokens were wanted, and the candidate with the length of its suffix."""

    def __init__(self, max_tree_depth: int, num_prompt_tokens: int):
        self.offered: tuple[int, int, tuple[Candidate, int]] = (0, 0, (Candidate(), 0))
        self.tree = ContextTree(max_tree_depth)
        self.tree.begin_text()
        self.num_prompt_tokens = num_prompt_tokens

    def extend(self, token_ids: Sequence[int]) -> None:
        self.tree.extend(token_ids[len(self.tree) :])

    @property
    def response(self) -> list[int]:
        return self.tree.texts()[0][self.num_prompt_tokens :]


class SuffixDrafter(Drafter):
    """Deterministic; a request's own counts go with it, and its response may stay.

    Args:
        max_tree_depth: longest suffix that is looked up.
        responses: of earlier requests; None keeps none.
    """

    def __init__(self, max_tree_depth: int, rule: SuffixRule, responses: ResponseStore | None = None):
        self.max_tree_depth, self.rule, self.responses = max_tree_depth, rule, responses
        self.makes_trees = rule.width > 1
        self._texts: dict[int, _Text] = {}

    def offers(self, rows: Sequence[DraftRow]) -> list[Offer]:
        found = [self._candidate(row) for row in rows]
        for row, each in zip(rows, found, strict=True):
            self._texts[row.sequence_id].offered = len(row.token_ids), row.num_draft_tokens, each
        return [
            Offer(len(each.token_ids), match_len, is_free=True, branches=self.makes_trees) for each, match_len in found
        ]

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        found = [self._candidate(row)[0] for row in rows]
        return tree_draft(
            [each.token_ids for each in found],
            [each.parents for each in found],
            path_probs=[each.probs for each in found],
        )

    def observe(self, sequence_id: int, token_ids: list[int]) -> None:
        if sequence_id in self._texts:
            self._texts[sequence_id].extend(token_ids)

    def forget(self, sequence_id: int) -> None:
        text = self._texts.pop(sequence_id, None)
        if text is not None and self.responses is not None:
            self.responses.add(text.response)

    def close(self) -> None:
        if self.responses is not None:
            self.responses.save()

    def _candidate(self, row: DraftRow) -> tuple[Candidate, int]:
        text = self._texts.get(row.sequence_id)
        if text is None:  # the first draft of a request: all of its text is prompt
            text = self._texts[row.sequence_id] = _Text(self.max_tree_depth, len(row.token_ids))
        text.extend(row.token_ids)
        length, limit, (candidate, match_len) = text.offered
        if length == len(row.token_ids) and limit >= row.num_draft_tokens:
            return candidate.first(row.num_draft_tokens), match_len
        own = best_candidate(text.tree, row.token_ids, row.num_draft_tokens, self.rule)
        if self.responses is None or own[0].expected_len >= row.num_draft_tokens:
            return own
        other = best_candidate(self.responses.tree, row.token_ids, row.num_draft_tokens, self.rule)
        return other if other[0].expected_len > own[0].expected_len else own


def build(speculative: SpeculativeConfig, config: EngineConfig, target: TargetModel, tokenizer: Any) -> Drafter:
    depth, kept = speculative.suffix_decoding_max_tree_depth, speculative.suffix_decoding_max_cached_requests
    responses = None
    if kept and speculative.suffix_decoding_store:
        path = Path(speculative.suffix_decoding_store).expanduser()
        responses = ResponseStore(depth, kept, path, vocabulary_name(tokenizer, target.vocab_size))
    elif kept:
        responses = ResponseStore(depth, kept)
    rule = SuffixRule(
        max_spec_factor=speculative.suffix_decoding_max_spec_factor,
        min_token_prob=speculative.suffix_decoding_min_token_prob,
        width=speculative.tree_width,
        depth=speculative.tree_depth,
    )
    return SuffixDrafter(depth, rule, responses)
