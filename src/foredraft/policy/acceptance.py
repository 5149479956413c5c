"""How much the next draft tokens of a sequence are worth, one by one.

Asked for n draft tokens, a drafter may come back with fewer or none (nothing was found to copy), and of those that
come some are accepted. Kept are, for each n, how often an n-th token came and how often it was accepted. A sequence's
own counts fade; to them comes what its route (requests of one kind) has shown, as if it were a few trials more, so
that the first steps of a sequence are already sensible.

In a chain the n-th token can only be accepted if those before it were, so rates are kept of drafts that got so far. In
a tree grown best first the n-th node adds to what the smaller tree would have had accepted exactly if it lies on the
accepted path; so nodes are counted each for itself, and the worth of a budget of n is the sum of their rates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foredraft.policy.base import PlanRow, RowOutcome
from foredraft.policy.filters import Floats

NUM_UNITS = 64
"""Draft tokens told apart: as many as a draft may have."""
DECAY = 0.95
"""Of a sequence's counts, each time it had a draft."""
IDLE_DECAY = 0.98
"""Of a sequence's counts, each step that it had none: it is tried again in the end, if its route is worth it."""
ROUTE_DECAY = 0.995
ROUTE_TRIALS = 10.0
"""Weight of the route's rate among a sequence's own trials."""
FIRST_RATE, FIRST_FOUND, FIRST_TRIALS = 0.8, 0.9, 4.0
"""What is supposed of a route that nothing is known of: that it is worth a try."""
TREE_FALL = 0.8
"""What is supposed of the next node of a tree, as a share of the one before."""

ASKED, FOUND, JUDGED, ACCEPTED = range(4)
"""Counts kept for each unit: an n-th token was asked for (and all before it came), it came; it was to be judged (it may
not have come), it was accepted."""


class AcceptanceBook:
    """Estimates for the sequences of an engine.

    Args:
        trees: drafts may branch.
    """

    def __init__(self, *, trees: bool = False):
        self._trees = trees
        self._profile: Floats = np.power(TREE_FALL, np.arange(NUM_UNITS, dtype=np.float64))
        self._sequences, self._routes = _Table(), _Table()

    def observe(self, rows: Sequence[RowOutcome]) -> None:
        """Drafts were judged; what is known of a row for which none was planned gets old."""
        idle = self._sequences.known([row.sequence_id for row in rows if not row.planned])
        self._sequences.counts[idle] *= IDLE_DECAY
        rows = [row for row in rows if row.planned]
        if not rows:
            return
        new = self._outcomes(rows)
        places = self._sequences.places([row.sequence_id for row in rows])
        self._sequences.counts[places] *= DECAY
        self._sequences.counts[places] += new
        routes = self._routes.places([row.route for row in rows])
        decays = ROUTE_DECAY ** np.bincount(routes, minlength=len(self._routes.counts))
        self._routes.counts *= decays[:, None, None]
        np.add.at(self._routes.counts, routes, new)

    def forget(self, sequence_id: int) -> None:
        self._sequences.drop(sequence_id)

    def expected(self, rows: Sequence[PlanRow], num_units: int) -> tuple[Floats, Floats]:
        """``[B, num_units]`` each: the chance that an n-th draft token is accepted, and that it is there at all."""
        shared = self._routes.of([row.route for row in rows], num_units)
        own = self._sequences.of([row.sequence_id for row in rows], num_units)
        accepted = _rates(shared, own, JUDGED, ACCEPTED, FIRST_RATE, self._profile[:num_units] if self._trees else None)
        found = _running(_rates(shared, own, ASKED, FOUND, FIRST_FOUND, None))
        chances = accepted if self._trees else _running(accepted)
        return np.minimum(chances, found), found

    def survival(self, sequence_id: int, route: str, length: int) -> list[float]:
        """Chance that draft tokens 1 .. ``length`` of one sequence are accepted."""
        survival: list[float] = self.expected([PlanRow(sequence_id, length, 0, route)], length)[0][0].tolist()
        return survival

    def _outcomes(self, rows: Sequence[RowOutcome]) -> Floats:
        """What the rows add to the counts, ``[B, 4, units]``."""
        unit = np.arange(NUM_UNITS)
        planned, drafted, accepted = (
            np.array(values)[:, None]
            for values in zip(*((row.planned, row.num_draft_tokens, row.num_accepted) for row in rows), strict=True)
        )
        asked = unit < planned
        new = np.zeros((len(rows), 4, NUM_UNITS))
        new[:, ASKED] = asked & (unit <= drafted)
        new[:, FOUND] = asked & (unit < drafted)
        if not self._trees:
            new[:, JUDGED] = asked & (unit <= accepted)
            new[:, ACCEPTED] = asked & (unit < accepted)
            return new
        new[:, JUDGED] = asked
        for i, row in enumerate(rows):
            new[i, ACCEPTED, list(row.path)] = 1.0
        return new


def _rates(shared: Floats, own: Floats, trials: int, hits: int, first: float, profile: Floats | None) -> Floats:
    """Hits over trials by unit: a sequence's with its route's as prior, and that one's with the rate of other units.

    Args:
        profile: what is supposed of each unit of a tree relative to the first, besides that it is nearly as good as the
            one before; None for rates that are alike but for the first unit, which says whether anything was found.
    """
    prior = np.full_like(shared[:, hits], first)
    pooled = 0 if profile is not None else 1
    weights = shared[:, trials, pooled:] if profile is None else shared[:, trials] * profile
    level = (shared[:, hits, pooled:].sum(axis=1) + FIRST_TRIALS * first) / (weights.sum(axis=1) + FIRST_TRIALS)
    if profile is None:
        prior[:, 1:] = level[:, None]
    else:
        prior = np.minimum(1.0, level[:, None] * profile)
        raw = (shared[:, hits] + FIRST_TRIALS * prior) / (shared[:, trials] + FIRST_TRIALS)
        prior[:, 1:] = np.maximum(prior[:, 1:], TREE_FALL * raw[:, :-1])
    route = (shared[:, hits] + FIRST_TRIALS * prior) / (shared[:, trials] + FIRST_TRIALS)
    rates: Floats = (own[:, hits] + ROUTE_TRIALS * route) / (own[:, trials] + ROUTE_TRIALS)
    return rates


def _running(rates: Floats) -> Floats:
    """Products of the first 1, 2, 3, ... rates of each row."""
    products: Floats = np.multiply.accumulate(rates, axis=1)
    return products


class _Table:
    """Counts ``[places, 4, units]`` by name; the first place belongs to nobody and stays zero."""

    def __init__(self) -> None:
        self.counts: Floats = np.zeros((8, 4, NUM_UNITS))
        self._places: dict[int | str, int] = {}
        self._free = list(range(1, 8))

    def places(self, names: Sequence[int | str]) -> NDArray[np.int64]:
        """A place for each name, made if there is none."""
        for name in names:
            if name not in self._places:
                if not self._free:
                    size = len(self.counts)
                    self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)])
                    self._free = list(range(size, 2 * size))
                self._places[name] = self._free.pop()
        return np.array([self._places[name] for name in names])

    def known(self, names: Sequence[int | str]) -> list[int]:
        """The places of those of the names that have one."""
        return [self._places[name] for name in names if name in self._places]

    def of(self, names: Sequence[int | str], num_units: int) -> Floats:
        """The counts of each name, zeros for one that is not known."""
        return self.counts[[self._places.get(name, 0) for name in names], :, :num_units]

    def drop(self, name: int | str) -> None:
        place = self._places.pop(name, None)
        if place is not None:
            self.counts[place] = 0.0
            self._free.append(place)
