"""Estimates that follow noisy measurements, and that a few wild ones do not move."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

CLIP = 3.0
"""A measurement counts as if it were at most so many standard deviations away from what was expected."""


class RobustFilter:
    """A Kalman filter for constants that drift slowly (Kalman 1960), with clipped surprise (Huber 1964).

    A measurement beyond the clip is an outlier, or the estimates are wrong. The first one is left out. If the next of
    the same size is beyond it on the same side, the estimates are held to be wrong: they move as far as the clip allows
    and become less certain, so that they follow within some steps.

    Args:
        mean: first estimates ``[N]``.
        covariance: how uncertain they are, ``[N, N]``.
        drift: standard deviation of each estimate's own change from step to step, ``[N]``.
    """

    def __init__(self, mean: ArrayLike, covariance: ArrayLike, drift: ArrayLike):
        self.mean: Floats = np.array(mean, dtype=np.float64)
        self._covariance: Floats = np.array(covariance, dtype=np.float64)
        self._prior = self._covariance.copy()
        self._drift: Floats = np.diag(np.square(np.array(drift, dtype=np.float64)))
        self._outliers: dict[int, float] = {}

    def update(self, weights: Floats, surprise: float, noise: float, size: int) -> None:
        """Take in a measurement.

        Args:
            weights: what it changes with a change of each estimate.
            surprise: measured less expected.
            noise: standard deviation of a measurement.
            size: the same for measurements that are wrong together if the estimates are wrong.
        """
        self._covariance += self._drift
        spread = self._covariance @ weights
        variance = float(weights @ spread) + noise * noise
        limit = CLIP * variance**0.5
        before, outlier = self._outliers.get(size, 0.0), surprise if abs(surprise) > limit else 0.0
        self._outliers[size] = outlier
        if outlier and before * outlier <= 0.0:
            return
        self.mean += spread * (min(limit, max(-limit, surprise)) / variance)
        self._covariance -= np.outer(spread, spread) / variance
        if outlier:
            share = np.abs(weights)
            self._covariance += self._prior * np.outer(share, share)


class LinearCost:
    """Seconds that grow linearly with some counts.

    Args:
        seconds: first estimate for each count; how far it may be off is about as much again.
        least: that it may be off at least.
    """

    def __init__(self, seconds: ArrayLike, least: ArrayLike):
        mean: Floats = np.array(seconds, dtype=np.float64)
        deviation = mean + np.array(least, dtype=np.float64)
        self._filter = RobustFilter(mean, np.diag(deviation**2), 0.02 * deviation)

    @property
    def seconds(self) -> list[float]:
        """The current estimate for each count."""
        seconds: list[float] = self._filter.mean.tolist()
        return seconds

    def observe(self, counts: ArrayLike, seconds: float) -> None:
        weights: Floats = np.array(counts, dtype=np.float64)
        expected = float(weights @ self._filter.mean)
        self._filter.update(weights, seconds - expected, 0.2 * expected + 2e-5, int(weights[-1]).bit_length())
        np.maximum(self._filter.mean, 0.0, out=self._filter.mean)
