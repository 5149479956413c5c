"""Draft lengths that maximise expected emitted tokens per second, for the whole batch at once, 0 included.

The next draft token of any row adds its chance of acceptance to what is emitted, and its chance of being there at all
to the tokens of the pass. Taken in the order of falling worth (acceptance of a token that is there), the best number of
them is where

    (rows + sum of chances of acceptance) / (draft + pass + overhead)

is highest (goodput as in SmartSpec, Liu et al., 2406.14066; there with one length for all rows). Seconds that prompts
in the same pass take whatever is drafted are left out: they are not the drafts' to earn.

Two things are not seen by doing always what seems best, and are looked at now and then, with back-off. Where a route
gets no drafts of a source, a row of it is given one token, as often as one per cent of the time pays for; half as often
after each time that this changes nothing, down to a tenth of a per cent. Where all steps draft, a step is made without:
after a few, then twice as many, and so on as long as it takes as long as was expected.

To look for drafts and to plan takes time too, a twentieth of a step of many rows. Where the best plan gains no more
than that, the controller rests for a step, then for two, and so on, up to some; the batch decodes as if there were no
drafts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.policy.acceptance import AcceptanceBook
from foredraft.policy.base import Forecast, PlanRow, StepOutcome
from foredraft.policy.cost import StepCost

FIRST_SHARE, LAST_SHARE = 0.01, 0.001
"""Share of the time that probing a route may take, at first and at least."""
FIRST_GAP, LAST_GAP = 4, 512
"""Steps with drafts between two without, at first and at most."""
STEPS_AT_ONCE = 4
"""Steps that are learnt from together: the first call behind a pass takes several times as long as those after it."""
LEAST_GAIN = 0.03
"""What drafts must seem to gain on a step that does not even look for them: less is what chance promises, for tokens
that it favoured are the ones chosen among many rows. Of a single row none are chosen, and all that is gained counts."""
MOST_REST = 8
"""Steps until the next look, at most."""
FEWER_ROWS = 0.75
"""A batch that has shrunk to such a share is looked at at once."""
OWN_RATE = 0.1
"""How much of the estimate of the controller's own seconds is the latest step."""
MOST_PLANS = 64
"""Of so many the best is taken; where there are more draft tokens to choose from, plans differ by two or more."""
SURPRISE = 0.12
"""Relative error of the expected seconds of a step without drafts, above which the next one comes soon."""


@dataclass(slots=True)
class _Probe:
    """Of a route that gets no drafts: seconds saved up for a probe, which share is saved, and how many there were."""

    saved_s: float = 0.0
    share: float = FIRST_SHARE
    count: int = 0


@dataclass(frozen=True, slots=True)
class _Options:
    """Plans of growing size, the first for no drafts: draft tokens of each, tokens that it should emit, and seconds.

    ``rows`` says whose are the draft tokens, in the order in which they are added.
    """

    rows: list[int]
    sizes: list[int]
    emitted: list[float]
    seconds: list[float]


class GoodputPolicy:
    """The controller.

    Args:
        cost: of a step.
    """

    def __init__(self, cost: StepCost):
        self.cost = cost
        self.acceptance = AcceptanceBook()
        self.forecast: Forecast | None = None
        self._probes: dict[tuple[str, str], _Probe] = {}
        self._gap, self._since_plain = FIRST_GAP, 0
        self._unread: list[StepOutcome] = []
        self._own_s = self._spent_s = 0.0  # of looking for drafts, planning and learning in a step; this one's so far
        self._rest, self._next_rest, self._rest_rows, self._rested = 0, 1, 0, 0

    def rests(self, num_rows: int) -> bool:
        if self._rest and num_rows < FEWER_ROWS * self._rest_rows:
            self._rest = 0
        self._rest, self._rested, resting = max(0, self._rest - 1), self._rested + 1, self._rest > 0
        return resting

    def plan(self, rows: Sequence[PlanRow], num_other_tokens: int) -> list[int]:
        self.forecast, began = None, time.perf_counter()
        lengths = [0] * len(rows)
        if not any(row.limit for row in rows):
            return lengths
        options, prompts_s = self._options(rows, num_other_tokens)
        goodput = [n / (s - prompts_s) for n, s in zip(options.emitted, options.seconds, strict=True)]
        best = goodput.index(max(goodput))
        resting_s = options.seconds[0] - prompts_s - self._own_s
        if goodput[best] * resting_s < len(rows) + LEAST_GAIN * (len(rows) - 1):
            best, self._rest, self._rest_rows = 0, self._next_rest, len(rows)
            self._next_rest = min(2 * self._next_rest, MOST_REST)
        else:
            self._next_rest = 1
        if best and self._since_plain >= self._gap and not num_other_tokens:
            best = 0
        else:
            self._since_plain += best > 0
        for at in options.rows[: options.sizes[best]]:
            lengths[at] += 1
        step_s = options.seconds[best]
        self.forecast = Forecast(options.emitted[best], step_s, options.seconds[0])
        if best or self._since_plain < self._gap:
            more = min(best + 1, len(goodput) - 1)
            token_s = (options.seconds[more] - step_s) / max(1, options.sizes[more] - options.sizes[best])
            for at in self._probing(rows, lengths, step_s * self._rested, max(0.0, token_s)):
                lengths[at] = 1
        self._rested, self._spent_s = 0, time.perf_counter() - began
        return lengths

    def observe(self, step: StepOutcome) -> None:
        if self.forecast is not None and self._since_plain >= self._gap and not any(r.planned for r in step.rows):
            self._compare(step, self.forecast)
        self._unread.append(step)
        if len(self._unread) >= STEPS_AT_ONCE:
            began = time.perf_counter()
            self._read()
            self._spent_s += (time.perf_counter() - began) / STEPS_AT_ONCE
        if self.forecast is not None:
            looked_s = 0.0 if any(row.planned and not row.is_free for row in step.rows) else step.draft_s
            self._own_s += OWN_RATE * (min(self._spent_s + looked_s, 0.1 * self.forecast.plain_s) - self._own_s)

    def _read(self) -> None:
        """Learn from the steps that wait."""
        for step in self._unread:
            self._learn(step)
        self._unread.clear()

    def _learn(self, step: StepOutcome) -> None:
        self.acceptance.observe(step.rows)
        self.cost.passes.observe(step.num_rows, step.num_tokens, step.num_keys, step.num_pairs, step.target_s)
        if not step.rows:
            return
        made = [row for row in step.rows if not row.is_free]
        longest, num_made = max((row.planned for row in made), default=0), sum(row.num_draft_tokens for row in made)
        num_logits = len(step.rows) + sum(row.num_draft_tokens for row in step.rows)
        num_unread = sum(row.num_unread for row in made if row.num_draft_tokens)
        self.cost.observe_rest(longest, num_unread, num_made, num_logits, step.draft_s, step.verify_s + step.host_s)

    def forget(self, sequence_id: int) -> None:
        self._read()
        self.acceptance.forget(sequence_id)

    def _options(self, rows: Sequence[PlanRow], num_other_tokens: int) -> tuple[_Options, float]:
        """Plans, and the seconds that the prompts of the pass add to each."""
        num_keys = sum(row.context_len for row in rows)
        seconds = self.cost.prices(len(rows), num_keys, num_other_tokens)
        emitted, drafted, made, longest, pairs = float(len(rows)), 0.0, 0.0, 0, float(num_keys)
        plain_s, prompts_s = seconds(0.0, 0.0, 0, pairs), 0.0
        if num_other_tokens:
            prompts_s = plain_s - self.cost.prices(len(rows), num_keys, 0)(0.0, 0.0, 0, pairs)
        units = self._units(rows)
        options = _Options([at for _, at, *_ in units], [0], [emitted], [plain_s])
        stride = 1 + len(units) // MOST_PLANS
        for size, (_, at, unit, chance, found) in enumerate(units, 1):
            row = rows[at]
            emitted += chance
            drafted += found
            pairs += found * row.context_len
            if not row.is_free:
                made, longest = made + found, max(longest, unit + 1)
            if size % stride == 0 or size == len(units):
                options.sizes.append(size)
                options.emitted.append(emitted)
                options.seconds.append(seconds(drafted, made, longest, pairs))
        return options, prompts_s

    def _units(self, rows: Sequence[PlanRow]) -> list[tuple[float, int, int, float, float]]:
        """Draft tokens that can be added, the worthiest first, none before the one it follows.

        Of each minus its worth, its row, its place in the draft, the chance that it is accepted and that it is there.
        """
        units = []
        for at, (chances, found) in enumerate(zip(*self.acceptance.expected(rows), strict=True)):
            worth = float("inf")
            for unit, (chance, there) in enumerate(zip(chances, found, strict=True)):
                worth = min(worth, chance / max(there, 1e-9))
                units.append((-worth, at, unit, chance, there))
        units.sort()
        return units

    def _compare(self, step: StepOutcome, forecast: Forecast) -> None:
        """A step was made without drafts where drafts seemed best."""
        seconds = step.draft_s + step.target_s + step.verify_s + step.host_s
        as_expected = abs(seconds - forecast.plain_s) <= SURPRISE * forecast.plain_s
        self._gap = min(2 * self._gap, LAST_GAP) if as_expected else FIRST_GAP
        self._since_plain = 0

    def _probing(self, rows: Sequence[PlanRow], lengths: Sequence[int], step_s: float, token_s: float) -> list[int]:
        """One row of each route that has had no drafts for long enough, another one each time."""
        members: dict[tuple[str, str], list[int]] = {}
        drafting = set()
        for at, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if length:
                drafting.add((row.route, row.source))
            elif row.limit:
                members.setdefault((row.route, row.source), []).append(at)
        for key in drafting:
            self._probes.pop(key, None)
            members.pop(key, None)
        chosen = []
        for key, places in members.items():
            probe = self._probes.setdefault(key, _Probe())
            probe.saved_s += probe.share * step_s
            if probe.saved_s >= token_s:
                probe.saved_s, probe.share = 0.0, max(probe.share / 2, LAST_SHARE)
                chosen.append(places[probe.count % len(places)])
                probe.count += 1
        return chosen
