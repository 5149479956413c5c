"""Metrics of an engine: the sum of its requests', lengths planned, and goodput with and without speculation."""

from __future__ import annotations

import time

import pytest

from foredraft.drafters.ngram import NGramDrafter
from foredraft.engine.metrics import EngineMetrics, add_metrics
from foredraft.policy import Forecast, GoodputPolicy, PassTable, RowOutcome, StepCost, StepOutcome
from foredraft.testing import engine_for, tiny_model
from foredraft.types import Request, RequestMetrics, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=30)


def step(planned: list[int], accepted: list[int], seconds: float) -> StepOutcome:
    rows = [RowOutcome(i, "a", k, k, range(n)) for i, (k, n) in enumerate(zip(planned, accepted, strict=True))]
    return StepOutcome(rows, len(rows), len(rows) + sum(planned), 0, 0, 0.1 * seconds, 0.7 * seconds, 0.1 * seconds,
                       0.1 * seconds)  # fmt: skip


def test_counts_are_the_sum_over_requests_by_route():
    """While they run and afterwards; a request that was aborted counts with what it got."""
    engine = engine_for(tiny_model(3, context=0.01), NGramDrafter(1, 4), num_speculative_tokens=4)
    routes = ["edit", "edit", "story"]
    sequences = [
        engine.add_request(Request(str(i), [7, 8, 9, 10, 7, 8, 9], GREEDY, route=route))
        for i, route in enumerate(routes)
    ]
    for _ in range(6):
        engine.step()
    during = engine.metrics
    assert during.total.num_emitted_tokens == sum(s.metrics.num_emitted_tokens for s in sequences) > 6
    engine.abort("2")
    while engine.has_unfinished_requests:
        engine.step()
    after = engine.metrics
    assert after.num_requests == 3
    assert set(after.routes) == {"edit", "story"}
    for name in ("num_emitted_tokens", "num_target_passes", "num_draft_tokens", "num_accepted_tokens", "target_s"):
        assert getattr(after.total, name) == pytest.approx(sum(getattr(s.metrics, name) for s in sequences))
    edits = after.routes["edit"]
    assert edits.tokens_per_target_pass == pytest.approx(60 / sum(s.metrics.num_target_passes for s in sequences[:2]))
    assert edits.acceptance_per_position == sequences[0].metrics.acceptance_per_position
    assert after.num_wasted_draft_tokens == after.total.num_draft_tokens - after.total.num_accepted_tokens > 0
    assert sum(after.planned_lengths.values()) == sum(s.metrics.num_target_passes for s in sequences)
    assert max(after.planned_lengths) == 4
    assert after.goodput.actual is None, "a fixed policy forecasts nothing"
    assert during.total.num_emitted_tokens < after.total.num_emitted_tokens, "a snapshot stays as it was"


def test_positions_are_added_place_by_place():
    total = RequestMetrics(accepted_per_position=[1], drafted_per_position=[2])
    add_metrics(total, RequestMetrics(accepted_per_position=[3, 1], drafted_per_position=[4, 4]))
    assert (total.accepted_per_position, total.drafted_per_position) == ([4, 1], [6, 4])


def test_goodput_with_and_without_speculation():
    """Two rows: 2 + 4 tokens in 20 ms where plain decoding is said to take 16; then plain, in 18 ms."""
    metrics = EngineMetrics()
    metrics.observe(step([4, 4], [1, 3], 0.020), Forecast(5.0, 0.019, 0.016))
    metrics.observe(step([0, 0], [0, 0], 0.018), Forecast(2.0, 0.016, 0.016))
    found = metrics.snapshot([])
    assert found.num_steps == 2
    assert found.planned_lengths == {0: 2, 4: 2}
    assert found.goodput.actual == pytest.approx(8 / 0.038)
    assert found.goodput.without_speculation == pytest.approx(4 / 0.032)
    assert found.goodput.forecast_error == pytest.approx(18 / 16 - 1)


def test_the_controllers_forecasts_reach_the_metrics():
    table = PassTable((1, 64), (0.001, 0.01), 0.0, 0.0)
    engine = engine_for(tiny_model(3, context=0.01), NGramDrafter(1, 4), policy=GoodputPolicy(StepCost(table)))
    engine.add_request(Request("a", [7, 8, 9, 10, 7, 8, 9], SamplingParams(temperature=0.0, max_tokens=80)))
    while engine.has_unfinished_requests:
        engine.step()
    goodput = engine.metrics.goodput
    assert goodput.actual is not None
    assert goodput.without_speculation is not None
    assert goodput.forecast_error is not None, "steps without drafts check the forecast"


def test_a_step_costs_next_to_nothing():
    """32 rows, in processor time: below 0.1 ms."""
    metrics, outcome = EngineMetrics(), step([4] * 32, [2] * 32, 0.03)
    times = []
    for _ in range(50):
        began = time.process_time()
        metrics.observe(outcome, Forecast(60.0, 0.03, 0.02))
        times.append(time.process_time() - began)
    assert sorted(times)[25] < 1e-4
