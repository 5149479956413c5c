"""Apply each row's acceptance rule to the target's logits.

The rows of a batch may follow different rules; rows of the same rule are judged together. All randomness is
keyed by the sequence and the position of the token that it decides.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from foredraft.config import SpeculativeConfig
from foredraft.engine.sequence import Sequence
from foredraft.sampling import (
    SamplingRow,
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
from foredraft.types import Draft, Verdict
from foredraft.verify import block, match, rejection, typical


def rule_for(config: SpeculativeConfig, is_greedy: bool, has_seed: bool) -> str:
    """The acceptance rule of a request: greedy, or the configured one, ``auto`` being resolved by the seed."""
    if is_greedy and not config.is_lossy:
        return "greedy"
    if config.acceptance_rule == "auto":
        return "coupled" if has_seed else "rejection"
    return config.acceptance_rule


class Verifier:
    """Decides what each row of a step emits."""

    def __init__(self, config: SpeculativeConfig):
        self._config = config

    def verify(self, sequences: Seq[Sequence], draft: Draft, logits_MV: Tensor) -> list[Verdict]:
        """Judge the draft.

        Args:
            sequences: the rows, each with one logits row per draft token and one more.
            logits_MV: ``[sum of (num_draft_tokens + 1), V]``, in the order of the rows.
        """
        tokens = [row[:n] for row, n in zip(draft.token_ids.tolist(), draft.num_draft_tokens, strict=True)]
        sampling = [
            sequence.sampling_row(tuple(drafted[:i]))
            for sequence, drafted in zip(sequences, tokens, strict=True)
            for i in range(len(drafted) + 1)
        ]
        adjusted_MV = adjust_logits(logits_MV, sampling)
        first = [0]
        for drafted in tokens:
            first.append(first[-1] + len(drafted) + 1)
        by_rule: dict[str, list[int]] = {}
        for row, sequence in enumerate(sequences):
            by_rule.setdefault(sequence.rule, []).append(row)
        verdicts: dict[int, Verdict] = {}
        for rule, rows in by_rule.items():
            if rule == "greedy":
                verdicts.update(_greedy(rows, tokens, first, adjusted_MV))
            elif rule in ("coupled", "match"):
                for row in rows:
                    verdicts[row] = _walk(sequences[row], tokens[row], first[row], adjusted_MV, sampling)
            else:
                verdicts.update(self._ratio(rule, rows, sequences, draft, tokens, first, adjusted_MV, sampling))
        return [verdicts[row] for row in range(len(sequences))]

    def _ratio(
        self,
        rule: str,
        rows: list[int],
        sequences: Seq[Sequence],
        draft: Draft,
        tokens: list[list[int]],
        first: list[int],
        adjusted_MV: Tensor,
        sampling: list[SamplingRow],
    ) -> dict[int, Verdict]:
        """The rules that compare probabilities: rejection, block, typical."""
        width = max(len(tokens[row]) for row in rows)
        picked = [first[row] + min(i, len(tokens[row])) for row in rows for i in range(width + 1)]
        probs = probs_from_logits(adjusted_MV[picked], [sampling[i].params for i in picked])
        target_probs = probs.view(len(rows), width + 1, -1)
        draft_ids = draft.token_ids[rows, :width]
        counts = torch.tensor([len(tokens[row]) for row in rows])
        draft_probs = None if draft.probs is None else draft.probs[rows, :width]
        noise = torch.tensor(
            [
                [
                    uniform(sequences[row].noise_seed, Stream.ACCEPT, round_position(len(sequences[row].token_ids), i))
                    for i in range(width)
                ]
                for row in rows
            ],
            dtype=torch.float64,
        ).view(len(rows), width)
        if rule == "block":
            accepted = block.count_accepted(block.stop_probs(draft_ids, counts, target_probs, draft_probs), noise)
            next_probs = block.next_token_probs(draft_ids, counts, target_probs, draft_probs, accepted)
        elif rule == "rejection":
            passes = rejection.accept_probs(draft_ids, counts, target_probs, draft_probs)
            accepted = rejection.count_accepted(passes, noise)
            next_probs = rejection.next_token_probs(draft_ids, counts, target_probs, draft_probs, accepted)
        else:
            passes = typical.accept_probs(
                draft_ids,
                counts,
                target_probs,
                self._config.posterior_threshold,
                self._config.posterior_alpha,
            )
            accepted = rejection.count_accepted(passes, noise)
            next_probs = typical.next_token_probs(target_probs, accepted)
        num_accepted = accepted.tolist()
        draws = torch.tensor(
            [
                uniform(sequences[row].noise_seed, Stream.RECOVER, len(sequences[row].token_ids) + n)
                for row, n in zip(rows, num_accepted, strict=True)
            ],
            dtype=torch.float64,
        )
        last = sample_inverse_cdf(next_probs, draws).tolist()
        return {row: _verdict(tokens[row], n, token) for row, n, token in zip(rows, num_accepted, last, strict=True)}


def _greedy(rows: list[int], tokens: list[list[int]], first: list[int], adjusted_MV: Tensor) -> dict[int, Verdict]:
    best = most_likely_tokens(adjusted_MV).tolist()
    width = max(len(tokens[row]) for row in rows)
    drafted = torch.tensor([[*tokens[r], *[0] * (width - len(tokens[r]))] for r in rows]).view(len(rows), width)
    wanted = torch.tensor([[best[first[r] + min(i, len(tokens[r]))] for i in range(width + 1)] for r in rows])
    counts = torch.tensor([len(tokens[r]) for r in rows])
    accepted = match.count_matches(drafted.long(), counts, wanted).tolist()
    return {row: _verdict(tokens[row], n, best[first[row] + n]) for row, n in zip(rows, accepted, strict=True)}


def _walk(
    sequence: Sequence, drafted: list[int], first: int, adjusted_MV: Tensor, sampling: list[SamplingRow]
) -> Verdict:
    """Draw the target's own token position by position while it equals the draft's.

    ``coupled`` draws it with the noise that the drafter used, ``match`` with a number of its own.
    """
    for i in range(len(drafted) + 1):
        at = slice(first + i, first + i + 1)
        probs = probs_from_logits(adjusted_MV[at], [sampling[first + i].params])
        position = len(sequence.token_ids) + i
        if sequence.rule == "coupled":
            noise = gumbel(sequence.noise_seed, Stream.TARGET, position, probs.shape[-1])
            token = int(sample_gumbel(probs, [noise]))
        else:
            number = uniform(sequence.noise_seed, Stream.TARGET, position)
            token = int(sample_inverse_cdf(probs, torch.tensor([number], dtype=torch.float64)))
        if i == len(drafted) or token != drafted[i]:
            return _verdict(drafted, i, token)
    raise AssertionError("the last position always returns")


def _verdict(drafted: list[int], num_accepted: int, token: int) -> Verdict:
    return Verdict([*drafted[:num_accepted], token], list(range(num_accepted)), num_accepted == len(drafted))
