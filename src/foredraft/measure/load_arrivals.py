"""When requests arrive: from clients that wait for their answers, or at random times at a rate. No torch."""

from __future__ import annotations

import random
from typing import Protocol


class Arrivals(Protocol):
    """Decides when the next requests are sent.

    Attributes:
        num_clients: clients that are busy in the steady state; None if there are no clients that wait.
    """

    num_clients: int | None

    def due(self, now_s: float, num_sent: int, num_in_flight: int) -> list[float]:
        """Arrival times of the requests to be sent now, in seconds since the beginning; none lies in the future."""
        ...

    def next_s(self, num_sent: int) -> float:
        """When the next request arrives if all that were sent have ended."""
        ...


class ClosedLoop:
    """``num_clients`` clients; each sends its next request when its last one has ended."""

    def __init__(self, num_clients: int):
        self.num_clients: int | None = num_clients
        self._clients = num_clients

    def due(self, now_s: float, num_sent: int, num_in_flight: int) -> list[float]:
        return [now_s] * (self._clients - num_in_flight)

    def next_s(self, num_sent: int) -> float:
        return 0.0


class PoissonArrivals:
    """Requests arrive independently of each other, ``rate`` a second on average.

    A request that arrives during a step counts from its arrival, not from the end of the step.

    Args:
        seed: the same seed gives the same times.
    """

    def __init__(self, rate: float, seed: int):
        self.num_clients: int | None = None
        self._rate, self._rng = rate, random.Random(f"arrivals {seed}")
        self._times: list[float] = []

    def due(self, now_s: float, num_sent: int, num_in_flight: int) -> list[float]:
        times: list[float] = []
        while (at := self.next_s(num_sent + len(times))) <= now_s:
            times.append(at)
        return times

    def next_s(self, num_sent: int) -> float:
        while len(self._times) <= num_sent:
            before = self._times[-1] if self._times else 0.0
            self._times.append(before + self._rng.expovariate(self._rate))
        return self._times[num_sent]
