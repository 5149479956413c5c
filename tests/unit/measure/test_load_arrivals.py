"""When requests are sent: clients that wait, and arrivals at a rate."""

import math

import pytest

from foredraft.measure.load_arrivals import ClosedLoop, PoissonArrivals


def test_a_client_sends_when_its_last_request_has_ended():
    closed = ClosedLoop(3)
    assert closed.due(0.0, num_sent=0, num_in_flight=0) == [0.0, 0.0, 0.0]
    assert closed.due(1.5, num_sent=3, num_in_flight=3) == []
    assert closed.due(2.0, num_sent=3, num_in_flight=1) == [2.0, 2.0]


def test_poisson_requests_are_sent_in_order_once_with_the_time_of_their_arrival():
    poisson = PoissonArrivals(2.0, seed=1)
    first = poisson.next_s(0)
    assert poisson.due(first / 2, num_sent=0, num_in_flight=0) == []
    times = poisson.due(10.0, num_sent=0, num_in_flight=0)
    assert times[0] == first
    assert times == sorted(times)
    assert all(0 < at <= 10.0 for at in times)
    assert poisson.due(10.0, len(times), len(times)) == []
    assert poisson.next_s(len(times)) > 10.0


def test_gaps_are_exponential_with_the_rate_and_repeat_with_the_seed():
    """4,000 gaps of mean 1/4: the mean errs by more than 5 sigma = 8 % once in a million; the seed is fixed anyway."""
    poisson = PoissonArrivals(4.0, seed=0)
    times = [poisson.next_s(index) for index in range(4000)]
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.25, rel=0.08)
    longer = sum(gap > 0.25 for gap in gaps) / len(gaps)
    assert longer == pytest.approx(math.exp(-1.0), abs=0.04)
    assert PoissonArrivals(4.0, seed=0).next_s(3999) == times[-1]
    assert PoissonArrivals(4.0, seed=1).next_s(3999) != times[-1]
