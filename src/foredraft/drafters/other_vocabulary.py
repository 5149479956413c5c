"""Draft models with another tokenizer than the target's (Timor et al. 2025, "Accelerating LLM Inference with Lossless
Speculative Decoding Algorithms for Heterogeneous Vocabularies", 2502.05202).

Both drafters give the draft model the committed text in its own tokens. They differ in how its words come back:

    SharedVocabularyDrafter   token by token, from the tokens that both vocabularies have (TLI)
    TextAlignmentDrafter      as text, which the target's tokenizer cuts into tokens (SLEM; transformers
                              calls it universal assisted generation)

A text that ends within a character gets no draft: neither tokenizer can say the rest of it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import torch
from torch import Tensor

from foredraft.drafters.base import Drafter, DraftRow, chain_draft
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.token_text import TokenText, shared_tokens
from foredraft.drafters.translation import Translation
from foredraft.errors import IncompatibleDrafterError
from foredraft.sampling import SamplingRow
from foredraft.target.forward import TargetModel
from foredraft.types import Draft, SamplingParams

_GREEDY = SamplingRow(SamplingParams(temperature=0.0))


class _TranslatingDrafter(Drafter):
    """Keeps the draft model's cache at the committed text, as the draft model's tokenizer reads it."""

    reads_target_tokens = False

    def __init__(self, inner: DraftModelDrafter, target: TokenText, draft: TokenText):
        self._inner, self._target, self._draft = inner, target, draft
        self._translations: dict[int, Translation] = {}

    def observe(self, sequence_id: int, token_ids: list[int]) -> None:
        if sequence_id in self._translations:
            self._follow(sequence_id, token_ids)

    def forget(self, sequence_id: int) -> None:
        self._translations.pop(sequence_id, None)
        self._inner.forget(sequence_id)

    def _texts(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """The committed texts in the draft model's tokens; empty where nothing is to be drafted."""
        texts: list[list[int]] = []
        for row in rows:
            if not row.num_draft_tokens:
                texts.append([])
                continue
            if row.sequence_id not in self._translations:
                self._translations[row.sequence_id] = Translation(self._target, self._draft)
            text = self._follow(row.sequence_id, row.token_ids)
            texts.append([] if self._translations[row.sequence_id].ends_in_character else text)
        return texts

    def _follow(self, sequence_id: int, token_ids: list[int]) -> list[int]:
        """Translate what is new and cut the cache back to where the translation did not change."""
        translation = self._translations[sequence_id]
        num_settled = translation.num_settled
        text = translation.extend(token_ids)
        self._inner.keep(sequence_id, text, num_settled)
        return text


class SharedVocabularyDrafter(_TranslatingDrafter):
    """Drafts tokens that both vocabularies have, from the draft model's distribution restricted to them (TLI).

    Tokens are shared if they spell the same bytes. ``Draft.probs`` is the restricted and renormalised distribution
    over the target's ids, after the request's filters, so every rule of acceptance is exact. Under ``coupled``, drafts
    are drawn with the target's noise on the target's ids.

    Raises:
        IncompatibleDrafterError: no token is shared.
    """

    stochastic = True

    def __init__(self, model: TargetModel, target: TokenText, draft: TokenText):
        shared = shared_tokens(target, draft)
        if not shared:
            raise IncompatibleDrafterError(
                "the vocabularies of target and draft model share no token; use heterogeneous_vocab_method='slem'"
            )
        super().__init__(_SharedTokensDrafter(model, len(target.pieces), shared), target, draft)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        return self._inner.draft(rows, self._texts(rows))


class _SharedTokensDrafter(DraftModelDrafter):
    """Draws among the shared tokens, by the target's ids, and feeds them by the draft model's."""

    def __init__(self, model: TargetModel, vocab_size: int, shared: dict[int, int]):
        super().__init__(model, vocab_size)
        self._shared = shared
        self._target_ids = torch.tensor(list(shared.keys()), device=model.device)
        self._draft_ids = torch.tensor(list(shared.values()), device=model.device)

    def _read_drafted(self, token_ids: list[int]) -> list[int]:
        return [self._shared[token_id] for token_id in token_ids]

    def _fit(self, logits: Tensor) -> Tensor:
        fitted = logits.new_full((len(logits), self.vocab_size), float("-inf"))
        fitted[:, self._target_ids] = logits[:, self._draft_ids]
        return fitted


class TextAlignmentDrafter(_TranslatingDrafter):
    """Drafts text greedily and proposes the target's tokens of it (SLEM). Works with any two tokenizers.

    The proposal is a function of the committed text, so it has no probabilities. The draft model takes as many steps as
    tokens are wanted; of the target's tokens that come out, more are cut off and fewer are legal. The draft ends
    before a special token of either vocabulary.
    """

    def __init__(self, model: TargetModel, target: TokenText, draft: TokenText):
        super().__init__(DraftModelDrafter(model, len(draft.pieces)), target, draft)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        greedy = [replace(row, sampling_row=lambda _: _GREEDY) for row in rows]
        draft = self._inner.draft(greedy, self._texts(rows))
        drafts = zip(rows, draft.token_ids.tolist(), draft.num_draft_tokens, strict=True)
        return chain_draft([self._in_target(token_ids[:n])[: row.num_draft_tokens] for row, token_ids, n in drafts])

    def _in_target(self, token_ids: list[int]) -> list[int]:
        """Drafted tokens as tokens of the target that follow the committed ones, up to a special token."""
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(self._draft.spell(token_ids))
        if not text:
            return []
        return list(takewhile(lambda index: self._target.piece(index) is not None, self._target.encode(text)))
