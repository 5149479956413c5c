"""How likely the next draft tokens of a sequence are to be accepted, position by position.

Kept are, for each position, how often a draft that reached it had its token accepted. A sequence's own counts fade; to
them comes what its route (requests of one kind) has shown, as if it were a few trials more, so that the first steps of
a sequence are already sensible.
"""

from __future__ import annotations

from dataclasses import dataclass, field

NUM_POSITIONS = 16
"""Positions told apart; later ones are like the last."""
DECAY = 0.9
"""Of a sequence's counts, each time it had a draft."""
ROUTE_DECAY = 0.995
ROUTE_TRIALS = 6.0
"""Weight of the route's rate among a sequence's own trials."""
FIRST_RATE, FIRST_TRIALS = 0.7, 4.0
"""What is supposed of a route that nothing is known of: that it is worth a try."""


@dataclass(slots=True)
class Counts:
    """Trials and hits by position."""

    trials: list[float] = field(default_factory=lambda: [0.0] * NUM_POSITIONS)
    hits: list[float] = field(default_factory=lambda: [0.0] * NUM_POSITIONS)

    def add(self, num_draft_tokens: int, num_accepted: int, decay: float) -> None:
        self.trials = [t * decay for t in self.trials]
        self.hits = [h * decay for h in self.hits]
        for i in range(min(num_accepted + 1, num_draft_tokens)):
            at = min(i, NUM_POSITIONS - 1)
            self.trials[at] += 1.0
            self.hits[at] += i < num_accepted


class AcceptanceBook:
    """Estimates for the sequences of an engine."""

    def __init__(self) -> None:
        self._sequences: dict[int, Counts] = {}
        self._routes: dict[str, Counts] = {}

    def observe(self, sequence_id: int, route: str, num_draft_tokens: int, num_accepted: int) -> None:
        """A draft was judged; one of no tokens tells nothing."""
        if num_draft_tokens:
            self._sequences.setdefault(sequence_id, Counts()).add(num_draft_tokens, num_accepted, DECAY)
            self._routes.setdefault(route, Counts()).add(num_draft_tokens, num_accepted, ROUTE_DECAY)

    def forget(self, sequence_id: int) -> None:
        self._sequences.pop(sequence_id, None)

    def survival(self, sequence_id: int, route: str, length: int) -> list[float]:
        """Probability that draft tokens 1 .. ``length`` are accepted, each with all before it."""
        own, shared = self._sequences.get(sequence_id), self._routes.get(route)
        alive, out = 1.0, []
        before = FIRST_RATE
        for i in range(length):
            at = min(i, NUM_POSITIONS - 1)
            before = _rate(shared, at, before, FIRST_TRIALS)
            alive *= _rate(own, at, before, ROUTE_TRIALS)
            out.append(alive)
        return out


def _rate(counts: Counts | None, position: int, prior: float, weight: float) -> float:
    """Hits over trials, the prior counting as ``weight`` trials. A position never reached is like the prior."""
    if counts is None:
        return prior
    return (counts.hits[position] + weight * prior) / (counts.trials[position] + weight)
