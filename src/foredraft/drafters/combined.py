"""Several sources at once: each row of a step is drafted by the one that promises most.

    gain = (1 + expected accepted tokens) / (1 + cost of a pass of the source's model * passes)

in tokens per time of a target pass. What a source expects is its own estimate, corrected by what it got right in
this sequence so far. Of equal gains the first source's counts, so the order is that of preference.

The choice may look at proposals of deterministic sources, which are functions of the text, and does so where they run
no model. A source that draws its tokens is chosen, or not, before it draws: a choice that saw them would drop some
tokens more often than others. Choosing comes before the policy's plan, which so knows who drafts for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.drafters.base import Drafter, DraftRow, JudgedDraft, Offer, tree_draft
from foredraft.types import Draft, node_depths

PRIOR_ACCEPTANCE = 0.6
"""Chance that a draft token is accepted if the one before it was, where a source makes no estimate."""
PRIOR_WEIGHT = 2.0
"""Expected tokens after which a source's own record counts as much as its estimate."""
DECAY = 0.9
"""Weight of a step's record against that of the next."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """One row of a source's draft; ``probs`` is ``[N, V]`` or None."""

    token_ids: list[int]
    parents: list[int]
    path_probs: list[float]
    probs: Tensor | None = None

    def first(self, count: int) -> Proposal:
        """Only the first tokens."""
        probs = None if self.probs is None else self.probs[:count]
        return Proposal(self.token_ids[:count], self.parents[:count], self.path_probs[:count], probs)

    def accepted(self, emitted: Sequence[int]) -> int:
        """How many of the emitted tokens the proposal foresaw."""
        children = {
            (parent, token): i for i, (parent, token) in enumerate(zip(self.parents, self.token_ids, strict=True))
        }
        node = -1
        for count, token in enumerate(emitted):
            found = children.get((node, token))
            if found is None:
                return count
            node = found
        return len(emitted)

    def expected(self, num_emitted: int) -> float:
        """How many of so many emitted tokens it was expected to foresee."""
        depths = node_depths(self.parents)
        return sum(prob for prob, depth in zip(self.path_probs, depths, strict=True) if depth <= num_emitted)


def prior_path_probs(parents: Sequence[int]) -> list[float]:
    """Estimate for a source that makes none: a token's first child has the same chance everywhere, the next one the
    same share of what the first leaves, and so on."""
    probs: list[float] = []
    left: dict[int, float] = {}
    for parent in parents:
        remaining = left.get(parent, probs[parent] if parent >= 0 else 1.0)
        probs.append(remaining * PRIOR_ACCEPTANCE)
        left[parent] = remaining - probs[-1]
    return probs


@dataclass(slots=True)
class Record:
    """What a source promised and kept in one sequence, the latest steps counting most."""

    expected: float = 0.0
    accepted: float = 0.0

    def add(self, expected: float, accepted: int) -> None:
        self.expected = DECAY * self.expected + expected
        self.accepted = DECAY * self.accepted + accepted

    @property
    def correction(self) -> float:
        return (PRIOR_WEIGHT + self.accepted) / (PRIOR_WEIGHT + self.expected)


class _State:
    """Of a sequence: each source's record, and what there was to choose from, and was chosen, when the text had
    ``length`` tokens and at most ``limit`` were wanted; that holds for one draft."""

    def __init__(self, num_sources: int):
        self.records = [Record() for _ in range(num_sources)]
        self.length = self.limit = self.chosen = 0
        self.proposals: list[Proposal | None] = [None] * num_sources
        self.match_lens = [0] * num_sources

    def fits(self, row: DraftRow) -> bool:
        return self.length == len(row.token_ids) and self.limit >= row.num_draft_tokens


class CombinedDrafter(Drafter):
    """Drafts with several sources, one a row and step.

    Args:
        sources: in the order of preference.
        limits: most draft tokens of each.
        names: of each, by which rows say who may draft for them.
    """

    def __init__(self, sources: Sequence[Drafter], limits: Sequence[int], names: Sequence[str] = ()):
        self.sources, self.limits = list(sources), list(limits)
        self.feature_layers = tuple(dict.fromkeys(layer for source in sources for layer in source.feature_layers))
        self.names = list(names) or [""] * len(self.sources)
        self.cost = max(source.cost for source in sources)
        self.max_passes = _most([source.max_passes for source in sources if source.cost])
        self.makes_trees = any(source.makes_trees for source in sources)
        self.num_top_tokens = max(source.num_top_tokens for source in sources)
        self.stochastic = any(source.stochastic for source in sources)
        self.rolls_back = all(source.rolls_back for source in sources)
        self._seen = [not source.stochastic and not source.cost for source in sources]
        self._states: dict[int, _State] = {}

    def offers(self, rows: Sequence[DraftRow]) -> list[Offer]:
        self._look(rows)
        offers = []
        for row in rows:
            state = self._states[row.sequence_id]
            index = state.chosen
            proposal, name, source = state.proposals[index], self.names[index], self.sources[index]
            if proposal is None:
                (offer,) = source.offers([_limited(row, self.limits[index])])
                offers.append(replace(offer, source=name))
            else:
                offers.append(Offer(len(proposal.token_ids), state.match_lens[index], name, True, source.makes_trees))
        return offers

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        self._look([row for row in rows if not self._state(row).fits(row)])
        states = [self._states[row.sequence_id] for row in rows]
        for index, seen in enumerate(self._seen):
            if not seen:
                picked = [i for i, state in enumerate(states) if state.chosen == index and rows[i].num_draft_tokens]
                asked = [_limited(rows[i], self.limits[index]) for i in picked]
                self._ask(index, asked, [states[i] for i in picked])
        for state in states:
            state.limit = -1
        chosen = [state.proposals[state.chosen] or Proposal([], [], []) for state in states]
        return _joined([each.first(row.num_draft_tokens) for each, row in zip(chosen, rows, strict=True)])

    def observe_pass(self, judged: JudgedDraft) -> None:
        for source in self.sources:
            if source.num_top_tokens:
                source.observe_pass(replace(judged, top_token_ids=judged.top_token_ids[:, : source.num_top_tokens]))

    def observe_features(self, sequence_id: int, token_ids: list[int], start: int, features: Tensor) -> None:
        for source in self.sources:
            if source.feature_layers:
                wanted = [self.feature_layers.index(layer) for layer in source.feature_layers]
                own = features if len(wanted) == features.shape[1] else features[:, wanted]
                source.observe_features(sequence_id, token_ids, start, own)

    def observe(self, sequence_id: int, token_ids: list[int]) -> None:
        for source in self.sources:
            source.observe(sequence_id, token_ids)
        state = self._states.get(sequence_id)
        if state is None:
            return
        emitted = token_ids[state.length :]
        for record, proposal in zip(state.records, state.proposals, strict=True):
            if proposal is not None and proposal.token_ids:
                record.add(proposal.expected(len(emitted)), proposal.accepted(emitted))

    def forget(self, sequence_id: int) -> None:
        self._states.pop(sequence_id, None)
        for source in self.sources:
            source.forget(sequence_id)

    def close(self) -> None:
        for source in self.sources:
            source.close()

    def _look(self, rows: Sequence[DraftRow]) -> None:
        """Let the sources that may be looked at draft for each row, and choose one for it."""
        states = [self._state(row) for row in rows]
        for row, state in zip(rows, states, strict=True):
            state.length, state.limit = len(row.token_ids), row.num_draft_tokens
            state.proposals = [None] * len(self.sources)
        for index, source in enumerate(self.sources):
            if self._seen[index]:
                able = [i for i, row in enumerate(rows) if self._may_draft(index, row)]
                asked = [_limited(rows[i], self.limits[index]) for i in able]
                for i, offer in zip(able, source.offers(asked), strict=True):
                    states[i].match_lens[index] = offer.match_len
                self._ask(index, asked, [states[i] for i in able])
        for row, state in zip(rows, states, strict=True):
            state.chosen = self._choose(row, state)

    def _state(self, row: DraftRow) -> _State:
        return self._states.setdefault(row.sequence_id, _State(len(self.sources)))

    def _ask(self, index: int, rows: Sequence[DraftRow], states: Sequence[_State]) -> None:
        if rows:
            for state, proposal in zip(states, _rows_of(self.sources[index].propose(rows)), strict=True):
                state.proposals[index] = proposal

    def _may_draft(self, index: int, row: DraftRow) -> bool:
        return not row.methods or self.names[index] in row.methods

    def _choose(self, row: DraftRow, state: _State) -> int:
        """The source with the highest gain; those that draw are judged without their tokens."""
        gains = []
        for index, (source, limit, record, proposal) in enumerate(
            zip(self.sources, self.limits, state.records, state.proposals, strict=True)
        ):
            if not self._may_draft(index, row):
                gains.append(-1.0)
                continue
            chain = range(-1, min(limit, row.num_draft_tokens) - 1)
            path_probs = prior_path_probs(chain) if proposal is None else proposal.path_probs
            num_tokens = len(path_probs)
            expected = min(num_tokens, record.correction * sum(path_probs))
            num_passes = num_tokens if source.max_passes is None else min(num_tokens, source.max_passes)
            gains.append((1.0 + expected) / (1.0 + source.cost * num_passes) if num_tokens else 0.0)
        return gains.index(max(gains))


def _most(limits: Sequence[int | None]) -> int | None:
    """The highest limit; None if there is one without."""
    known = [limit for limit in limits if limit is not None]
    return max(known, default=None) if len(known) == len(limits) else None


def _limited(row: DraftRow, limit: int) -> DraftRow:
    return row if row.num_draft_tokens <= limit else replace(row, num_draft_tokens=limit)


def _rows_of(draft: Draft) -> list[Proposal]:
    proposals = []
    for i, count in enumerate(draft.num_draft_tokens):
        tokens, parents = draft.token_ids[i, :count].tolist(), draft.parents[i, :count].tolist()
        path_probs = prior_path_probs(parents) if draft.path_probs is None else draft.path_probs[i]
        probs = None if draft.probs is None else draft.probs[i, :count]
        proposals.append(Proposal(tokens, parents, path_probs, probs))
    return proposals


def _joined(proposals: Sequence[Proposal]) -> Draft:
    """One draft of all rows. If one was drawn, the others are said to be drawn from a law with one token."""
    drawn = next((row.probs for row in proposals if row.probs is not None), None)
    probs = None
    if drawn is not None:
        width = max(len(row.token_ids) for row in proposals)
        probs = torch.zeros(len(proposals), width, drawn.shape[-1], dtype=drawn.dtype, device=drawn.device)
        for i, row in enumerate(proposals):
            if row.probs is not None:
                probs[i, : len(row.token_ids)] = row.probs
            else:
                probs[i, range(len(row.token_ids)), row.token_ids] = 1.0
    return tree_draft(
        [row.token_ids for row in proposals],
        [row.parents for row in proposals],
        probs,
        [row.path_probs for row in proposals],
    )
