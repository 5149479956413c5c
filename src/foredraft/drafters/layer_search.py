"""Which layers a target can do without when it drafts for itself, searched once and kept.

A text of the model's own making is the judge. Eight sequences are sampled from it; the target's keys and values of
their beginnings stay in its slots, and each candidate reads the ends over them in one pass, as it would when drafting.
Its agreement is the share of tokens where its likeliest one is the target's.

The search takes one layer away at a time, the one whose loss costs the least agreement, until half are gone or the
budget of passes is spent, and returns the set with the largest forecast of Leviathan et al.'s Theorem 3.8. SWIFT (Xia
et al., 2410.06916) searches at random and by Bayesian optimisation for a set of a fixed size, among attention and MLP
parts; here whole layers go. As there, the first and the last layer stay if there are more than two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from foredraft import theory
from foredraft.sampling import Stream, sample_inverse_cdf, uniform
from foredraft.target.forward import TargetModel
from foredraft.target.layout import PassRow
from foredraft.target.measurements import read_measurement, write_measurement

NUM_SEQUENCES = 8
BEGINNING, END = 24, 16
MAX_PASSES = 200
"""Most candidates that are tried, each a pass over 128 tokens."""
TEMPERATURE = 0.7
FIRST_ID = -40


def find_skip_layers(target: TargetModel, num_draft_tokens: int, folder: Path) -> tuple[int, ...]:
    """The layers to leave out, ascending; read from ``folder`` if they were searched for before."""
    with _Judge(target) as judge:
        file = folder / f"{_key(judge, num_draft_tokens)}.json"
        known = read_measurement(file)
        if "layers" in known:
            return tuple(known["layers"])
        found = search(judge, len(target.layers), num_draft_tokens)
    write_measurement(file, {"layers": found})
    return found


def search(judge: _Judge, num_layers: int, num_draft_tokens: int) -> tuple[int, ...]:
    """Greedy elimination; of all sets on its way the one with the best forecast."""
    candidates = set(range(num_layers)) if num_layers <= 2 else set(range(1, num_layers - 1))
    skipped: tuple[int, ...] = ()
    best, best_forecast = skipped, 0.0
    passes = 0
    while len(skipped) < max(1, num_layers // 2) and passes + len(candidates) <= MAX_PASSES:
        scores = {layer: judge.agreement({*skipped, layer}) for layer in sorted(candidates)}
        passes += len(scores)
        layer = max(scores, key=scores.__getitem__)
        candidates.remove(layer)
        skipped = tuple(sorted((*skipped, layer)))
        forecast = theory.speedup(scores[layer], num_draft_tokens, 1.0 - len(skipped) / num_layers)
        if forecast > best_forecast:
            best, best_forecast = skipped, forecast
        if theory.speedup(scores[layer], num_draft_tokens, 0.5) < best_forecast:
            break  # no larger set agrees more, nor costs less than half
    return best


class _Judge:
    """Texts sampled from a target, whose ends a model of some of its layers is to read as the target does."""

    def __init__(self, target: TargetModel):
        self._target = target
        self._ids = range(FIRST_ID, FIRST_ID + NUM_SEQUENCES)

    def __enter__(self) -> _Judge:
        """Sample the texts; their beginnings stay committed in the target's slots."""
        target, length = self._target, min(BEGINNING + END, self._target.max_model_len - 1)
        self._beginning = length * BEGINNING // (BEGINNING + END)
        texts = [[(i * 37 + 1) % target.vocab_size] for i in range(NUM_SEQUENCES)]
        answers = []
        for sequence in self._ids:
            target.slots.open(sequence)
        for at in range(length):
            logits = target.forward([PassRow(s, t[-1:], 1) for s, t in zip(self._ids, texts, strict=True)]).float()
            for sequence in self._ids:
                target.slots.commit(sequence, 1)
            answers.append(logits.argmax(-1))
            numbers = [uniform(i, Stream.DRAFT, at) for i in range(NUM_SEQUENCES)]
            probs = torch.softmax(logits / TEMPERATURE, -1)
            drawn = sample_inverse_cdf(probs, torch.tensor(numbers, dtype=torch.float64, device=probs.device))
            for text, token in zip(texts, drawn.tolist(), strict=True):
                text.append(token)
        for sequence in self._ids:
            target.slots.truncate(sequence, self._beginning)
        self._ends = [text[self._beginning : length] for text in texts]
        self.answers: Tensor = torch.stack(answers[self._beginning :], 1).flatten()
        self.last_logits: Tensor = logits
        return self

    def __exit__(self, *_: object) -> None:
        for sequence in self._ids:
            self._target.slots.close(sequence)

    def agreement(self, skipped: Collection[int]) -> float:
        """Share of tokens at which the target without ``skipped`` finds the same one likeliest. One pass."""
        layers = [layer for i, layer in enumerate(self._target.layers) if i not in skipped]
        rows = [PassRow(s, end, len(end)) for s, end in zip(self._ids, self._ends, strict=True)]
        logits = self._target.with_layers(layers).forward(rows)
        return float((logits.argmax(-1) == self.answers).float().mean())


def _key(judge: _Judge, num_draft_tokens: int) -> str:
    """Texts and logits stand for the model; this file for the search."""
    about = (judge._ends, num_draft_tokens, Path(__file__).read_text())
    logits = judge.last_logits.cpu().numpy().tobytes()
    return hashlib.sha256(repr(about).encode() + logits).hexdigest()[:24]
