"""What a draft said of each emitted token before the token was drawn, kept small."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foredraft.engine.sequence import Sequence as Running
from foredraft.types import Draft, StepOutput, Verdict

NUM_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Proposal:
    """The draft at one place of a text, given what was emitted before it.

    Attributes:
        token_ids: the proposed tokens, more than one in a tree. A deterministic draft fixes them beforehand.
        likely_ids, likely_probs: the 4,096 likeliest tokens of the law that a stochastic draft was drawn from;
            None for a deterministic one.
    """

    token_ids: tuple[int, ...]
    likely_ids: NDArray[np.int32] | None = None
    likely_probs: NDArray[np.float32] | None = None


class ProposalLog:
    """A watcher of an engine (``engine.watchers.append(log)``).

    Args:
        stochastic: the drafter draws its tokens, so they are fixed beforehand by no one. Under ``coupled`` they
            even come from the very noise that the target's token will be drawn with. A draft without
            probabilities then says nothing that may be asked about.

    Attributes:
        num_draft_tokens, num_accepted_tokens: of all steps.
    """

    def __init__(self, stochastic: bool) -> None:
        self._stochastic = stochastic
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self._found: dict[int, list[Proposal | None]] = defaultdict(list)

    def __call__(self, rows: list[Running], draft: Draft, verdicts: list[Verdict], outputs: list[StepOutput]) -> None:
        tokens, parents = draft.token_ids.tolist(), draft.parents.tolist()
        for row, (sequence, verdict, output) in enumerate(zip(rows, verdicts, outputs, strict=True)):
            count = draft.num_draft_tokens[row]
            self.num_draft_tokens += count
            self.num_accepted_tokens += min(verdict.num_accepted_tokens, len(output.token_ids))
            for place in range(len(output.token_ids)):
                parent = verdict.path[place - 1] if place else -1
                nodes = [node for node in range(count) if parents[row][node] == parent]
                self._found[sequence.sequence_id].append(self._proposal(draft, row, nodes, tokens[row]))

    def take(self, sequence_id: int) -> list[Proposal | None]:
        """The proposals of a finished text, one an output token; None where nothing was drafted."""
        return self._found.pop(sequence_id)

    def _proposal(self, draft: Draft, row: int, nodes: Sequence[int], tokens: Sequence[int]) -> Proposal | None:
        if not nodes or (draft.probs is None and self._stochastic):
            return None
        proposed = tuple(tokens[node] for node in nodes)
        if draft.probs is None:
            return Proposal(proposed)
        probs = draft.probs[row, nodes[0]]
        likely = probs.topk(min(NUM_KEPT, len(probs)))
        return Proposal(proposed, likely.indices.int().cpu().numpy(), likely.values.cpu().numpy())
