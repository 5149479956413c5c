"""What a step costs: a measured table of pass times, corrected by the steps as they happen.

A pass of M tokens over B rows takes

    pass(M) + row_s * (B - 1) + key_s * (context of all rows) + pair_s * (sum over rows of further tokens * context)

where pass(M) is flat while the weights are the bottleneck and rises with M after that. The table comes from
:mod:`foredraft.engine.profile`. Real steps correct it in ways that are told apart. Two factors say how slow the
machine is at the moment, one for reading the weights, which is what a pass of one token does, and one for all that
comes on top: both change quickly, mostly together (a neighbour's load), sometimes not (memory alone becomes faster).
The shape of the table changes slowly. Single slow steps move none of them (see ``filters``).

Drafting takes ``once_s + step_s * (longest draft) + token_s * (all draft tokens)``: a drafter that runs a model for
every token pays the second, heads that draft all at once the first, and one that copies next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foredraft.policy.filters import Floats, LinearCost, RobustFilter

SPEED, SPEED_DRIFT = 0.3, 0.03
"""How far the speed may be from that of the measurement (natural logarithm), and its change from step to step."""
RATIO, RATIO_DRIFT = 0.1, 0.01
"""The same of the ratio of the two factors."""
SHAPE, SHAPE_DRIFT = 0.15, 0.002
"""The same of a point of the table."""
NOISE = 0.08
"""Relative deviation of the seconds of equal passes."""
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
        knots, seconds = self.continued()
        attention = self.key_s * num_keys + self.pair_s * max(0, num_pairs - num_keys)
        return float(np.interp(num_tokens, knots, seconds)) + self.row_s * max(0, num_rows - 1) + attention

    def continued(self) -> tuple[Floats, Floats]:
        """Sizes and seconds, with one more point far behind the last."""
        sizes, seconds = [float(n) for n in self.num_tokens], list(self.seconds)
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]) if len(sizes) > 1 else 0.0
        seconds.append(seconds[-1] + slope * (FAR - 1) * sizes[-1])
        return np.array([*sizes, FAR * sizes[-1]]), np.array(seconds)


@dataclass(frozen=True, slots=True)
class DraftCost:
    """What is known of a drafter before it has run: seconds for each step that drafts, for each token of the longest
    draft, and for each draft token."""

    once_s: float = 0.0
    step_s: float = 0.0
    token_s: float = 0.0

    @classmethod
    def declared(cls, cost: float, *, one_pass: bool, target_s: float) -> DraftCost:
        """From a drafter's own ``cost``, the share of a target pass that a token takes, or a draft if it takes one."""
        return cls(once_s=cost * target_s) if one_pass else cls(step_s=cost * target_s)


class PassCost:
    """Predicts the seconds of the target's passes.

    Args:
        table: as measured on this machine.
    """

    def __init__(self, table: PassTable):
        self.table = table
        self._knots, self._measured = table.continued()
        self._points = self._measured
        places = np.log(self._knots[:-1])
        covariance = np.diag([SPEED**2, RATIO**2, *[0.0] * len(places)])
        covariance[2:, 2:] = SHAPE**2 * np.exp(-np.abs(places[:, None] - places))
        drift = [SPEED_DRIFT, RATIO_DRIFT, *[SHAPE_DRIFT] * len(places)]
        self._filter = RobustFilter(np.zeros(len(drift)), covariance, drift)  # logarithms: the two factors, the shape

    def seconds(self, num_rows: int, num_tokens: Floats, num_keys: int, num_pairs: Floats) -> Floats:
        """Of passes over ``num_rows`` rows, on the machine as it has been lately; arrays of equal length."""
        table = self.table
        reading, further = self._factors()
        attention = table.key_s * num_keys + table.pair_s * np.maximum(0.0, num_pairs - num_keys)
        base = np.interp(num_tokens, self._knots, self._points) + table.row_s * max(0, num_rows - 1)
        predicted: Floats = further * (base + attention) + (reading - further) * self._points[0]
        return predicted

    def observe(self, num_rows: int, num_tokens: int, num_keys: int, num_pairs: int, seconds: float) -> None:
        predicted = float(self.seconds(num_rows, np.array([num_tokens]), num_keys, np.array([num_pairs]))[0])
        at = min(max(int(np.searchsorted(self._knots, num_tokens)), 1), len(self._knots) - 1)
        step = self._knots[at] - self._knots[at - 1]
        right = min(1.0, max(0.0, (num_tokens - self._knots[at - 1]) / step))
        reading, further = self._factors()
        weights = np.zeros(len(self._filter.mean))
        weights[0] = 1.0
        weights[1] = 1.0 - reading * self._points[0] / predicted
        weights[2] = (reading - further) * self._points[0] / predicted
        for knot, share in ((at - 1, 1.0 - right), (at, right)):
            inner = min(knot, len(self._knots) - 2)  # the point far behind moves with the last one
            weights[2 + inner] += share * further * self._points[knot] / predicted
        self._filter.update(weights, float(np.log(max(seconds, 1e-9) / predicted)), NOISE, at)
        shape = np.exp(self._filter.mean[2:])
        self._points = self._measured * np.append(shape, shape[-1])

    def _factors(self) -> tuple[float, float]:
        """How slow the machine is at the moment at reading the weights, and at all that comes on top."""
        speed, ratio = self._filter.mean[:2]
        return float(np.exp(speed)), float(np.exp(speed + ratio))


class StepCost:
    """Predicts the seconds of a step.

    Args:
        table: of the target's passes.
        draft: what is known of the drafter.
    """

    def __init__(self, table: PassTable, draft: DraftCost | None = None):
        known = draft or DraftCost()
        self.passes = PassCost(table)
        self._draft = LinearCost([known.once_s, known.step_s, known.token_s], [1e-4, 2e-5, 1e-5])
        self._rest = LinearCost([5e-4, 2e-5], [5e-4, 2e-5])  # verification and host: a step, a row of logits

    @property
    def draft_seconds(self) -> Floats:
        """Current estimates of ``once_s``, ``step_s`` and ``token_s``."""
        return self._draft.seconds

    def seconds(
        self,
        num_rows: int,
        num_draft_tokens: Floats,
        num_made: Floats,
        longest: Floats,
        num_pairs: Floats,
        num_keys: int,
        num_other_tokens: int,
    ) -> Floats:
        """Of steps over the same rows with different drafts; arrays of equal length.

        Args:
            num_draft_tokens: of all rows together.
            num_made: of these, all whose drafting takes time.
            longest: draft of any row whose drafting takes time.
            num_pairs: sum over rows of tokens fed times context.
            num_keys: sum over rows of the context.
            num_other_tokens: of prompts in the same pass.
        """
        num_logits = num_rows + num_draft_tokens
        passed = self.passes.seconds(num_rows, num_logits + num_other_tokens, num_keys, num_pairs)
        once, step, token = self._draft.seconds
        rest, logits = self._rest.seconds
        drafted = once * (longest > 0) + step * longest + token * num_made
        total: Floats = passed + drafted + rest + logits * num_logits
        return total

    def observe_rest(self, longest: int, num_made: int, num_logits: int, draft_s: float, rest_s: float) -> None:
        """Seconds of drafting, and of verification and all else; where no draft took time, that of drafting is spent in
        every step, whatever is planned."""
        if longest:
            self._draft.observe([1, longest, num_made], draft_s)
        self._rest.observe([1, num_logits], rest_s if longest else rest_s + draft_s)
