"""Greedy output over HTTP: against the server's own log-probabilities, and against a second server or setting."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from foredraft.errors import ForedraftError
from foredraft.lab.audit.remote.answers import INTERRUPTED, Ask, answers
from foredraft.lab.audit.remote.client import Client, Completion
from foredraft.lab.audit.remote.logprobs import Position
from foredraft.lab.audit.remote.probe import Abilities

ROUNDING_GAP = 1e-3
"""Log-probabilities rounded to three decimals may misplace two tokens by this."""
NOISE_FACTOR = 2.0
"""A gap up to so many times the largest noise that was measured is a near-tie."""


class Likeness(enum.StrEnum):
    """How an answer compares with the other server's."""

    IDENTICAL = "token-identical"
    NEAR_TIE = "near-tie"
    FAULT = "fault"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class SelfFault:
    """A greedy token that is not the most likely one by the server's own account."""

    prompt_index: int
    position: int
    emitted: str
    gap: float


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where two answers to one prompt differ.

    Attributes:
        position: tokens before it.
        emitted, other: the two tokens.
        gap: by which log-probability puts its own token above the other one; the larger of what the two servers
            say, None if neither lists both.
    """

    prompt_index: int
    position: int
    emitted: str
    other: str
    gap: float | None


@dataclass(slots=True)
class GreedyResult:
    """What was found; complete if ``trouble`` is None.

    Attributes:
        self_faults: see :class:`SelfFault`.
        num_checked: tokens that could be held against the server's own log-probabilities.
        num_compared: answers held against the other server's.
        noise: largest difference that the two servers show, at places with the same text before, in how far apart
            the two best tokens are; None without such places.
    """

    num_answers: int = 0
    num_tokens: int = 0
    num_checked: int = 0
    self_faults: list[SelfFault] = field(default_factory=list)
    num_compared: int = 0
    num_identical: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    noise: float | None = None
    trouble: str | None = None

    def likeness(self, divergence: Divergence) -> Likeness:
        """Near-tie if the noise could have turned the two tokens round, else fault."""
        if divergence.gap is None or self.noise is None:
            return Likeness.UNKNOWN
        limit = max(ROUNDING_GAP, NOISE_FACTOR * self.noise)
        return Likeness.NEAR_TIE if divergence.gap <= limit else Likeness.FAULT

    @property
    def verdict(self) -> Likeness:
        """The worst that was found."""
        found = {self.likeness(each) for each in self.divergences}
        if self.self_faults or Likeness.FAULT in found:
            return Likeness.FAULT
        return next((each for each in (Likeness.UNKNOWN, Likeness.NEAR_TIE) if each in found), Likeness.IDENTICAL)

    @property
    def convicted(self) -> bool:
        return self.verdict is Likeness.FAULT


def audit_greedy(
    client: Client,
    abilities: Abilities,
    prompts: Sequence[str],
    max_tokens: int,
    concurrency: int,
    tell: Callable[[int], None],
    other: tuple[Client, Abilities] | None = None,
) -> GreedyResult:
    """Ask every prompt once at temperature 0, of both servers if there are two.

    Args:
        tell: called with the number of prompts done.
    """
    result = GreedyResult()
    ours = answers(client, _asks(abilities, prompts, max_tokens), concurrency)
    theirs = answers(other[0], _asks(other[1], prompts, max_tokens), concurrency) if other else None
    try:
        for ask, answer in ours:
            _check(result, ask.prompt_index, answer)
            if theirs is not None:
                counterpart = next((found for asked, found in theirs if asked.index >= ask.index), None)
                if counterpart is not None:
                    _compare(result, ask.prompt_index, answer, counterpart)
            tell(result.num_answers)
    except (ForedraftError, KeyboardInterrupt) as error:
        result.trouble = str(error) or INTERRUPTED
    finally:
        ours.close()
        if theirs is not None:
            theirs.close()
    return result


def _asks(abilities: Abilities, prompts: Sequence[str], max_tokens: int) -> Iterator[Ask]:
    options = {**abilities.options, "temperature": 0.0, "max_tokens": max_tokens}
    return (Ask(index, index, prompt, options) for index, prompt in enumerate(prompts))


def _check(result: GreedyResult, prompt_index: int, answer: Completion) -> None:
    """Hold the tokens against the server's own log-probabilities."""
    result.num_answers += 1
    result.num_tokens += len(answer.positions)
    for place, position in enumerate(answer.positions):
        if not position.top or position.logprob is None or position.ambiguous:
            continue
        result.num_checked += 1
        gap = max(position.top.values()) - position.logprob
        if gap > ROUNDING_GAP:
            result.self_faults.append(SelfFault(prompt_index, place, position.text, gap))


def _compare(result: GreedyResult, prompt_index: int, ours: Completion, theirs: Completion) -> None:
    """Find the first difference, and measure the noise before it."""
    result.num_compared += 1
    if not ours.positions or not theirs.positions:
        if ours.text == theirs.text:
            result.num_identical += 1
        else:
            shared = sum(
                1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours.text, theirs.text, strict=False))
            )
            ends = ours.text[shared : shared + 12], theirs.text[shared : shared + 12]
            result.divergences.append(Divergence(prompt_index, shared, *ends, None))
        return
    place = 0
    for place, (a, b) in enumerate(zip(ours.positions, theirs.positions, strict=False)):
        if a.key != b.key:
            result.divergences.append(Divergence(prompt_index, place, a.text, b.text, _gap(a, b)))
            return
        noise = _noise(a, b)
        if noise is not None:
            result.noise = max(noise, result.noise or 0.0)
    if len(ours.positions) == len(theirs.positions):
        result.num_identical += 1
    else:
        ends = _text_at(ours, place + 1), _text_at(theirs, place + 1)
        result.divergences.append(Divergence(prompt_index, place + 1, *ends, None))


def _text_at(answer: Completion, place: int) -> str:
    return answer.positions[place].text if place < len(answer.positions) else "(end)"


def _gap(a: Position, b: Position) -> float | None:
    """How far one server puts its own token above the other's; the larger of two."""
    gaps = [here.top[here.key] - here.top[there.key] for here, there in ((a, b), (b, a)) if _lists(here, there)]
    return max(gaps) if gaps else None


def _lists(here: Position, there: Position) -> bool:
    return here.key in here.top and there.key in here.top and not here.ambiguous


def _noise(a: Position, b: Position) -> float | None:
    """Difference between the servers in the distance of the two tokens that the first one has on top."""
    best = sorted(a.top, key=lambda key: (-a.top[key], repr(key)))[:2]
    if len(best) < 2 or a.ambiguous or b.ambiguous or any(key not in b.top for key in best):
        return None
    return abs((a.top[best[0]] - a.top[best[1]]) - (b.top[best[0]] - b.top[best[1]]))
