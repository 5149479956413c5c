"""What a step costs: a measured table of pass times, corrected by the steps as they happen.

A pass of M tokens over B rows takes

    pass(M) + key_s * (context of all rows) + pair_s * (sum over rows of tokens * context)

where pass(M) is flat while the weights are the bottleneck and rises with M after that. The table comes from
:func:`foredraft.engine.profile.measure_pass_table`; real steps correct it, point by point, relative to how fast the
machine is at the moment. Medians, so that a neighbour's load or one slow step moves nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

WINDOW = 15
"""Steps that a median is taken over."""


@dataclass(frozen=True, slots=True)
class PassTable:
    """Seconds of passes as measured.

    Attributes:
        num_tokens: ascending, from 1.
        seconds: of a pass of so many tokens with a negligible context.
        key_s: for each key that a row reads.
        pair_s: for each key that a token attends to, beyond the first token of its row.
    """

    num_tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    key_s: float
    pair_s: float

    @property
    def free_tokens(self) -> int:
        """Tokens of the largest pass that costs at most a tenth more than a pass of one."""
        limit = 1.1 * self.seconds[0]
        return max(n for n, s in zip(self.num_tokens, self.seconds, strict=True) if s <= limit)


@dataclass(slots=True)
class _Recent:
    """A running median; ``value`` is the first guess until something is added."""

    value: float
    values: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def is_settled(self) -> bool:
        return len(self.values) == WINDOW

    def add(self, value: float) -> None:
        self.values.append(value)
        self.value = median(self.values)


class StepCost:
    """Predicts the seconds of a step.

    Args:
        table: as measured on this machine.
        one_pass_drafts: the drafter's cost does not grow with the length of its drafts.
    """

    def __init__(self, table: PassTable, *, one_pass_drafts: bool = False):
        self.table = table
        self._one_pass = one_pass_drafts
        # Observed / table at each point, which begins as if the table had been confirmed twice; and observed /
        # corrected table at the points that are settled, for what makes all passes slower or faster.
        self._shape = [_Recent(1.0, deque([1.0, 1.0], WINDOW)) for _ in table.num_tokens]
        self._speed = _Recent(1.0)
        self._points = list(table.seconds)
        self._draft, self._verify, self._host = _Recent(0.0), _Recent(0.0), _Recent(0.0)

    def pass_s(self, num_tokens: int, num_keys: int, num_pairs: int) -> float:
        """Seconds of the target's pass, on the machine as it has been lately."""
        base = interpolate(num_tokens, self.table.num_tokens, self._points)
        attention = self.table.key_s * num_keys + self.table.pair_s * max(0, num_pairs - num_keys)
        return self._speed.value * (base + attention)

    def draft_s(self, longest: int) -> float:
        """Seconds of drafting when the longest draft has so many tokens."""
        return self._draft.value * (min(longest, 1) if self._one_pass else longest)

    def overhead_s(self, num_logits: int) -> float:
        """Seconds of verification and of everything else."""
        return self._verify.value * num_logits + self._host.value

    def observe_pass(self, num_tokens: int, num_keys: int, num_pairs: int, seconds: float) -> None:
        attention = self.table.key_s * num_keys + self.table.pair_s * max(0, num_pairs - num_keys)
        plain = interpolate(num_tokens, self.table.num_tokens, self.table.seconds) + attention
        at = min(bisect_left(self.table.num_tokens, num_tokens), len(self._shape) - 1)
        if self._shape[at].is_settled:
            self._speed.add(seconds / (plain * self._shape[at].value))
        self._shape[at].add(seconds / (plain * self._speed.value))
        self._points[at] = self.table.seconds[at] * self._shape[at].value

    def observe_rest(self, longest: int, num_logits: int, draft_s: float, verify_s: float, host_s: float) -> None:
        if longest:
            self._draft.add(draft_s / (1 if self._one_pass else longest))
        self._verify.add(verify_s / max(1, num_logits))
        self._host.add(host_s)


def interpolate(x: int, xs: Sequence[int], ys: Sequence[float]) -> float:
    """Piecewise linear; before the first point its value, behind the last one with the last slope."""
    if x <= xs[0] or len(xs) == 1:
        return ys[0]
    at = min(bisect_left(xs, x), len(xs) - 1)
    slope = (ys[at] - ys[at - 1]) / (xs[at] - xs[at - 1])
    return ys[at - 1] + slope * (x - xs[at - 1])
