"""How much the next draft tokens of a sequence are worth, one by one.

Asked for n draft tokens, a drafter may come back with fewer or none (nothing was found to copy), and of those that
come some are accepted. Kept are, for each n, how often an n-th token came and how often it was accepted. A sequence's
own counts fade; to them comes what its route (requests of one kind) has shown, as if it were a few trials more, so
that the first steps of a sequence are already sensible. Each source of a combination has counts of its own.

A copy that was found before the plan tells how many tokens before its place agree with the end of the text. Its n-th
token then counts as one behind so many and n - 1 more, for those before it have to be right: as the (agreeing + n)-th.

In a chain the n-th token can only be accepted if those before it were, so rates are kept of drafts that got so far. In
a tree grown best first the n-th node adds to what the smaller tree would have had accepted exactly if it lies on the
accepted path; so nodes are counted each for itself, and the worth of a budget of n is the sum of their rates.

All of it runs once a step over a few numbers, where plain Python is several times as fast as arrays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from foredraft.policy.base import PlanRow, RowOutcome

MOST_AGREEING = 8
"""Tokens that agree before a copy, told apart."""
NUM_UNITS = 64 + MOST_AGREEING
"""Draft tokens told apart: as many as a draft may have, behind as many agreeing ones."""
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
HEAVY = 1e9
"""Weight of a new trial at which counts are scaled down."""


class Counts:
    """Of a sequence or a route, by unit: an n-th token was asked for (and all before it came), it came; it was to be
    judged (it may not have come), it was accepted.

    Instead of old trials growing lighter, new ones grow heavier: ``weight`` is that of the next one.
    """

    __slots__ = ("accepted", "asked", "found", "judged", "weight")

    def __init__(self) -> None:
        self.asked, self.found, self.judged, self.accepted = ([0.0] * NUM_UNITS for _ in range(4))
        self.weight = 1.0

    def fade(self, decay: float) -> None:
        """All trials so far count less."""
        self.weight /= decay
        if self.weight > HEAVY:
            for name in ("asked", "found", "judged", "accepted"):
                setattr(self, name, [count / self.weight for count in getattr(self, name)])
            self.weight = 1.0

    def add(self, row: RowOutcome) -> None:
        """A trial of each unit that was planned."""
        drafted, accepted, first = row.num_draft_tokens, row.num_accepted, _first_unit(row)
        self._count(self.asked, range(first, first + min(row.planned, drafted + 1)))
        self._count(self.found, range(first, first + drafted))
        judged = row.planned if row.branches else min(row.planned, accepted + 1)
        self._count(self.judged, range(first, first + judged))
        self._count(self.accepted, row.path if row.branches else range(first, first + accepted))

    def found_rates(self, prior: Sequence[float], trials: float, units: slice) -> list[float]:
        """Of some units, with so many trials of the prior's rates."""
        return self._rates(self.found[units], self.asked[units], prior[units], trials)

    def accepted_rates(self, prior: Sequence[float], trials: float, units: slice) -> list[float]:
        return self._rates(self.accepted[units], self.judged[units], prior[units], trials)

    def _count(self, counts: list[float], units: Sequence[int]) -> None:
        for unit in units:
            counts[unit] += self.weight

    def _rates(self, hits: list[float], tried: list[float], prior: Sequence[float], trials: float) -> list[float]:
        trials *= self.weight
        return [(hit + trials * rate) / (count + trials) for hit, count, rate in zip(hits, tried, prior, strict=True)]


class AcceptanceBook:
    """Estimates for the sequences of an engine."""

    def __init__(self) -> None:
        self._sequences: defaultdict[int, dict[str, Counts]] = defaultdict(dict)
        self._routes: defaultdict[tuple[str, str], Counts] = defaultdict(Counts)
        self._nobody = Counts()
        self._priors: dict[tuple[tuple[str, str], int, bool], tuple[list[float], list[float]]] = {}

    def observe(self, rows: Sequence[RowOutcome]) -> None:
        """Drafts were judged; what is known of a row for which none was planned gets old."""
        self._priors.clear()
        for row in rows:
            own = self._sequences[row.sequence_id]
            if row.planned:
                counts = own.setdefault(row.source, Counts())
                for each, decay in ((counts, DECAY), (self._routes[row.route, row.source], ROUTE_DECAY)):
                    each.fade(decay)
                    each.add(row)
            elif row.source in own:
                own[row.source].fade(IDLE_DECAY)

    def forget(self, sequence_id: int) -> None:
        self._sequences.pop(sequence_id, None)

    def expected(self, rows: Sequence[PlanRow]) -> tuple[list[list[float]], list[list[float]]]:
        """For each row, up to its limit: the chances that an n-th draft token is accepted, and that it is there at all.

        A free row's tokens are there.
        """
        firsts = list(map(_first_unit, rows))
        last = max((first + row.limit for first, row in zip(firsts, rows, strict=True)), default=0)
        chances, found = [], []
        for row, first in zip(rows, firsts, strict=True):
            own = self._sequences.get(row.sequence_id, {}).get(row.source, self._nobody)
            accepted_prior, found_prior = self._route_rates((row.route, row.source), last, row.branches)
            units = slice(first, first + row.limit)
            rates = own.accepted_rates(accepted_prior, ROUTE_TRIALS, units)
            there = [1.0] * row.limit
            if not row.is_free:
                there = list(accumulate(own.found_rates(found_prior, ROUTE_TRIALS, units), mul))
            chances.append(list(map(min, rates if row.branches else accumulate(rates, mul), there)))
            found.append(there)
        return chances, found

    def survival(self, sequence_id: int, route: str, length: int) -> list[float]:
        """Chance that draft tokens 1 .. ``length`` of one sequence are accepted."""
        return self.expected([PlanRow(sequence_id, length, 0, route)])[0][0]

    def _route_rates(self, key: tuple[str, str], num_units: int, tree: bool) -> tuple[list[float], list[float]]:
        """Rates of acceptance and of being found, with those of the other units as prior."""
        known = self._priors.get((key, num_units, tree))
        if known is None:
            known = self._priors[key, num_units, tree] = self._rates_of(key, num_units, tree)
        return known

    def _rates_of(self, key: tuple[str, str], num_units: int, tree: bool) -> tuple[list[float], list[float]]:
        counts, units = self._routes.get(key, self._nobody), slice(num_units)
        if tree:
            prior = self._tree_prior(counts, num_units)
        else:
            prior = _chain_prior(counts.accepted, counts.judged, counts.weight, FIRST_RATE, num_units)
        accepted = counts.accepted_rates(prior, FIRST_TRIALS, units)
        prior = _chain_prior(counts.found, counts.asked, counts.weight, FIRST_FOUND, num_units)
        return accepted, counts.found_rates(prior, FIRST_TRIALS, units)

    def _tree_prior(self, counts: Counts, num_units: int) -> list[float]:
        """Nodes fall off from the first one on, but each is nearly as good as the one before has shown to be."""
        profile = [TREE_FALL**unit for unit in range(num_units)]
        trials = FIRST_TRIALS * counts.weight
        tried = sum(count * share for count, share in zip(counts.judged, profile, strict=False))
        level = (sum(counts.accepted[:num_units]) + trials * FIRST_RATE) / (tried + trials)
        falling = [min(1.0, level * share) for share in profile]
        shown = counts.accepted_rates(falling, FIRST_TRIALS, slice(num_units))
        return [falling[0], *(max(rate, TREE_FALL * before) for rate, before in zip(falling[1:], shown, strict=False))]


def _first_unit(row: PlanRow | RowOutcome) -> int:
    return 0 if row.branches else min(row.match_len, MOST_AGREEING)


def _chain_prior(hits: list[float], tried: list[float], weight: float, first: float, num_units: int) -> list[float]:
    """Rates of the units of a chain are alike but for the first, which says whether anything was found."""
    trials = FIRST_TRIALS * weight
    level = (sum(hits[1:num_units]) + trials * first) / (sum(tried[1:num_units]) + trials)
    return [first, *[level] * (num_units - 1)]
