"""The greedy audit: does speculation change a single token, and if it does, was it rounding or a fault?

Where two texts part, the model's own logits are computed there by plain passes of several shapes. What these
differ by is the numerical noise of the place. Two tokens whose logits lie within twice the noise are a near-tie:
each may be the largest in one pass or another. A token further behind than that is a fault.
"""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from foredraft.engine.engine import Engine
from foredraft.engine.sequence import Sequence as Running
from foredraft.lab.audit.law import Scores, adjusted_scores, measure_noise, text_logits
from foredraft.target.forward import TargetModel
from foredraft.types import Request, SamplingParams

NOISE_TOKENS = 8
"""So many tokens up to a place are fed in passes of other shapes to see how far the logits move."""
ROUNDING = 1e-5
"""Penalties are float32 in the engine and float64 here."""

Tell = Callable[[str, float], None]


class GreedyVerdict(enum.StrEnum):
    """Of a text, and of an audit: the worst of its texts."""

    TOKEN_IDENTICAL = "token-identical"
    NEAR_TIE = "near-tie"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token at which a text is not what it should be.

    Attributes:
        prompt: number of the prompt.
        position: of the token within the output, from 0.
        token, plain_token: of the engine and of plain decoding (None: the text had ended). They are equal where
            both texts leave the model's own choice.
        gap: between the two best logits there.
        behind: by how much the logit of the worse of the two tokens lies below the best.
        noise: largest difference of the logits there between passes of other shapes.
    """

    prompt: int
    position: int
    token: int | None
    plain_token: int | None
    gap: float
    behind: float
    noise: float

    @property
    def verdict(self) -> GreedyVerdict:
        return GreedyVerdict.NEAR_TIE if self.behind <= 2.0 * self.noise + ROUNDING else GreedyVerdict.FAULT


@dataclass(frozen=True, slots=True)
class GreedyResult:
    """What the greedy audit found.

    Attributes:
        num_texts, num_tokens: compared.
        divergences: at most one a text.
        smallest_gap: between the two best logits, over all places of the plain texts.
        interrupted: by Ctrl-C; nothing has been compared then.
    """

    params: SamplingParams
    num_texts: int
    num_tokens: int
    divergences: list[Divergence]
    smallest_gap: float
    num_draft_tokens: int
    num_accepted_tokens: int
    interrupted: bool
    total_s: float

    @property
    def verdict(self) -> GreedyVerdict:
        found = {divergence.verdict for divergence in self.divergences}
        order = (GreedyVerdict.FAULT, GreedyVerdict.NEAR_TIE)
        return next((verdict for verdict in order if verdict in found), GreedyVerdict.TOKEN_IDENTICAL)


def audit_greedy(
    engine: Engine,
    plain: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    tell: Tell = lambda label, fraction: None,
) -> GreedyResult:
    """Decode prompts with and without drafts, and hold both against the model's own logits.

    Args:
        engine: idle; the one under audit.
        plain: idle; decodes without drafts, perhaps on the same target.
        prompts: token ids.
        params: of every text, at temperature 0.
    """
    started = time.perf_counter()
    total = 2 * len(prompts)
    ours, ours_interrupted = _decode(engine, prompts, params, lambda done: tell("drafted texts", done / total))
    theirs: list[Running] = []
    theirs_interrupted = False
    if not ours_interrupted:
        theirs, theirs_interrupted = _decode(
            plain, prompts, params, lambda done: tell("plain texts", (len(prompts) + done) / total)
        )
    divergences, smallest_gap = [], float("inf")
    if not theirs_interrupted:
        for number, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            found, gap = _compare(engine.target, number, one, other, engine.config.max_draft_tokens + 1)
            divergences += [] if found is None else [found]
            smallest_gap = min(smallest_gap, gap)
    return GreedyResult(
        params=params,
        num_texts=len(theirs),
        num_tokens=sum(len(each.output_token_ids) for each in theirs),
        divergences=divergences,
        smallest_gap=smallest_gap,
        num_draft_tokens=sum(each.metrics.num_draft_tokens for each in ours),
        num_accepted_tokens=sum(each.metrics.num_accepted_tokens for each in ours),
        interrupted=ours_interrupted or theirs_interrupted,
        total_s=time.perf_counter() - started,
    )


def _decode(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams, tell: Callable[[int], None]
) -> tuple[list[Running], bool]:
    sequences: list[Running] = []
    try:
        for number, prompt in enumerate(prompts):
            sequences.append(engine.add_request(Request(f"audit-{number}", list(prompt), params)))
        while engine.has_unfinished_requests:
            engine.step()
            tell(sum(sequence.finish_reason is not None for sequence in sequences))
    except KeyboardInterrupt:
        return sequences, True
    finally:
        for sequence in sequences:
            engine.abort(sequence.request.request_id)
    return sequences, False


def _compare(
    target: TargetModel, number: int, ours: Running, plain: Running, width: int
) -> tuple[Divergence | None, float]:
    """The first place where the texts part, or where both leave the model's own choice by more than rounding."""
    output, plain_output = ours.output_token_ids, plain.output_token_ids
    scores = _scores(target, plain)
    best_two = np.sort(scores, axis=-1)[:, -2:]
    smallest_gap = float((best_two[:, 1] - best_two[:, 0]).min())
    parting = next(
        (at for at, (one, other) in enumerate(itertools.zip_longest(output, plain_output)) if one != other), None
    )
    behind = scores.max(axis=-1) - scores[np.arange(len(plain_output)), plain_output]
    suspects = [int(at) for at in np.flatnonzero(behind) if parting is None or at < parting]
    for at in suspects:
        found = _divergence(target, number, ours, plain, at, scores, width)
        if found.verdict is GreedyVerdict.FAULT:
            return found, smallest_gap
    if parting is None:
        return None, smallest_gap
    return _divergence(target, number, ours, plain, parting, scores, width), smallest_gap


def _scores(target: TargetModel, sequence: Running) -> Scores:
    """Logits with penalties and bans from which each output token was to be chosen, ``[n, V]``."""
    prompt, output = sequence.request.prompt_token_ids, sequence.output_token_ids
    logits = text_logits(target, sequence.token_ids, len(output))
    params = sequence.request.params
    rows = [adjusted_scores(row, params, prompt, output[:at], sequence.stop_ids) for at, row in enumerate(logits)]
    return np.stack(rows)


def _divergence(
    target: TargetModel, number: int, ours: Running, plain: Running, at: int, scores: Scores, width: int
) -> Divergence:
    token = ours.output_token_ids[at] if at < len(ours.output_token_ids) else None
    plain_token = plain.output_token_ids[at] if at < len(plain.output_token_ids) else None
    if token is None or plain_token is None:  # one text ended where the other went on: never a matter of rounding
        return Divergence(number, at, token, plain_token, float("nan"), float("inf"), 0.0)
    best_two = np.sort(scores[at])[-2:]
    text = plain.token_ids[: plain.num_prompt_tokens + at + 1]
    noise = measure_noise(target, text, max(1, len(text) - NOISE_TOKENS), plain.request.params, width)
    behind = float(best_two[1] - min(scores[at][token], scores[at][plain_token]))
    return Divergence(number, at, token, plain_token, float(best_two[1] - best_two[0]), behind, noise.logits)
