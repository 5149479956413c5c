"""The toy language sampled by the million: vectorised, in chunks of the size of a cache, on threads.

The engine's rules supply the pass probabilities and the next-token laws of all 4 * 64 drafts once; a round
then draws its draft token by token, tests it with uniforms, and draws the recovered or bonus token. Unlike in
``toy_sampling`` the order of the random numbers is nobody's business, so this is statistics, not a replay.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.lab import chains
from foredraft.lab.enumeration import language_instance
from foredraft.lab.toy import Counts, Floats, ToyLanguage
from foredraft.verify import match

Integers = NDArray[np.int64]
_CHUNK_LEN = 1 << 16


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """Outcome counts ``[V ** L]``, target passes, and emitted tokens before the cut to the sequence length.

    ``num_unlike_plain`` counts sequences that differ from plain decoding with the same noise, for the one
    rule that promises equality; None for the others.
    """

    counts: Counts
    num_rounds: int
    num_emitted_tokens: int
    num_unlike_plain: int | None = None

    @property
    def tokens_per_target_pass(self) -> float:
        return self.num_emitted_tokens / self.num_rounds

    def __add__(self, other: SampleCounts) -> SampleCounts:
        unlike = (self.num_unlike_plain, other.num_unlike_plain)
        return SampleCounts(
            self.counts + other.counts,
            self.num_rounds + other.num_rounds,
            self.num_emitted_tokens + other.num_emitted_tokens,
            None if unlike[0] is None or unlike[1] is None else unlike[0] + unlike[1],
        )


@dataclass(frozen=True, slots=True)
class _Round:
    """What rounds emit: number of tokens, and the tokens read in base V."""

    num_emitted: Integers
    tokens: Integers


# Rounds of a chunk: (generator, token before each round, rows of the chunk, positions to fill) -> _Round
_RunRounds = Callable[[np.random.Generator, Integers, Integers, Integers], _Round]
# A sampler makes the rounds of one chunk of sequences, whose noise it may fix beforehand.
_PrepareChunk = Callable[[np.random.Generator, int], tuple[_RunRounds, Integers | None]]


def sample_rule(
    language: ToyLanguage,
    rule: chains.RatioRule | str,
    num_samples: int,
    num_draft_tokens: int,
    *,
    seed: int = 0,
    num_threads: int = 2,
    progress: Callable[[int], None] = lambda done: None,
) -> SampleCounts:
    """Sample sequences under a ratio rule, or under ``"plain"``, ``"match"`` or ``"coupled"``.

    The result depends on ``seed``, not on the threads. ``progress`` gets the number of sequences added.
    """
    prepare = _preparer(language, rule, num_draft_tokens)
    chunks = _chunks(num_samples, seed)
    total = SampleCounts(np.zeros(language.num_outcomes, dtype=np.int64), 0, 0, 0)
    with ThreadPoolExecutor(num_threads) as pool:
        for part in pool.map(lambda chunk: _sample_chunk(language, prepare, num_draft_tokens, *chunk), chunks):
            total += part
            progress(int(part.counts.sum()))
    return total


def _chunks(num_samples: int, seed: int) -> list[tuple[np.random.SeedSequence, int]]:
    num_chunks = -(-num_samples // _CHUNK_LEN)
    sizes = [min(_CHUNK_LEN, num_samples - i * _CHUNK_LEN) for i in range(num_chunks)]
    return list(zip(np.random.SeedSequence(seed).spawn(num_chunks), sizes, strict=True))


def _preparer(language: ToyLanguage, rule: chains.RatioRule | str, num_draft_tokens: int) -> _PrepareChunk:
    if isinstance(rule, chains.RatioRule):
        return _ratio_rounds(language, rule, num_draft_tokens)
    if rule == "coupled":
        return _coupled_rounds(language, num_draft_tokens)
    return _match_rounds(language, num_draft_tokens if rule == "match" else 0)


def _sample_chunk(
    language: ToyLanguage,
    prepare: _PrepareChunk,
    num_draft_tokens: int,
    entropy: np.random.SeedSequence,
    num_samples: int,
) -> SampleCounts:
    """Run rounds until every sequence of the chunk is full; finished sequences drop out."""
    rng = np.random.Generator(np.random.SFC64(entropy))
    length, vocab_size = language.sequence_len, language.vocab_size
    powers = vocab_size ** np.arange(max(length, num_draft_tokens) + 1)
    run, plain_outcome = prepare(rng, num_samples)
    outcome = np.zeros(num_samples, dtype=np.int64)
    filled = np.zeros(num_samples, dtype=np.int64)
    rows = np.arange(num_samples)
    num_rounds = num_emitted = 0
    while len(rows):
        done, so_far = filled[rows], outcome[rows]
        before = np.where(done > 0, so_far % vocab_size, language.start_token)
        part = run(rng, before, rows, done)
        kept = np.minimum(part.num_emitted, length - done)
        outcome[rows] = so_far * powers[kept] + part.tokens // powers[part.num_emitted - kept]
        filled[rows] = done + kept
        num_rounds += len(rows)
        num_emitted += int(part.num_emitted.sum())
        rows = rows[done + kept < length]
    return SampleCounts(
        counts=np.bincount(outcome, minlength=language.num_outcomes),
        num_rounds=num_rounds,
        num_emitted_tokens=num_emitted,
        num_unlike_plain=None if plain_outcome is None else int((outcome != plain_outcome).sum()),
    )


def _thresholds(probs: Floats) -> list[Floats]:
    """``[..., V]`` probabilities to V - 1 flat arrays of cumulative ones, one per step of a draw."""
    cumulative = probs.reshape(-1, probs.shape[-1]).cumsum(axis=-1)
    return [np.ascontiguousarray(cumulative[:, i]) for i in range(probs.shape[-1] - 1)]


def _draw(thresholds: list[Floats], rows: Integers, uniforms: Floats) -> Integers:
    """One token per entry: the number of cumulative probabilities of its row that its uniform reaches."""
    token = np.zeros(len(rows), dtype=np.int64)
    for threshold in thresholds:
        token += uniforms >= threshold.take(rows)
    return token


def _ratio_rounds(language: ToyLanguage, rule: chains.RatioRule, k: int) -> _PrepareChunk:
    vocab_size = language.vocab_size
    by_context = [chains.every_draft(language_instance(language, token, k)) for token in range(vocab_size)]
    pass_probs = torch.cat([rule.pass_probs(drafts) for drafts in by_context])
    next_token = _thresholds(np.stack([chains.next_token_laws(rule, drafts) for drafts in by_context]))
    draft = _thresholds(language.draft_probs)
    powers = vocab_size ** np.arange(k + 1)

    def run(rng: np.random.Generator, before: Integers, rows: Integers, done: Integers) -> _Round:
        path = token = before
        for _ in range(k):
            token = _draw(draft, token, rng.random(len(rows)))
            path = path * vocab_size + token
        tests = torch.from_numpy(rng.random((len(rows), k)))
        num_accepted = rule.count_accepted(pass_probs[torch.from_numpy(path)], tests).numpy()
        last = _draw(next_token, path * (k + 1) + num_accepted, rng.random(len(rows)))
        accepted = path % powers[k] // powers[k - num_accepted]
        return _Round(num_accepted + 1, accepted * vocab_size + last)

    return lambda rng, num_samples: (run, None)


def _emit_matches(drafted: list[Integers], named: list[Integers], vocab_size: int) -> _Round:
    """Rounds that accept on equality: the target's tokens up to the first that the drafter did not name."""
    k, num_rows = len(drafted), len(named[0])
    num_accepted = match.count_matches(
        torch.from_numpy(np.stack([*drafted, named[0]], axis=1)[:, :k]),
        torch.full((num_rows,), k),
        torch.from_numpy(np.stack(named, axis=1)),
    ).numpy()
    tokens = named[0]
    for i in range(1, k + 1):
        tokens = np.where(num_accepted >= i, tokens * vocab_size + named[i], tokens)
    return _Round(num_accepted + 1, tokens)


def _match_rounds(language: ToyLanguage, k: int) -> _PrepareChunk:
    """Independent draws of drafter and target; with k = 0 plain decoding."""
    draft, target = _thresholds(language.draft_probs), _thresholds(language.target_probs)

    def run(rng: np.random.Generator, before: Integers, rows: Integers, done: Integers) -> _Round:
        contexts = [before]
        for i in range(k):
            contexts.append(_draw(draft, contexts[i], rng.random(len(rows))))
        named = [_draw(target, context, rng.random(len(rows))) for context in contexts]
        return _emit_matches(contexts[1:], named, language.vocab_size)

    return lambda rng, num_samples: (run, None)


def _coupled_rounds(language: ToyLanguage, k: int) -> _PrepareChunk:
    """Both draw argmin(E / probability) with the noise E of sequence and position, drawn once per chunk."""
    vocab_size, length = language.vocab_size, language.sequence_len
    target_costs, draft_costs = (
        [np.ascontiguousarray(1.0 / probs[:, y], dtype=np.float32) for y in range(vocab_size)]
        for probs in (language.target_probs, language.draft_probs)
    )

    def prepare(rng: np.random.Generator, num_samples: int) -> tuple[_RunRounds, Integers]:
        noise = [rng.standard_exponential(num_samples * (length + k), dtype=np.float32) for _ in range(vocab_size)]

        def draw(costs: list[NDArray[np.float32]], context: Integers, place: Integers) -> Integers:
            best, token = noise[0].take(place) * costs[0].take(context), np.zeros(len(place), dtype=np.int64)
            for y in range(1, vocab_size):
                value = noise[y].take(place) * costs[y].take(context)
                np.putmask(token, value < best, y)
                np.minimum(best, value, out=best)
            return token

        def run(rng: np.random.Generator, before: Integers, rows: Integers, done: Integers) -> _Round:
            place = rows * (length + k) + done
            contexts = [before]
            for i in range(k):
                contexts.append(draw(draft_costs, contexts[i], place + i))
            named = [draw(target_costs, context, place + i) for i, context in enumerate(contexts)]
            return _emit_matches(contexts[1:], named, vocab_size)

        place = np.arange(num_samples) * (length + k)
        plain = np.zeros(num_samples, dtype=np.int64)
        token = np.full(num_samples, language.start_token)
        for i in range(length):
            token = draw(target_costs, token, place + i)
            plain = plain * vocab_size + token
        return run, plain

    return prepare
