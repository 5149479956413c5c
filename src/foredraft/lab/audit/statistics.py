"""Evidence against exactness, from tokens that are drawn one after the other. Plain numbers: no model, no engine.

For any function f that is fixed before a token is drawn, f(token) - E[f(token)] has mean 0 given the past if the
token has the law that it should. Sums of such differences are martingales with a known variance:

    test = MartingaleTest("most likely token")                     |f - E f| <= bound = 1 for an event
    test.add(values, expectations, variances)                      one entry per token, numbers or arrays
    test.z_score, test.bias, test.log_evidence

Everything else is made of these. A randomised probability-integral transform gives numbers that are uniform
whatever the law (:func:`randomised_pit`), and :class:`PitTests` turns them into tests of uniformity and of serial
dependence. :class:`Panel` combines tests into one verdict:

    panel = Panel([*tests, *pit.tests], false_alarm_rate=1e-6)
    while tokens come: ...add...; if panel.look(): break           convicted; stop

Validity. Each test's evidence is a bet against exactness that starts at 1 and on average cannot grow while the
engine is exact (a non-negative supermartingale: Freedman 1975, "On tail probabilities for martingales"; Howard,
Ramdas, McAuliffe and Sekhon, 1808.03204, the sub-Poisson case). An average of such bets is one too, however the
tests depend on each other (Vovk and Wang, 1912.06116). So by Ville's inequality (1939) an exact engine is ever
convicted, no matter how often one looks and when one stops, with a probability of at most ``false_alarm_rate``:
that is the rate of the whole family of tests. No approximation by a normal law is involved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq

FALSE_ALARM_RATE = 1e-6
NUM_HARMONICS = 4
NUM_SERIAL = 2
_STAKES = np.geomspace(2.0**-10, 4.0, 25)
"""Stakes times bound of the bets that are averaged: the smallest suits millions of tokens, the largest a few."""
_MOST_TOKENS = 10**12


class Bet(Protocol):
    """What a :class:`Panel` combines.

    Attributes:
        name: for people.
        num_observations: how many tokens were judged.
        log_evidence: natural logarithm of the bet's present worth.
    """

    name: str
    num_observations: int

    @property
    def log_evidence(self) -> float: ...


@dataclass(slots=True)
class MartingaleTest:
    """The sum of f(token) - E[f(token)] with its variance.

    Attributes:
        name: for people.
        bound: of \\|f(token) - E[f(token)]\\|; 1 for an event.
        total: sum of the differences.
        variance: sum of the variances that the differences have under the target's law.
        allowance: how far rounding of the expectations may have moved the sum; see :meth:`add`.
    """

    name: str
    bound: float = 1.0
    num_observations: int = 0
    total: float = 0.0
    variance: float = 0.0
    allowance: float = 0.0

    def add(
        self, values: ArrayLike, expectations: ArrayLike, variances: ArrayLike, total_variation: ArrayLike = 0.0
    ) -> None:
        """Take in tokens, in any number of calls.

        Args:
            values: f(token), ``[n]`` or a number.
            expectations, variances: of f under the target's law given what preceded the token.
            total_variation: by which that law may differ from the one that the engine computed (rounding of a
                pass in another shape). A bias that such a difference could explain is no evidence.

        Raises:
            ValueError: a difference exceeds the bound, so that the evidence would mean nothing.
        """
        differences = np.atleast_1d(np.asarray(values, dtype=np.float64) - np.asarray(expectations, dtype=np.float64))
        largest = float(np.abs(differences).max(initial=0.0))
        if largest > self.bound * (1 + 1e-9):
            raise ValueError(f"{self.name}: a difference of {largest:g} exceeds the bound {self.bound:g}; clip f")
        shape = differences.shape
        slack = 2.0 * float(np.broadcast_to(np.asarray(total_variation, dtype=np.float64), shape).sum())
        self.num_observations += differences.size
        self.total += float(differences.sum())
        self.variance += float(np.broadcast_to(np.asarray(variances, dtype=np.float64), shape).sum())
        self.variance += slack * self.bound**2
        self.allowance += slack * self.bound

    @property
    def z_score(self) -> float:
        """The sum over its standard deviation: standard normal for an exact engine and many tokens."""
        return self.total / math.sqrt(self.variance) if self.variance > 0 else 0.0

    @property
    def bias(self) -> float:
        """Mean difference per token: for an event, by how much it happens too often."""
        return self.total / self.num_observations if self.num_observations else 0.0

    @property
    def log_evidence(self) -> float:
        return log_evidence(self.total, self.variance, self.bound, self.allowance)


@dataclass(slots=True)
class NeverTest:
    """Counts what the target's law excludes; one such token is certain evidence."""

    name: str
    num_observations: int = 0
    num_violations: int = 0

    def add(self, violated: ArrayLike) -> None:
        """Take in tokens: true where the token has probability 0, by more than rounding could do."""
        flags = np.atleast_1d(np.asarray(violated, dtype=bool))
        self.num_observations += flags.size
        self.num_violations += int(flags.sum())

    @property
    def log_evidence(self) -> float:
        return math.inf if self.num_violations else 0.0


def log_evidence(total: float, variance: float, bound: float = 1.0, allowance: float = 0.0) -> float:
    """Logarithm of the average worth of bets on the sum being too high or too low, with small and large stakes.

    A bet with stake s is worth exp(s (total - allowance) - variance (exp(s b) - 1 - s b) / b^2), b being the bound;
    its mean is at most 1 (1808.03204, table 3, sub-Poisson). Never above what the sum warrants, at any time.
    """
    stakes = _STAKES / bound
    cost = np.expm1(_STAKES) - _STAKES
    sides = np.concatenate([stakes * (side * total - allowance) for side in (1.0, -1.0)])
    worth = sides - np.tile(cost, 2) * variance / bound**2
    highest = float(worth.max())
    return highest + math.log(float(np.exp(worth - highest).mean()))


def randomised_pit(below: ArrayLike, at: ArrayLike, uniforms: ArrayLike) -> NDArray[np.float64]:
    """Randomised probability-integral transform: uniform on (0, 1) if the tokens have their law, and independent.

    Args:
        below: probability of all outcomes that come before the token in some order fixed beforehand.
        at: probability of the token. Where only some probabilities are known, the rest may be one outcome.
        uniforms: the auditor's own random numbers.
    """
    position = np.asarray(below, dtype=np.float64) + np.asarray(uniforms) * np.asarray(at, dtype=np.float64)
    numbers: NDArray[np.float64] = np.clip(position, 0.0, 1.0)
    return numbers


class PitTests:
    """Uniformity and serial dependence of transformed tokens, as martingale tests.

    Uniformity: means of the harmonics sqrt(2) cos(pi j u), j = 1 .. 4 (Neyman's smooth test, 1937, with cosines).
    Serial dependence: products of the same harmonic at neighbouring tokens of a text; their variance is known
    before the second token is drawn.
    """

    def __init__(self, num_harmonics: int = NUM_HARMONICS, num_serial: int = NUM_SERIAL):
        bound = math.sqrt(2.0)
        self.uniformity = [MartingaleTest(f"uniformity {j}", bound) for j in range(1, num_harmonics + 1)]
        self.serial = [MartingaleTest(f"serial dependence {j}", bound**2) for j in range(1, num_serial + 1)]

    @property
    def tests(self) -> list[MartingaleTest]:
        return [*self.uniformity, *self.serial]

    def add(self, numbers: NDArray[np.float64], total_variation: ArrayLike = 0.0, before: float | None = None) -> None:
        """Take in neighbouring tokens of one text.

        Args:
            numbers: from :func:`randomised_pit`, ``[n]``.
            total_variation: see :meth:`MartingaleTest.add`, one number or ``[n]``.
            before: the number of the token just before, if a text comes in parts.
        """
        slack = np.broadcast_to(np.asarray(total_variation, dtype=np.float64), numbers.shape)
        for j, test in enumerate(self.uniformity, start=1):
            test.add(_harmonic(numbers, j), 0.0, 1.0, slack)
        if before is not None:
            numbers, slack = np.concatenate([[before], numbers]), np.concatenate([[0.0], slack])
        for j, test in enumerate(self.serial, start=1):
            values = _harmonic(numbers, j)
            test.add(values[1:] * values[:-1], 0.0, values[:-1] ** 2, slack[1:])


def _harmonic(numbers: NDArray[np.float64], j: int) -> NDArray[np.float64]:
    harmonic: NDArray[np.float64] = math.sqrt(2.0) * np.cos(math.pi * j * numbers)
    return harmonic


class Panel:
    """Tests with one verdict. Which tests there are is settled before the first token.

    Args:
        tests: may still be empty of tokens; one that never gets any weighs nothing.
        false_alarm_rate: the probability that an exact engine is ever convicted, over all tests and looks.

    Attributes:
        peak_log_evidence: the highest average evidence that a look has seen.
    """

    def __init__(self, tests: Iterable[Bet], false_alarm_rate: float = FALSE_ALARM_RATE):
        if not 0.0 < false_alarm_rate < 1.0:
            raise ValueError(f"false_alarm_rate={false_alarm_rate} is outside (0, 1)")
        self.tests, self.false_alarm_rate = list(tests), false_alarm_rate
        self.peak_log_evidence = 0.0

    def look(self) -> bool:
        """Weigh the evidence so far; may be called at any time. Returns :attr:`convicted`."""
        now = float(np.logaddexp.reduce([test.log_evidence for test in self.tests])) - math.log(len(self.tests))
        self.peak_log_evidence = max(self.peak_log_evidence, now)
        return self.convicted

    @property
    def convicted(self) -> bool:
        """Whether any look found the average evidence at 1 / false_alarm_rate or above."""
        return self.peak_log_evidence >= -math.log(self.false_alarm_rate)

    @property
    def limit(self) -> float:
        """The log-evidence at which one test alone convicts."""
        return math.log(len(self.tests) / self.false_alarm_rate)

    @property
    def strongest(self) -> Bet:
        return max(self.tests, key=lambda test: test.log_evidence)


def visible_bias(num_tokens: int, variance: float, limit: float, bound: float = 1.0, power: float = 0.9) -> float:
    """The smallest bias per token that so many tokens show with the given probability; inf if none.

    Args:
        variance: of f per token, on average.
        limit: :attr:`Panel.limit`.
        bound: of the test.
    """
    if num_tokens < 1:
        return math.inf
    spread, high = num_tokens * variance, 1.0
    while log_evidence(high, spread, bound) < limit:
        high *= 2.0
    needed = brentq(lambda total: log_evidence(total, spread, bound) - limit, 0.0, high)
    return float(needed + NormalDist().inv_cdf(power) * math.sqrt(spread)) / num_tokens


def tokens_needed(bias: float, variance: float, limit: float, bound: float = 1.0, power: float = 0.9) -> int:
    """How many tokens show a bias of that size with the given probability; arguments as in :func:`visible_bias`."""
    if not bias > 0.0:
        raise ValueError(f"bias={bias} must be above 0: no number of tokens shows that there is none")

    def seen(num_tokens: int) -> bool:
        return visible_bias(num_tokens, variance, limit, bound, power) <= bias

    low, high = 0, 1
    while not seen(high):
        low, high = high, 2 * high
        if high > _MOST_TOKENS:
            raise ValueError(f"a bias of {bias:g} takes more than {_MOST_TOKENS:g} tokens to see")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if seen(middle) else (middle, high)
    return high
