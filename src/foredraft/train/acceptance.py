"""What the engine would accept of a head's drafts, counted on held-out texts without running the engine.

Agreement at every place is not acceptance: a round begins where the last one ended, which is behind a guess that was
wrong, and that is a harder place than most. So rounds are walked through as the engine does, with the text in the place
of the target: for a greedy answer that is the target's choice, for a sampled one a draw of its law.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from foredraft.train.batches import Window, collate, windows_of
from foredraft.train.trainee import Trainee, TrainTexts

WINDOWS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts of rounds with drafts of at most K tokens.

    Attributes:
        num_tokens: emitted in rounds; the first token of an answer comes from the pass over the prompt.
        num_rounds: passes of the target.
        drafted, accepted: by position of the draft, ``K`` each. Behind a rejected token nothing counts as drafted.
    """

    num_tokens: int
    num_rounds: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def tokens_per_pass(self) -> float:
        return self.num_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def rates(self) -> list[float]:
        """For each position: how often it was accepted where those before it were."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]

    def __add__(self, other: Acceptance) -> Acceptance:
        drafted, accepted = (
            tuple(map(sum, zip(a, b, strict=True)))
            for a, b in ((self.drafted, other.drafted), (self.accepted, other.accepted))
        )
        return Acceptance(self.num_tokens + other.num_tokens, self.num_rounds + other.num_rounds, drafted, accepted)


def walk_rounds(guesses: Sequence[Sequence[int]], token_ids: Sequence[int], first: int) -> Iterator[tuple[int, int]]:
    """The rounds of one text, as (tokens drafted, tokens accepted).

    Args:
        guesses: at each place the draft of a round that begins there, -1 for none; see ``Trainee.guesses``.
        first: tokens that are committed when the first round begins.
    """
    committed = first
    while committed < len(token_ids):
        draft = list(guesses[committed])[: len(token_ids) - committed - 1]
        num_accepted = 0
        while num_accepted < len(draft) and draft[num_accepted] == token_ids[committed + num_accepted]:
            num_accepted += 1
        yield len(draft), num_accepted
        committed += num_accepted + 1


def held_out_acceptance(
    trainee: Trainee, texts: TrainTexts, indices: Sequence[int], num_tokens: int, window: int
) -> Acceptance:
    """Walk through the rounds of some texts, of each as much as fits a window, with drafts of ``num_tokens``."""
    store = texts.store
    total = Acceptance(0, 0, (0,) * num_tokens, (0,) * num_tokens)
    windows = first_windows(texts, indices, window)
    device = next(trainee.parameters()).device
    for at in range(0, len(windows), WINDOWS_AT_ONCE):
        some = windows[at : at + WINDOWS_AT_ONCE]
        with torch.no_grad():
            batch = collate(store, some).to(device)
            guesses = trainee.guesses(batch, num_tokens).tolist()
        for row, each in enumerate(some):
            tokens = batch.token_ids[row, : each.num_tokens].tolist()
            first = each.first_label - each.start + 1
            total = total + _count(walk_rounds(guesses[row], tokens, first), num_tokens, max(0, len(tokens) - first))
    return total


def first_windows(texts: TrainTexts, indices: Sequence[int], size: int) -> list[Window]:
    """The beginning of the answer of each text, in order of length, so that little is padded."""
    store = texts.store
    each = (windows_of(i, store.num_prompt_tokens(i), len(store.token_ids(i)), size) for i in indices)
    return sorted((windows[0] for windows in each if windows), key=lambda w: w.num_tokens)


def _count(rounds: Iterator[tuple[int, int]], width: int, num_tokens: int) -> Acceptance:
    drafted, accepted, num_rounds = [0] * width, [0] * width, 0
    for num_drafted, num_accepted in rounds:
        num_rounds += 1
        for position in range(min(num_accepted + 1, num_drafted)):
            drafted[position] += 1
            accepted[position] += position < num_accepted
    return Acceptance(num_tokens, num_rounds, tuple(drafted), tuple(accepted))
