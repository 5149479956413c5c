"""Engines with one planted fault each, as they have been shipped in the field."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.engine.sequence import Sequence
from foredraft.engine.verifier import Verifier
from foredraft.sampling import (
    Stream,
    adjust_logits,
    gumbel,
    probs_from_logits,
    round_position,
    sample_gumbel,
    sample_inverse_cdf,
    uniform,
)
from foredraft.types import Draft, SamplingParams, Verdict


class PlainVerifier(Verifier):
    """Token-by-token rejection sampling, written out for one row at a time and without a fault: the control.

    Faults override one of its parts.
    """

    def verify(self, sequences: Seq[Sequence], draft: Draft, logits_MV: Tensor) -> list[Verdict]:
        verdicts, first = [], 0
        for row, sequence in enumerate(sequences):
            count = draft.num_draft_tokens[row]
            drafted = draft.token_ids[row, :count].tolist()
            target_probs = self.target_probs(sequence, drafted, logits_MV[first : first + count + 1])
            draft_probs = self.draft_probs(draft, row, drafted, target_probs)
            verdicts.append(self.judge(sequence, drafted, target_probs, draft_probs))
            first += count + 1
        return verdicts

    def judge(self, sequence: Sequence, drafted: list[int], target: Tensor, draft: Tensor) -> Verdict:
        start = len(sequence.token_ids)
        for place, token in enumerate(drafted):
            number = uniform(sequence.noise_seed, Stream.ACCEPT, round_position(start, place))
            if number >= target[place, token] / draft[place, token]:
                return self.recover(sequence, drafted, place, self.recovery_law(target[place], draft[place]))
        number = uniform(sequence.noise_seed, Stream.RECOVER, start + len(drafted))
        return self.verdict(drafted, len(drafted), target[len(drafted)], number)

    @staticmethod
    def verdict(drafted: list[int], num_accepted: int, law: Tensor, number: float) -> Verdict:
        token = int(sample_inverse_cdf(law[None], torch.tensor([number], dtype=torch.float64)))
        return Verdict([*drafted[:num_accepted], token], list(range(num_accepted)), num_accepted == len(drafted))

    def target_probs(self, sequence: Sequence, drafted: list[int], logits_NV: Tensor) -> Tensor:
        rows = [sequence.sampling_row(tuple(drafted[:i])) for i in range(len(drafted) + 1)]
        params = [self.row_params(row.params, i == len(drafted)) for i, row in enumerate(rows)]
        return probs_from_logits(adjust_logits(logits_NV, rows), params)

    def draft_probs(self, draft: Draft, row: int, drafted: list[int], target: Tensor) -> Tensor:
        if draft.probs is not None:
            return draft.probs[row, : len(drafted)]
        return torch.nn.functional.one_hot(torch.tensor(drafted, dtype=torch.int64), target.shape[-1]).float()

    def row_params(self, params: SamplingParams, is_bonus: bool) -> SamplingParams:
        return params

    def recovery_law(self, target_V: Tensor, draft_V: Tensor) -> Tensor:
        residual = (target_V - draft_V).clamp(min=0.0)
        return residual if residual.sum() > 0 else target_V

    def recover(self, sequence: Sequence, drafted: list[int], place: int, law: Tensor) -> Verdict:
        number = uniform(sequence.noise_seed, Stream.RECOVER, len(sequence.token_ids) + place)
        return self.verdict(drafted, place, law, number)


class ResidualIsTarget(PlainVerifier):
    """Draws from the target after a rejection."""

    def recovery_law(self, target_V: Tensor, draft_V: Tensor) -> Tensor:
        return target_V


class NoTemperature(PlainVerifier):
    """Judges and draws at temperature 1."""

    def row_params(self, params: SamplingParams, is_bonus: bool) -> SamplingParams:
        return dataclasses.replace(params, temperature=1.0)


class FiltersOnBonusOnly(PlainVerifier):
    """Top-k and top-p reach the last row alone."""

    def row_params(self, params: SamplingParams, is_bonus: bool) -> SamplingParams:
        return params if is_bonus else dataclasses.replace(params, top_k=0, top_p=1.0, min_p=0.0)


class PositionOffByOne(PlainVerifier):
    """Judges each draft token after the first by the row of the token before it."""

    def target_probs(self, sequence: Sequence, drafted: list[int], logits_NV: Tensor) -> Tensor:
        shifted = [max(0, i - 1) for i in range(len(logits_NV))]
        return super().target_probs(sequence, drafted, logits_NV[shifted])


class SharedStream(PlainVerifier):
    """Draws the recovered token with the random number that the rejected draft token was drawn with."""

    def recover(self, sequence: Sequence, drafted: list[int], place: int, law: Tensor) -> Verdict:
        number = uniform(sequence.noise_seed, Stream.DRAFT, round_position(len(sequence.token_ids), place))
        return self.verdict(drafted, place, law, number)


class SharedNoise(PlainVerifier):
    """Draws drafts and recovered tokens with the same Gumbel noise (vLLM pull request 54282).

    Needs a :class:`GumbelDrafter`.
    """

    def recover(self, sequence: Sequence, drafted: list[int], place: int, law: Tensor) -> Verdict:
        noise = gumbel(sequence.noise_seed, Stream.DRAFT, len(sequence.token_ids) + place, len(law))
        return Verdict([*drafted[:place], int(sample_gumbel(law[None], [noise]))], list(range(place)), False)


class GumbelDrafter(DraftModelDrafter):
    """Draws with Gumbel noise of the draft's own stream: exact with a verifier that does not read it."""

    def _sample(self, chain: Any, probs: Tensor, is_narrow: bool) -> int:
        place = len(chain.row.token_ids) + len(chain.token_ids)
        return int(sample_gumbel(probs[None], [gumbel(chain.row.noise_seed, Stream.DRAFT, place, len(probs))]))


class SoftGreedyDrafter(DraftModelDrafter):
    """Proposes the likeliest tokens and says that they were drawn from the softmax."""

    def _sample(self, chain: Any, probs: Tensor, is_narrow: bool) -> int:
        return int(probs.argmax())
