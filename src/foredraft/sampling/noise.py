"""Keyed randomness: noise is a function of (seed, stream, position) and, for a vocabulary, of the token id.

There is no generator to share, to advance or to restore. The bits are those of Philox4x64-10 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011), whose stream numpy guarantees across versions:

    key     = (seed, stream)                  who asks, and for what
    counter = (block of 4 tokens, position, 0, 0)

so two different (seed, stream, position, token id) never read the same bits, and a larger vocabulary only
appends to the vector.
"""

from __future__ import annotations

import enum
import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_EXPONENT_OF_ONE = np.uint64(0x3FF0_0000_0000_0000)
_DROPPED_BITS = np.uint64(12)
_GRID = 2.0**-52
_ROUND_BITS = 16
_RECENT = 32  # vectors of noise that are kept: a drafter reads those that verification reads, and the next draft again


class Stream(enum.IntEnum):
    """What a number is used for. Streams of one request are independent of each other.

    ``TARGET`` is the noise of the token at a position; the drafter of the coupled rule reads it too, on
    purpose. The ratio rules must never share: they draw drafts from ``DRAFT``, decide with ``ACCEPT`` and
    draw the recovered or bonus token from ``RECOVER``.
    """

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3


def round_position(start: int, offset: int) -> int:
    """Key of the ``offset``-th number of the round that begins at position ``start``; unique over all rounds.

    A rule that looks at numbers of positions which it then does not decide (``block`` does) must not meet them
    again in the next round: the output would be biased. Every round starts further on, so its numbers are fresh.
    """
    return (start << _ROUND_BITS) + offset


def uniform(seed: int, stream: Stream, position: int) -> float:
    """One number in the open interval (0, 1), a multiple of 2^-53.

    Args:
        seed: of the request, in [0, 2^64).
        stream: what the number is for.
        position: of the token that is decided, at least 0.
    """
    return ((_philox(seed, stream, position).random_raw() >> 12) + 0.5) * _GRID


@functools.lru_cache(maxsize=_RECENT)
def gumbel(seed: int, stream: Stream, position: int, vocab_size: int) -> Tensor:
    """Standard Gumbel noise -log(-log u) for every token id, ``[V]`` float64 on the CPU; not to be written to.

    Entry i does not depend on ``vocab_size``. Values lie in [-3.61, 36.74].
    """
    noise = unit_interval(np.asarray(_philox(seed, stream, position).random_raw(vocab_size)))
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return torch.from_numpy(noise)


def unit_interval(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Map 64 random bits to the midpoints of 2^52 equal cells of (0, 1); 0 and 1 cannot occur.

    The 52 high bits become the mantissa of a number in [1, 2); taking off 1 - 2^-53 is then exact.
    """
    mantissa = bits >> _DROPPED_BITS
    mantissa |= _EXPONENT_OF_ONE
    unit = mantissa.view(np.float64)
    unit -= 1.0 - _GRID / 2
    return unit


def _philox(seed: int, stream: Stream, position: int) -> np.random.Philox:
    key = np.array([seed, stream], dtype=np.uint64)
    counter = np.array([0, position, 0, 0], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter)
