"""A smaller language model drafts token by token (Leviathan et al. 2023; Chen et al. 2023).

It keeps its own cache. The cache may run ahead of the text while drafting; ``observe`` cuts it back, so
between steps it holds a prefix of the committed tokens, and the next draft begins by feeding the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.drafters.autoregressive import AutoregressiveDrafter, Chain
from foredraft.drafters.base import DraftRow
from foredraft.target.forward import TargetModel
from foredraft.target.layout import PassRow
from foredraft.target.segments import LONG_ROW

PREFILL_CHUNK = 512


class DraftModelDrafter(AutoregressiveDrafter):
    """Drafts with a second model of the same vocabulary.

    Args:
        model: the draft model with its own slots.
        vocab_size: of the target; a draft vocabulary that is padded otherwise is cut or filled up.
    """

    def __init__(self, model: TargetModel, vocab_size: int):
        super().__init__(vocab_size)
        self.model = model
        self._fed: dict[int, list[int]] = {}  # the tokens behind each cache
        self._agreed: dict[int, int] = {}  # how many of them are known to be committed text

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

    def num_unread(self, row: DraftRow) -> int:
        return max(0, len(row.token_ids) - len(self._fed.get(row.sequence_id, ())))

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

    def _next_logits(self, chains: list[Chain]) -> Tensor:
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


def _common_prefix(fed: list[int], token_ids: list[int], start: int) -> int:
    """Length of the common prefix, at least ``start`` tokens of which are known to agree."""
    end = start
    while end < min(len(fed), len(token_ids)) and fed[end] == token_ids[end]:
        end += 1
    return end
