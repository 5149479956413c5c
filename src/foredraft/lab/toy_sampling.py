"""The toy language sampled draw by draw, in the order of the seed document, but without its Python loops.

Every draw takes the next uniform number of one generator, and how many a round takes depends on what is
accepted, so rounds cannot be laid side by side. Yet a round is a function of the position in the stream at
which it starts: it is computed for *every* position at once, and the true starts are then found by following
the jumps. The result equals the draw-by-draw program bit for bit.

    uniforms  u0 u1 u2 u3 u4 u5 u6 u7 u8 ...      k = 3, second draft token rejected:
    round     d  d  d  a  r  f  |  next round     d drafts, a accepted, r rejected, f recovered token
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foredraft.lab.toy import Counts, Floats, ToyLanguage

Integers = NDArray[np.int64]
_BLOCK_LEN = 1 << 13


class UniformStream:
    """The uniforms of a generator in order, with a look ahead; a block equals as many single draws."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._ahead: Floats = np.empty(0)

    def peek(self, count: int) -> Floats:
        """The next ``count`` uniforms; they stay in the stream."""
        missing = count - len(self._ahead)
        if missing > 0:
            self._ahead = np.concatenate([self._ahead, self._rng.random(missing)])
        return self._ahead[:count]

    def skip(self, count: int) -> None:
        """Drop the next ``count`` uniforms, which must have been looked at."""
        assert count <= len(self._ahead)
        self._ahead = self._ahead[count:]


@dataclass(frozen=True, slots=True)
class _Rounds:
    """Rounds started at each stream position after each token; all arrays are ``[positions * V]``."""

    num_uniforms: Integers
    num_accepted: Integers
    tokens: Integers
    last_token: Integers


def _draws(distributions: Floats, uniforms: Floats) -> Integers:
    """``[U * R]``: the token that each uniform draws from each row of ``distributions`` ``[R, V]``.

    Inverse of the cumulative sum, scaled by the row's own sum (a residual is not normalised).
    """
    by_row = [np.searchsorted(np.cumsum(row)[:-1], uniforms * row.sum(), side="right") for row in distributions]
    return np.stack(by_row, axis=1).ravel()


def _rounds(
    language: ToyLanguage, uniforms: Floats, num_positions: int, num_draft_tokens: int, fallback: Floats
) -> _Rounds:
    """Rounds starting at the first ``num_positions`` uniforms; a rejection draws from ``fallback``."""
    vocab_size, k = language.vocab_size, num_draft_tokens
    draft_draws = _draws(language.draft_probs, uniforms)
    target_draws = _draws(language.target_probs, uniforms)
    fallback_draws = _draws(fallback, uniforms)
    accept_probs = np.minimum(1.0, language.target_probs / language.draft_probs).ravel()

    start = np.repeat(np.arange(num_positions), vocab_size)
    context = np.tile(np.arange(vocab_size), num_positions)
    contexts = [context]
    for i in range(k):
        contexts.append(draft_draws[(start + i) * vocab_size + contexts[i]])

    alive = np.ones(len(start), dtype=bool)
    num_accepted = np.zeros(len(start), dtype=np.int64)
    tokens = np.zeros(len(start), dtype=np.int64)
    stop_context = context.copy()
    for i in range(k):
        before, token = contexts[i], contexts[i + 1]
        alive &= uniforms[start + k + i] < accept_probs[before * vocab_size + token]
        num_accepted += alive
        tokens = np.where(alive, tokens * vocab_size + token, tokens)
        stop_context = np.where(alive, token, stop_context)
    bonus_or_recovered = np.where(
        alive,
        target_draws[(start + 2 * k) * vocab_size + stop_context],
        fallback_draws[np.minimum(start + k + num_accepted + 1, len(uniforms) - 1) * vocab_size + stop_context],
    )
    return _Rounds(
        num_uniforms=np.minimum(2 * k + 1, k + num_accepted + 2),
        num_accepted=num_accepted,
        tokens=tokens * vocab_size + bonus_or_recovered,
        last_token=bonus_or_recovered,
    )


def _follow(jumps: list[int], state: int, num_steps: int, end: int) -> list[int]:
    """States visited along ``jumps``, ``state`` first: at most ``num_steps``, all below ``end``."""
    visited: list[int] = []
    while len(visited) < num_steps and state < end:
        visited.append(state)
        state = jumps[state]
    return visited


def fallback_after_rejection(language: ToyLanguage, *, wrong: bool) -> Floats:
    """The residual max(p - q, 0), unnormalised; or, ``wrong``, the target itself (which is biased)."""
    if wrong:
        return language.target_probs
    return np.maximum(language.target_probs - language.draft_probs, 0.0)


def count_plain(language: ToyLanguage, stream: UniformStream, num_samples: int) -> Counts:
    """Outcome counts ``[V ** L]`` of sequences drawn from the target, one uniform a token."""
    length, vocab_size = language.sequence_len, language.vocab_size
    uniforms = stream.peek(num_samples * length)
    draws = _draws(language.target_probs, uniforms)
    position = np.arange(num_samples) * length
    token = np.full(num_samples, language.start_token)
    outcome = np.zeros(num_samples, dtype=np.int64)
    for i in range(length):
        token = draws[(position + i) * vocab_size + token]
        outcome = outcome * vocab_size + token
    stream.skip(num_samples * length)
    return np.bincount(outcome, minlength=language.num_outcomes)


def count_speculative(
    language: ToyLanguage,
    stream: UniformStream,
    num_samples: int,
    num_draft_tokens: int,
    *,
    wrong: bool = False,
    progress: Callable[[int], None] = lambda done: None,
) -> Counts:
    """Outcome counts ``[V ** L]`` of sequences made by speculative rounds and cut to their length.

    ``progress`` is called with the number of sequences added. Takes from ``stream`` exactly the uniforms
    that the draw-by-draw program would take.
    """
    length, vocab_size = language.sequence_len, language.vocab_size
    fallback = fallback_after_rejection(language, wrong=wrong)
    longest = 2 * num_draft_tokens + 1
    counts = np.zeros(language.num_outcomes, dtype=np.int64)
    missing = num_samples
    while missing > 0:
        num_starts = min(_BLOCK_LEN, missing * longest * length)
        num_positions = num_starts + (length - 1) * longest
        uniforms = stream.peek(num_positions + longest)
        rounds = _rounds(language, uniforms, num_positions, num_draft_tokens, fallback)
        position = np.arange(num_starts)
        last_token = np.full(num_starts, language.start_token)
        outcome = np.zeros(num_starts, dtype=np.int64)
        filled = np.zeros(num_starts, dtype=np.int64)
        for _ in range(length):
            (open_rows,) = np.nonzero(filled < length)
            state = position[open_rows] * vocab_size + last_token[open_rows]
            emitted = rounds.num_accepted[state] + 1
            kept = np.minimum(emitted, length - filled[open_rows])
            tokens = rounds.tokens[state] // vocab_size ** (emitted - kept)
            outcome[open_rows] = outcome[open_rows] * vocab_size**kept + tokens
            filled[open_rows] += kept
            position[open_rows] += rounds.num_uniforms[state]
            last_token[open_rows] = rounds.last_token[state]
        starts = _follow(position.tolist(), 0, missing, num_starts)
        counts += np.bincount(outcome[starts], minlength=language.num_outcomes)
        stream.skip(int(position[starts[-1]]))
        missing -= len(starts)
        progress(len(starts))
    return counts


@dataclass(frozen=True, slots=True)
class RoundCounts:
    """Totals over consecutive rounds. Judged draft tokens are the accepted and the first rejected one."""

    num_rounds: int
    num_emitted_tokens: int
    num_judged_tokens: int
    num_accepted_tokens: int

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_judged_tokens

    @property
    def tokens_per_target_pass(self) -> float:
        return self.num_emitted_tokens / self.num_rounds


def count_rounds(language: ToyLanguage, stream: UniformStream, num_rounds: int, num_draft_tokens: int) -> RoundCounts:
    """Run ``num_rounds`` rounds one after another, each from the last token of the one before."""
    vocab_size = language.vocab_size
    fallback = fallback_after_rejection(language, wrong=False)
    longest = 2 * num_draft_tokens + 1
    accepted = judged = 0
    missing, last_token = num_rounds, language.start_token
    while missing > 0:
        num_starts = min(_BLOCK_LEN, missing * longest)
        rounds = _rounds(language, stream.peek(num_starts + longest), num_starts, num_draft_tokens, fallback)
        position = np.repeat(np.arange(num_starts), vocab_size) + rounds.num_uniforms
        jumps = position * vocab_size + rounds.last_token
        states = np.array(_follow(jumps.tolist(), last_token, missing, num_starts * vocab_size))
        accepted += int(rounds.num_accepted[states].sum())
        judged += int(np.minimum(rounds.num_accepted[states] + 1, num_draft_tokens).sum())
        stream.skip(int(position[states[-1]]))
        last_token = int(rounds.last_token[states[-1]])
        missing -= len(states)
    return RoundCounts(
        num_rounds=num_rounds,
        num_emitted_tokens=accepted + num_rounds,
        num_judged_tokens=judged,
        num_accepted_tokens=accepted,
    )
