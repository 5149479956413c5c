"""What is known of a token's distribution, as a few outcomes: the most likely tokens by rank, and all the rest as one.

The outcomes must not depend on which token was then drawn, or every test built on them is wrong. Servers list n
tokens, or n and the emitted one, or n with the emitted one in place of the last; and in bf16 several tokens have the
very same probability. So the outcomes are the tokens that are strictly more likely than the (n-1)-th value listed:
that value is the same in all these lists, whatever was drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foredraft.lab.audit.remote.logprobs import Key, Position

EXCESS_MASS = 1.0 + 1e-3
"""Above this total, probabilities are more than rounded."""


@dataclass(frozen=True, slots=True)
class Cells:
    """The outcomes of one position.

    Attributes:
        keys: the tokens known one by one, the most likely first; ties in an order of their own.
        probs: their probabilities, then that of all other tokens as one outcome; ``[len(keys) + 1]``.
        drawn: index of the outcome that happened.
        floor: no token of the rest has a log-probability above this.
    """

    keys: tuple[Key, ...]
    probs: NDArray[np.float64]
    drawn: int
    floor: float


def cells(position: Position, num_top: int, missing_temperature: float | None = None) -> Cells | None:
    """The outcomes of a position; None where they cannot be known, which does not depend on the token drawn.

    Args:
        num_top: n, the tokens that the server lists for a position.
        missing_temperature: given if the log-probabilities are those before this temperature was applied. The rest then
            has no known probability: the outcomes are those given that the token is one of the known ones, and a
            token of the rest leaves nothing to test, so None comes back for it too.
    """
    listed = sorted(position.top.items(), key=lambda item: (-item[1], repr(item[0])))
    if not listed or position.ambiguous:
        return None
    floor = listed[min(num_top - 1, len(listed)) - 1][1]
    known = [item for item in listed if item[1] > floor]
    if not known:
        return None
    keys = tuple(key for key, _ in known)
    logprobs = np.array([value for _, value in known])
    drawn = keys.index(position.key) if position.key in keys else len(keys)
    if missing_temperature is None:
        probs = np.exp(logprobs)
        return Cells(keys, _with_rest(probs), drawn, floor)
    if drawn == len(keys):
        return None
    weights = np.exp((logprobs - logprobs[0]) / missing_temperature)
    return Cells(keys, np.append(weights / weights.sum(), 0.0), drawn, floor)


def _with_rest(probs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Append what is left of 1. Where rounding left less than nothing, scale down."""
    rest = 1.0 - float(probs.sum())
    return np.append(probs, rest) if rest > 0.0 else np.append(probs / probs.sum(), 0.0)


def excess_mass(found: Sequence[Position]) -> float:
    """The largest total probability that a list of top tokens claims; above 1 it is no distribution."""
    return max((math.fsum(map(math.exp, position.top.values())) for position in found), default=0.0)
