"""The interface of drafters, and how tokens become a :class:`~foredraft.types.Draft`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from foredraft.sampling import SamplingRow
from foredraft.types import Draft


@dataclass(frozen=True, slots=True)
class DraftRow:
    """What a drafter may know of a sequence. Nothing here may be changed.

    Attributes:
        token_ids: prompt and committed tokens.
        num_draft_tokens: how many are wanted; fewer are legal.
        noise_seed: key of the sequence's random streams.
        rule: the acceptance rule; under ``coupled`` a stochastic drafter draws with the target's noise.
        sampling_row: what the sampling pipeline needs for the token after a given draft prefix.
        prediction_token_ids: the output that the request expects; empty if it says nothing.
        methods: the parts of a combination that may draft for it; empty are all.
    """

    sequence_id: int
    token_ids: list[int]
    num_draft_tokens: int
    noise_seed: int
    rule: str
    sampling_row: Callable[[tuple[int, ...]], SamplingRow]
    prediction_token_ids: Sequence[int] = ()
    methods: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Offer:
    """What can be said of a row's draft before it is made, from the text alone.

    Attributes:
        num_draft_tokens: most that can come.
        match_len: of a copy, how many tokens before its place agree with the end of the text.
        source: which part of a combination would make it.
        is_free: making it takes no time worth planning for.
        branches: it may be a tree.
        num_unread: tokens of the text that its model reads first.
    """

    num_draft_tokens: int
    match_len: int = 0
    source: str = ""
    is_free: bool = False
    branches: bool = False
    num_unread: int = 0


@dataclass(frozen=True, slots=True)
class JudgedDraft:
    """A verified draft as the drafter sees it again.

    Attributes:
        token_ids: the token before the draft, then the draft's.
        parents: of the draft's tokens, as in :class:`~foredraft.types.Draft`.
        path: accepted nodes.
        top_token_ids: ``[len(token_ids), num_top_tokens]``, the target's likeliest tokens behind each, best first.
    """

    sequence_id: int
    token_ids: list[int]
    parents: list[int]
    path: list[int]
    top_token_ids: torch.Tensor


class Drafter(ABC):
    """Proposes tokens. Capabilities are declared and checked when the engine is built.

    Attributes:
        feature_layers: wants the target's hidden states of these layers, counted as in ``target.features``.
        makes_trees: proposals may branch; ``num_draft_tokens`` is then the number of nodes.
        num_top_tokens: how many of the target's likeliest tokens ``observe_pass`` is shown at each node.
        stochastic: tokens are drawn, and ``Draft.probs`` says from what.
        rolls_back: its state follows when draft tokens are rejected.
        reads_target_tokens: the caches of its models hold the target's token ids.
        cost: of a draft token, as a share of a target pass; 0 where no model is run.
        max_passes: most passes of its model that a draft takes, each of which costs ``cost``; None: one for each token.
        stop_below: a draft ends with a token that the drafter finds less likely than that; 0 never ends one early.
    """

    feature_layers: tuple[int, ...] = ()
    makes_trees: bool = False
    num_top_tokens: int = 0
    stochastic: bool = False
    rolls_back: bool = True
    reads_target_tokens: bool = True
    cost: float = 0.0
    max_passes: int | None = None
    stop_below: float = 0.0

    def offers(self, rows: Sequence[DraftRow]) -> list[Offer]:
        """What ``propose`` could draft for the rows of a step; asked before it, each row with its limit."""
        return [Offer(row.num_draft_tokens, branches=self.makes_trees, num_unread=self.num_unread(row)) for row in rows]

    def num_unread(self, row: DraftRow) -> int:
        """How many tokens of the text its model would have to read before it drafts, states of the target or tokens."""
        return 0

    @abstractmethod
    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        """Draft for the rows of a step; a row with ``num_draft_tokens`` 0 gets none."""

    def observe_pass(self, judged: JudgedDraft) -> None:
        """What the target made of a draft; called before ``observe``, if ``num_top_tokens`` is set.

        Among several sources the draft may be another one's.
        """

    def observe_features(self, sequence_id: int, token_ids: list[int], start: int, features: torch.Tensor) -> None:
        """The hidden states of tokens that were committed to the target's cache, before ``observe``.

        They come in order, those of every token once, parts of a prompt too; of a sequence that was forgotten they
        come again, and some of the last ones where the target's state goes back after a rejection. Those of a prefix
        that another sequence computed come before the sequence's first step.

        Args:
            token_ids: the committed text; at least one token of it follows those with features.
            start: place of the first of these tokens in the text.
            features: ``[tokens, layers, hidden]``, in the order of ``feature_layers``.
        """

    def observe(self, sequence_id: int, token_ids: list[int]) -> None:
        """A step ended: ``token_ids`` is now the sequence's committed text."""

    def forget(self, sequence_id: int) -> None:
        """A sequence ended, or was preempted and begins anew later; drop what is kept of it."""

    def close(self) -> None:
        """The engine is done with; write what should outlive it."""


def chain_draft(
    tokens: Sequence[Sequence[int]],
    probs: torch.Tensor | None = None,
    path_probs: list[list[float]] | None = None,
) -> Draft:
    """A draft of chains, padded to the longest; see :func:`tree_draft`."""
    return tree_draft(tokens, [range(-1, len(row) - 1) for row in tokens], probs, path_probs)


def tree_draft(
    tokens: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]],
    probs: torch.Tensor | None = None,
    path_probs: list[list[float]] | None = None,
) -> Draft:
    """A draft of trees, padded to the largest.

    Args:
        tokens: draft tokens per row, parents before children.
        parents: per token the index of its parent in the row, -1 for a child of the text.
        probs: ``[B, N, V]`` they were drawn from, or None.
        path_probs: per token the source's own estimate, see :class:`~foredraft.types.Draft`.
    """
    counts = [len(row) for row in tokens]
    width = max(counts, default=0)

    def padded(values: Sequence[Sequence[int]]) -> torch.Tensor:
        filled = [[*row, *[0] * (width - len(row))] for row in values]
        return torch.tensor(filled, dtype=torch.int64).view(len(counts), width)

    return Draft(padded(tokens), padded(parents), counts, probs, path_probs)
