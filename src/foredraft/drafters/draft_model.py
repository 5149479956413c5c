"""A smaller language model drafts token by token (Leviathan et al. 2023; Chen et al. 2023).

It keeps its own cache. The cache may run ahead of the text while drafting; ``observe`` cuts it back, so
between steps it holds a prefix of the committed tokens, and the next draft begins by feeding the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.drafters.base import Drafter, DraftRow, chain_draft
from foredraft.sampling import (
    Stream,
    adjust_logits,
    gumbel,
    most_likely_tokens,
    probs_from_logits,
    round_position,
    sample_gumbel,
    sample_inverse_cdf,
    uniform,
)
from foredraft.target.forward import TargetModel
from foredraft.target.layout import PassRow
from foredraft.target.segments import LONG_ROW
from foredraft.types import Draft

PREFILL_CHUNK = 512


class DraftModelDrafter(Drafter):
    """Drafts with a second model of the same vocabulary.

    Args:
        model: the draft model with its own slots.
        vocab_size: of the target; a draft vocabulary that is padded otherwise is cut or filled up.
    """

    stochastic = True

    def __init__(self, model: TargetModel, vocab_size: int):
        self.model, self.vocab_size = model, vocab_size
        self._fed: dict[int, list[int]] = {}  # the tokens behind each cache
        self._agreed: dict[int, int] = {}  # how many of them are known to be committed text

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        drafts: list[list[int]] = [[] for _ in rows]
        drawn: list[list[Tensor]] = [[] for _ in rows]
        active = [i for i, row in enumerate(rows) if self._room(row)]
        keep_probs = any(not row.sampling_row(()).params.is_greedy for row in rows)
        for i in active:
            self._catch_up(rows[i])
        while active:
            logits = self._next_logits([(rows[i], drafts[i]) for i in active])
            for i, token, probs in self._draw([(i, rows[i], drafts[i]) for i in active], logits, keep_probs):
                drafts[i].append(token)
                drawn[i].append(probs)
            active = [i for i in active if len(drafts[i]) < self._room(rows[i])]
        width = max(map(len, drafts), default=0)
        return chain_draft(drafts, self._stack(drawn, width) if keep_probs else None)

    def observe(self, sequence_id: int, token_ids: list[int]) -> None:
        """Cut the cache back to what the target kept of the tokens fed, all but the last: the next draft feeds it.

        A state that can only be restored goes back further, and more is fed again.
        """
        fed = self._fed.get(sequence_id)
        if fed is None:
            return
        agreed = min(_common_prefix(fed, token_ids, self._agreed[sequence_id]), len(token_ids) - 1)
        agreed = self.model.slots.truncate(sequence_id, agreed)
        self._agreed[sequence_id] = agreed
        del fed[agreed:]

    def forget(self, sequence_id: int) -> None:
        if self._fed.pop(sequence_id, None) is not None:
            del self._agreed[sequence_id]
            self.model.slots.close(sequence_id)

    def _room(self, row: DraftRow) -> int:
        """Tokens that can be drafted; none once the text holds a token that the draft model does not know."""
        fed = len(self._fed.get(row.sequence_id, ()))
        if max(row.token_ids[fed:], default=0) >= self.model.vocab_size:
            return 0
        return max(0, min(row.num_draft_tokens, self.model.max_model_len - len(row.token_ids)))

    def _catch_up(self, row: DraftRow) -> None:
        """Open a slot; feed a long text, all but its last token; a short one goes with the draft's first pass."""
        if row.sequence_id not in self._fed:
            self.model.slots.open(row.sequence_id)
            self._fed[row.sequence_id] = []
            self._agreed[row.sequence_id] = 0
        fed = self._fed[row.sequence_id]
        missing = row.token_ids[len(fed) : -1]
        if len(missing) > LONG_ROW:
            self.model.prefill(row.sequence_id, missing, PREFILL_CHUNK)
            fed.extend(missing)

    def _next_logits(self, rows: list[tuple[DraftRow, list[int]]]) -> Tensor:
        passes = []
        for row, draft in rows:
            fed = self._fed[row.sequence_id]
            tokens = [*row.token_ids[len(fed) :], *draft[max(0, len(fed) - len(row.token_ids)) :]]
            passes.append(PassRow(row.sequence_id, tokens, 1))
        logits = self.model.forward(passes)
        for part in passes:
            self.model.slots.commit(part.sequence_id, len(part.token_ids))
            self._fed[part.sequence_id].extend(part.token_ids)
        return self._fit(logits)

    def _fit(self, logits: Tensor) -> Tensor:
        missing = self.vocab_size - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[:, : self.vocab_size]

    def _draw(
        self, rows: list[tuple[int, DraftRow, list[int]]], logits: Tensor, keep_probs: bool
    ) -> list[tuple[int, int, Tensor]]:
        """One token a row, with the distribution that it was drawn from (of no use unless ``keep_probs``)."""
        sampling = [row.sampling_row(tuple(draft)) for _, row, draft in rows]
        adjusted = adjust_logits(logits, sampling)
        if not keep_probs:  # every row is greedy
            tokens = most_likely_tokens(adjusted).tolist()
            return [(i, token, adjusted) for (i, _, _), token in zip(rows, tokens, strict=True)]
        probs = probs_from_logits(adjusted, [s.params for s in sampling])
        out = []
        for at, (i, row, draft) in enumerate(rows):
            if row.rule == "coupled":
                noise = gumbel(row.noise_seed, Stream.TARGET, len(row.token_ids) + len(draft), self.vocab_size)
                token = sample_gumbel(probs[at : at + 1], [noise])
            else:
                key = round_position(len(row.token_ids), len(draft))
                u = torch.tensor([uniform(row.noise_seed, Stream.DRAFT, key)], dtype=torch.float64)
                token = sample_inverse_cdf(probs[at : at + 1], u)
            out.append((i, int(token), probs[at]))
        return out

    def _stack(self, drawn: list[list[Tensor]], width: int) -> Tensor:
        """``[B, width, V]``; zeros where nothing was drawn."""
        stacked = torch.zeros(len(drawn), width, self.vocab_size)
        for i, row in enumerate(drawn):
            for j, probs in enumerate(row):
                stacked[i, j] = probs
        return stacked


def _common_prefix(fed: list[int], token_ids: list[int], start: int) -> int:
    """Length of the common prefix, at least ``start`` tokens of which are known to agree."""
    end = start
    while end < min(len(fed), len(token_ids)) and fed[end] == token_ids[end]:
        end += 1
    return end
