"""From verdicts to what the user gets: cut at the first stop, count, detokenize.

Everything is cut at the same token: ids, text, log-probabilities and counts. Plain decoding goes the same way
with blocks of one token, so the result does not depend on where in a block a stop falls.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from foredraft.engine.sequence import Sequence
from foredraft.sampling import top_logprobs
from foredraft.types import Draft, FinishReason, StepOutput, Verdict


def deliver(sequences: Seq[Sequence], draft: Draft, verdicts: Seq[Verdict], logits_MV: Tensor) -> list[StepOutput]:
    """Append the emitted tokens to their sequences, up to the first stop."""
    outputs, first = [], 0
    for i, (sequence, verdict) in enumerate(zip(sequences, verdicts, strict=True)):
        count = draft.num_draft_tokens[i]
        tokens = _keep(sequence, verdict.token_ids)
        logprobs = None
        if sequence.request.params.logprobs is not None:
            rows = logits_MV[[first, *(first + 1 + node for node in verdict.path)][: len(tokens)]]
            logprobs = top_logprobs(rows, torch.tensor(tokens, device=rows.device), sequence.request.params.logprobs)
            sequence.logprobs += logprobs
        _count(sequence, draft.depths(i), verdict, len(tokens))
        finished = sequence.finish_reason is not None
        text = sequence.detokenizer.take(finished)
        outputs.append(
            StepOutput(
                sequence.request.request_id,
                tokens,
                text,
                logprobs,
                sequence.finish_reason,
                sequence.stop_reason,
            )
        )
        first += count + 1
    return outputs


def _keep(sequence: Sequence, emitted: list[int]) -> list[int]:
    """Append tokens one by one until something ends the sequence; returns those that were kept."""
    kept = []
    min_tokens = sequence.request.params.min_tokens
    for token in emitted:
        kept.append(token)
        sequence.token_ids.append(token)
        stop = sequence.detokenizer.append(token, may_stop=sequence.num_output_tokens >= min_tokens)
        if token in sequence.stop_ids:
            is_eos = token not in sequence.request.params.stop_token_ids
            _finish(sequence, FinishReason.STOP, None if is_eos else token)
        elif stop is not None:
            _finish(sequence, FinishReason.STOP, stop)
        elif sequence.room <= 0:
            _finish(sequence, FinishReason.LENGTH, None)
        if sequence.finish_reason is not None:
            break
    if sequence.counts is not None:
        sequence.counts.append(kept)
    return kept


def _finish(sequence: Sequence, reason: FinishReason, stop_reason: int | str | None) -> None:
    sequence.finish_reason, sequence.stop_reason = reason, stop_reason
    sequence.detokenizer.finish()


def _count(sequence: Sequence, depths: list[int], verdict: Verdict, num_kept: int) -> None:
    """Counters from delivered tokens: an accepted token behind a stop counts nowhere."""
    metrics = sequence.metrics
    accepted = min(verdict.num_accepted_tokens, num_kept)
    metrics.num_target_passes += 1
    metrics.num_emitted_tokens += num_kept
    metrics.num_accepted_tokens += accepted
    if depths:
        metrics.num_drafts += 1
        metrics.num_draft_tokens += len(depths)
        missing = max(depths) - len(metrics.drafted_per_position)
        metrics.drafted_per_position += [0] * missing
        metrics.accepted_per_position += [0] * missing
        for i in range(max(depths)):
            metrics.drafted_per_position[i] += 1
            metrics.accepted_per_position[i] += i < accepted
