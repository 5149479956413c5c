"""A smaller language model drafts token by token (Leviathan et al. 2023; Chen et al. 2023).

It keeps its own cache. The cache may run ahead of the text while drafting; ``observe`` cuts it back, so
between steps it holds a prefix of the committed tokens, and the next draft begins by feeding the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class _Chain:
    """A draft in the making: the committed text in the draft model's tokens, and the tokens drawn after it."""

    row: DraftRow
    text: list[int]
    token_ids: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)


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
        return self.draft(rows, [row.token_ids for row in rows])

    def draft(self, rows: Sequence[DraftRow], texts: Sequence[list[int]]) -> Draft:
        """Draft for rows whose committed text is ``texts`` in the tokens that the draft model reads."""
        chains = [_Chain(row, text) for row, text in zip(rows, texts, strict=True)]
        active = [chain for chain in chains if self._room(chain.row, chain.text)]
        keep_probs = any(not row.sampling_row(()).params.is_greedy for row in rows)
        for chain in active:
            self._catch_up(chain.row.sequence_id, chain.text)
        while active:
            drawn = self._draw(active, self._next_logits(active), keep_probs)
            active = [chain for chain in drawn if len(chain.token_ids) < self._room(chain.row, chain.text)]
        width = max((len(chain.token_ids) for chain in chains), default=0)
        probs = self._stack([chain.probs for chain in chains], width) if keep_probs else None
        return chain_draft([chain.token_ids for chain in chains], probs)

    def observe(self, sequence_id: int, token_ids: list[int]) -> None:
        """Cut the cache back to what the target kept of the tokens fed, all but the last: the next draft feeds it."""
        self.keep(sequence_id, token_ids, self._agreed.get(sequence_id, 0))

    def keep(self, sequence_id: int, text: list[int], num_settled: int) -> None:
        """Cut the cache back to its common prefix with a text.

        A state that can only be restored goes back further, and more is fed again.

        Args:
            text: in the tokens that the draft model reads.
            num_settled: so many of its tokens are those of the last call, if it had as many.
        """
        fed = self._fed.get(sequence_id)
        if fed is None:
            return
        known = min(self._agreed[sequence_id], num_settled)
        agreed = max(0, min(_common_prefix(fed, text, known), len(text) - 1))
        agreed = self.model.slots.truncate(sequence_id, agreed)
        self._agreed[sequence_id] = agreed
        del fed[agreed:]

    def forget(self, sequence_id: int) -> None:
        if self._fed.pop(sequence_id, None) is not None:
            del self._agreed[sequence_id]
            self.model.slots.close(sequence_id)

    def _room(self, row: DraftRow, text: list[int]) -> int:
        """Tokens that can be drafted; none once the text holds a token that the draft model does not know."""
        fed = len(self._fed.get(row.sequence_id, ()))
        if not text or max(text[fed:], default=0) >= self.model.vocab_size:
            return 0
        return max(0, min(row.num_draft_tokens, self.model.max_model_len - len(text)))

    def _catch_up(self, sequence_id: int, text: list[int]) -> None:
        """Open a slot; feed a long text, all but its last token; a short one goes with the draft's first pass."""
        if sequence_id not in self._fed:
            self.model.slots.open(sequence_id)
            self._fed[sequence_id] = []
            self._agreed[sequence_id] = 0
        fed = self._fed[sequence_id]
        missing = text[len(fed) : -1]
        if len(missing) > LONG_ROW:
            self.model.prefill(sequence_id, missing, PREFILL_CHUNK)
            fed.extend(missing)

    def _next_logits(self, chains: list[_Chain]) -> Tensor:
        passes = []
        for chain in chains:
            fed = len(self._fed[chain.row.sequence_id])
            drafted = self._read_drafted(chain.token_ids[max(0, fed - len(chain.text)) :])
            passes.append(PassRow(chain.row.sequence_id, [*chain.text[fed:], *drafted], 1))
        logits = self.model.forward(passes)
        for part in passes:
            self.model.slots.commit(part.sequence_id, len(part.token_ids))
            self._fed[part.sequence_id].extend(part.token_ids)
        return self._fit(logits)

    def _read_drafted(self, token_ids: list[int]) -> list[int]:
        """Drafted tokens as the draft model reads them."""
        return token_ids

    def _fit(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary; -inf for what the draft model cannot say."""
        missing = self.vocab_size - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[:, : self.vocab_size]

    def _draw(self, chains: list[_Chain], logits: Tensor, keep_probs: bool) -> list[_Chain]:
        """Add a token to each chain, with the distribution it was drawn from if ``keep_probs``.

        A chain that the request's options leave no token that the draft model can say gets none, and ends.

        Returns:
            the chains that got a token.
        """
        adjusted = adjust_logits(logits, [chain.row.sampling_row(tuple(chain.token_ids)) for chain in chains])
        possible = torch.isfinite(adjusted.amax(dim=-1))
        if not possible.all():
            chains = [chain for chain, can in zip(chains, possible.tolist(), strict=True) if can]
            adjusted = adjusted[possible]
        if not keep_probs:  # every row is greedy
            for chain, token in zip(chains, most_likely_tokens(adjusted).tolist(), strict=True):
                chain.token_ids.append(token)
            return chains
        all_probs = probs_from_logits(adjusted, [chain.row.sampling_row(()).params for chain in chains])
        for chain, probs in zip(chains, all_probs, strict=True):
            chain.token_ids.append(self._sample(chain, probs))
            chain.probs.append(probs)
        return chains

    def _sample(self, chain: _Chain, probs: Tensor) -> int:
        row, position = chain.row, len(chain.row.token_ids)
        if row.rule == "coupled":
            noise = gumbel(row.noise_seed, Stream.TARGET, position + len(chain.token_ids), self.vocab_size)
            return int(sample_gumbel(probs[None], [noise]))
        key = round_position(position, len(chain.token_ids))
        u = torch.tensor([uniform(row.noise_seed, Stream.DRAFT, key)], dtype=torch.float64)
        return int(sample_inverse_cdf(probs[None], u))

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
