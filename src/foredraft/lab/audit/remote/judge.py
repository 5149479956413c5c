"""The tests that a sampling server stands: everything that the API tells about a token, as bets against exactness.

All outcomes, and every function of them that is tested, are fixed by the text before the token (see ``cells``).
The auditor's own random numbers come from a generator that is passed in.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foredraft.lab.audit.remote.cells import Cells, cells
from foredraft.lab.audit.remote.client import Completion
from foredraft.lab.audit.remote.logprobs import Key
from foredraft.lab.audit.statistics import Bet, MartingaleTest, NeverTest, Panel, PitTests, randomised_pit

ROUNDING = 5e-5
"""Total variation that rounding of log-probabilities to four decimals may hide, at every token."""
HIDDEN = 0.5
"""As a total variation: nothing at all is known of the token."""
IMPOSSIBLE_LOGPROB = -50.0
LONGEST_MATCH = 3
NUM_BY_KEY = 4
NUM_IN_STEP = 2
_LOGPROB_RANGE = 8.0

Row = tuple[MartingaleTest, float, float, float]
"""A test, then f(token), its expectation and its variance."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What became of one answer.

    Attributes:
        num_tested: tokens that were judged.
        num_untestable: tokens whose log-probabilities are missing or cannot be told apart.
        pit: the transformed tokens by position; NaN where not tested.
        keys: the emitted tokens.
    """

    num_tested: int
    num_untestable: int
    pit: NDArray[np.float64]
    keys: tuple[Key, ...]


class Judge:
    """Takes in answers one by one and keeps the evidence.

    Args:
        num_top: tokens that the server lists for a position.
        missing_temperature: None if the log-probabilities are those that the tokens were drawn with; otherwise
            the temperature that is not in them yet (see :func:`cells`).
        false_alarm_rate: of the whole panel of tests.
    """

    def __init__(
        self, num_top: int, missing_temperature: float | None, false_alarm_rate: float, generator: np.random.Generator
    ):
        self.num_top, self.missing_temperature, self.generator = num_top, missing_temperature, generator
        self.most_likely = MartingaleTest("the most likely token")
        self.outside = MartingaleTest("a token outside the top")
        self.logprob = MartingaleTest("log-probability")
        self.copied = MartingaleTest("the token that copying the text proposes")
        self.recent = MartingaleTest("a token seen before in the text")
        self.twin = MartingaleTest("the token of the same prompt's other answer")
        self.in_step = [MartingaleTest(f"two answers in step {j}", 2.0) for j in range(1, NUM_IN_STEP + 1)]
        self.by_key = [MartingaleTest(f"uniformity by token id {j}", math.sqrt(2)) for j in range(1, NUM_BY_KEY + 1)]
        self.impossible = NeverTest("a token of probability 0")
        self.pit = PitTests()
        tests: list[Bet] = [self.most_likely, self.outside, self.copied, self.recent, self.twin, self.logprob]
        tests += [*self.pit.tests, *self.by_key, *self.in_step, self.impossible]
        self.panel = Panel(tests, false_alarm_rate)

    def add(self, answer: Completion, twin: Judged | None = None) -> Judged:
        """Take in an answer.

        Args:
            twin: the answer before it to the same prompt, if there is one: with noise of their own the two
                agree no more often than chance has it.
        """
        keys = tuple(position.key for position in answer.positions)
        pit = np.full(len(keys), np.nan)
        slack = np.array([ROUNDING + position.total_variation for position in answer.positions])
        rows: dict[int, list[tuple[Row, float]]] = defaultdict(list)
        for index, position in enumerate(answer.positions):
            outcome = cells(position, self.num_top, self.missing_temperature)
            if outcome is not None:
                for row in self._rows(outcome, keys[:index], twin):
                    rows[id(row[0])].append((row, slack[index]))
                pit[index] = randomised_pit(*_below(outcome.probs, outcome.drawn), self.generator.random())
        for of_test in rows.values():
            values, means, variances = np.array([row[1:] for row, _ in of_test]).T
            of_test[0][0][0].add(values, means, variances, [each for _, each in of_test])
        for run in _runs(pit):
            self.pit.add(pit[run], slack[run])
        self.impossible.add(
            [each.logprob < IMPOSSIBLE_LOGPROB for each in answer.positions if each.logprob is not None]
        )
        if twin is not None:
            self._compare(pit, twin.pit, slack)
        self._hide(answer.num_hidden)
        num_tested = int((~np.isnan(pit)).sum())
        return Judged(num_tested, len(keys) - num_tested + answer.num_hidden, pit, keys)

    def _rows(self, outcome: Cells, before: tuple[Key, ...], twin: Judged | None) -> Iterator[Row]:
        """One token against the tests of events and of its log-probability, and in the order of the ids."""
        probs, drawn = outcome.probs, outcome.drawn
        yield _event(self.most_likely, outcome, [0])
        if self.missing_temperature is None:
            yield _event(self.outside, outcome, [len(probs) - 1])
        proposals = [(self.copied, copied_token(before))]
        if twin is not None and len(twin.keys) > len(before) and twin.keys[: len(before)] == before:
            proposals.append((self.twin, twin.keys[len(before)]))
        for test, key in proposals:
            if key is not None and key in outcome.keys:
                yield _event(test, outcome, [outcome.keys.index(key)])
        if seen := [index for index, key in enumerate(outcome.keys) if key in before]:
            yield _event(self.recent, outcome, seen)

        logprobs = np.append(np.log(np.maximum(probs[:-1], 1e-300)), outcome.floor)
        values = logprobs.clip(-_LOGPROB_RANGE, 0.0) / _LOGPROB_RANGE
        mean = float(probs @ values)
        yield self.logprob, float(values[drawn]), mean, float(probs @ (values - mean) ** 2)

        order = np.array(
            [*sorted(range(len(outcome.keys)), key=lambda index: repr(outcome.keys[index])), len(probs) - 1]
        )
        below, at = _below(probs[order], int(np.flatnonzero(order == drawn)[0]))
        place = math.pi * float(randomised_pit(below, at, self.generator.random()))
        for j, test in enumerate(self.by_key, start=1):
            yield test, math.sqrt(2) * math.cos(j * place), 0.0, 1.0

    def _compare(self, pit: NDArray[np.float64], other: NDArray[np.float64], slack: NDArray[np.float64]) -> None:
        """Products of harmonics at the same place of two answers; the variance is known from the first one."""
        both = min(len(pit), len(other))
        here, there = pit[:both], other[:both]
        tested = ~(np.isnan(here) | np.isnan(there))
        for j, test in enumerate(self.in_step, start=1):
            ours, theirs = (math.sqrt(2) * np.cos(math.pi * j * numbers[tested]) for numbers in (here, there))
            test.add(ours * theirs, 0.0, theirs**2, slack[:both][tested])

    def _hide(self, num_hidden: int) -> None:
        """Tokens that the server keeps to itself count as if they spoke for the server in every test."""
        if num_hidden:
            nothing = np.zeros(num_hidden)
            for test in self.panel.tests:
                if isinstance(test, MartingaleTest):
                    test.add(nothing, 0.0, 0.0, HIDDEN)


def copied_token(before: Sequence[Key]) -> Key | None:
    """What prompt lookup would draft next: the token after the last earlier place of the text's longest end.

    Ends of up to three tokens are looked for. Known before the token is drawn, so it may be bet on.
    """
    for size in range(min(LONGEST_MATCH, len(before) - 1), 0, -1):
        end = tuple(before[-size:])
        for start in range(len(before) - size - 1, -1, -1):
            if tuple(before[start : start + size]) == end:
                return before[start + size]
    return None


def _event(test: MartingaleTest, outcome: Cells, indices: Sequence[int]) -> Row:
    prob = min(1.0, math.fsum(outcome.probs[index] for index in indices))
    return test, float(outcome.drawn in indices), prob, prob * (1.0 - prob)


def _below(probs: NDArray[np.float64], drawn: int) -> tuple[float, float]:
    return float(probs[:drawn].sum()), float(probs[drawn])


def _runs(pit: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    """Indices of the stretches of neighbouring tested tokens."""
    tested = np.flatnonzero(~np.isnan(pit))
    return [run for run in np.split(tested, np.flatnonzero(np.diff(tested) > 1) + 1) if run.size]
