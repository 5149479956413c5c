"""What a step costs: a measured table of pass times, corrected by the steps as they happen.

A pass of M tokens over B rows takes

    pass(M) + row_s * (B - 1) + key_s * (context of all rows) + pair_s * (sum over rows of further tokens * context)

where pass(M) is flat while the weights are the bottleneck and rises with M after that. The table comes from
:mod:`foredraft.engine.profile`. Real steps correct it in ways that are told apart. Two factors say how slow the
machine is at the moment, one for reading the weights, which is what a pass of one token does, and one for all that
comes on top: both change quickly, mostly together (a neighbour's load), sometimes not (memory alone becomes faster).
The shape of the table changes slowly. Single slow steps move none of them (see ``filters``).

Drafting takes ``once_s + step_s * passes + read_s * unread + token_s * (all draft tokens)``, where the longest draft
says how many passes of the drafter's model there are, up to a limit that a drafter may have, and ``unread`` are the
tokens of the text that it has to read first; one that copies pays next to nothing. What was left to read is told apart
because a drafter that goes on drafting never leaves much: else one that has rested would seem too dear to begin again.

What is asked each step is plain Python: behind a pass over all weights nothing is left in the caches, and the first
call of each array function then takes longer than a dozen sums.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from foredraft.policy.filters import LinearCost, RobustFilter

SPEED, SPEED_DRIFT = 0.3, 0.03
"""How far the speed may be from that of the measurement (natural logarithm), and its change from step to step."""
RATIO, RATIO_DRIFT = 0.1, 0.01
"""The same of the ratio of the two factors."""
SHAPE, SHAPE_DRIFT = 0.15, 0.002
"""The same of a point of the table."""
NOISE = 0.08
"""Relative deviation of the seconds of equal passes."""
READ = 1e-4
"""How far the seconds for a token that a drafter's model reads may be from none."""
FAR = 16
"""The table is continued with its last slope to so many times its last size."""


@dataclass(frozen=True, slots=True)
class PassTable:
    """Seconds of passes as measured.

    Attributes:
        num_tokens: ascending, from 1.
        seconds: of a pass of so many tokens of one row with a negligible context.
        row_s: for each further row.
        key_s: for each key that a row reads.
        pair_s: for each key that a token attends to, beyond the first token of its row.
    """

    num_tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    key_s: float
    pair_s: float
    row_s: float = 0.0

    @property
    def free_tokens(self) -> int:
        """Tokens of the largest pass that costs at most a tenth more than a pass of one."""
        limit = 1.1 * self.seconds[0]
        return max(n for n, s in zip(self.num_tokens, self.seconds, strict=True) if s <= limit)

    def pass_s(self, num_rows: int, num_tokens: int, num_keys: int, num_pairs: int) -> float:
        """Seconds of a pass, from the table alone."""
        attention = self.key_s * num_keys + self.pair_s * max(0, num_pairs - num_keys)
        return _between(*self.continued(), num_tokens) + self.row_s * max(0, num_rows - 1) + attention

    def continued(self) -> tuple[list[float], list[float]]:
        """Sizes and seconds, with one more point far behind the last."""
        sizes, seconds = [float(n) for n in self.num_tokens], list(self.seconds)
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else 0.0
        seconds.append(seconds[-1] + slope * (FAR - 1) * sizes[-1])
        return [*sizes, FAR * sizes[-1]], seconds


@dataclass(frozen=True, slots=True)
class DraftCost:
    """What is known of a drafter before it has run: seconds for each step that drafts, for each pass of its model, and
    for each draft token."""

    once_s: float = 0.0
    step_s: float = 0.0
    token_s: float = 0.0


class PassCost:
    """Predicts the seconds of the target's passes.

    Args:
        table: as measured on this machine.
    """

    def __init__(self, table: PassTable):
        self.table = table
        self._knots, self._measured = table.continued()
        self._points = self._measured
        self._factors = 1.0, 1.0  # how slow the machine is now at reading the weights, and at all that comes on top
        places = np.log(self._knots[:-1])
        covariance = np.diag([SPEED**2, RATIO**2, *[0.0] * len(places)])
        covariance[2:, 2:] = SHAPE**2 * np.exp(-np.abs(places[:, None] - places))
        drift = [SPEED_DRIFT, RATIO_DRIFT, *[SHAPE_DRIFT] * len(places)]
        self._filter = RobustFilter(np.zeros(len(drift)), covariance, drift)  # logarithms: the two factors, the shape

    def prices(self, num_rows: int, num_keys: int) -> Callable[[float, float], float]:
        """Seconds of passes over the same rows by tokens fed and pairs, on the machine as it has been lately."""
        knots, points, pair_s = self._knots, self._points, self.table.pair_s
        reading, further = self._factors
        all_s = self.table.row_s * max(0, num_rows - 1) + self.table.key_s * num_keys
        fixed_s = further * all_s + (reading - further) * points[0]

        def seconds(num_tokens: float, num_pairs: float) -> float:
            return fixed_s + further * (_between(knots, points, num_tokens) + pair_s * max(0.0, num_pairs - num_keys))

        return seconds

    def observe(self, num_rows: int, num_tokens: int, num_keys: int, num_pairs: int, seconds: float) -> None:
        predicted = self.prices(num_rows, num_keys)(num_tokens, num_pairs)
        at, right = _place(self._knots, num_tokens)
        reading, further = self._factors
        flat = self._points[0] / predicted
        weights = [1.0, 1.0 - reading * flat, (reading - further) * flat, *[0.0] * (len(self._measured) - 2)]
        for knot, share in ((at - 1, 1.0 - right), (at, right)):
            inner = min(knot, len(self._knots) - 2)  # the point far behind moves with the last one
            weights[2 + inner] += share * further * self._points[knot] / predicted
        self._filter.update(np.array(weights), math.log(max(seconds, 1e-9) / predicted), NOISE, at)
        speed, ratio, *shape = self._filter.mean.tolist()
        self._factors = math.exp(speed), math.exp(speed + ratio)
        self._points = [s * math.exp(by) for s, by in zip(self._measured, [*shape, shape[-1]], strict=True)]


def _place(knots: Sequence[float], x: float) -> tuple[int, float]:
    """The knot behind a number, and how far this lies towards it from the one before: 0 to 1."""
    at = min(max(bisect_left(knots, x), 1), len(knots) - 1)
    return at, min(1.0, max(0.0, (x - knots[at - 1]) / (knots[at] - knots[at - 1])))


def _between(knots: Sequence[float], values: Sequence[float], x: float) -> float:
    """Interpolated, outside of the knots the first or last value."""
    at, right = _place(knots, x)
    return values[at - 1] + right * (values[at] - values[at - 1])


class StepCost:
    """Predicts the seconds of a step.

    Args:
        table: of the target's passes.
        draft: what is known of the drafter.
        max_passes: most passes of its model that a draft takes; None: one for each token.
    """

    def __init__(self, table: PassTable, draft: DraftCost | None = None, max_passes: int | None = None):
        known = draft or DraftCost()
        self.passes = PassCost(table)
        self._max_passes = math.inf if max_passes is None else max_passes
        self._draft = LinearCost([known.once_s, known.step_s, 0.0, known.token_s], [1e-4, 2e-5, READ, 1e-5])
        self._rest = LinearCost([5e-4, 2e-5], [5e-4, 2e-5])  # verification and host: a step, a row of logits

    @property
    def draft_seconds(self) -> list[float]:
        """Current estimates of ``once_s``, ``step_s``, ``read_s`` and ``token_s``."""
        return self._draft.seconds

    def prices(
        self, num_rows: int, num_keys: int, num_other_tokens: int
    ) -> Callable[[float, float, int, float], float]:
        """Seconds of steps over the same rows, as a function of their drafts.

        Args:
            num_keys: sum over rows of the context.
            num_other_tokens: of prompts in the same pass.

        Returns:
            takes the draft tokens of all rows together; of these, all whose drafting takes time; the longest draft
            that takes time; and the sum over rows of tokens fed times context.
        """
        pass_s = self.passes.prices(num_rows, num_keys)
        (once, step, _, token), most = self._draft.seconds, self._max_passes
        rest, logits = self._rest.seconds

        def seconds(num_draft_tokens: float, num_made: float, longest: int, num_pairs: float) -> float:
            num_logits = num_rows + num_draft_tokens
            drafting = once * (longest > 0) + step * min(longest, most) + token * num_made
            return pass_s(num_logits + num_other_tokens, num_pairs) + drafting + rest + logits * num_logits

        return seconds

    def observe_rest(
        self, longest: int, num_unread: int, num_made: int, num_logits: int, draft_s: float, rest_s: float
    ) -> None:
        """Seconds of drafting, and of verification and all else; where no draft took time, that of drafting is spent in
        every step, whatever is planned."""
        if longest:
            self._draft.observe([1, min(longest, self._max_passes), num_unread, num_made], draft_s)
        self._rest.observe([1, num_logits], rest_s if longest else rest_s + draft_s)
