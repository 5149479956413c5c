"""Figures of runs that were made by hand, and how they are shown."""

import pytest

from foredraft.measure.load_bench import LoadBenchResult, result_document
from foredraft.measure.load_options import LoadOptions
from foredraft.measure.load_prompts import LoadRequest
from foredraft.measure.load_record import PlannedStep, mean_draft_len
from foredraft.measure.load_run import Delivery, LoadRun, Timeline
from foredraft.measure.load_summary import Spread, summarise_level
from foredraft.measure.load_tables import load_grids, load_headline


def made_up_run(seconds_a_token: float, *, length: int = 0, num_draft_tokens: int = 0, last: int = 9) -> LoadRun:
    """Two clients; the first request has five tokens, the second two, a third is cut off by the end.

    tokens at  t=1       2        3        4        5       (times ``seconds_a_token``)
    request 0    x | x        x        x        x           the window begins at 1
    request 1    x | x
    request 2                 x        x        x           arrived at 2
    """
    unit = seconds_a_token

    def line(index: int, arrived: float, times: range, is_finished: bool = True) -> Timeline:
        request = LoadRequest(index, "code" if index % 2 else "story", (1,), len(times), 0)
        tokens = list(range(len(times)))
        if index == 0:
            tokens[-1] = last
        deliveries = [Delivery(unit * at, 1) for at in times]
        return Timeline(
            request, unit * arrived, deliveries, tokens, num_draft_tokens, num_draft_tokens // 2, is_finished
        )

    lines = [line(0, 0.0, range(1, 6)), line(1, 0.5, range(1, 3)), line(2, 2.0, range(3, 6), False)]
    steps = [PlannedStep(("story", "code"), (length, 2 * length))] * 4
    return LoadRun(lines, 2, begin_s=unit, end_s=5 * unit, steps=steps, num_steps=4)


def level_of(*rounds):
    return {each.arm: each for each in summarise_level(2, rounds)}


def test_rates_and_latencies_by_hand():
    plain = level_of({"plain": made_up_run(0.1)})["plain"]
    assert plain.tokens_per_s == pytest.approx(8 / 0.4)  # 4 + 1 + 3 tokens behind the beginning
    assert plain.ttft.p50 == pytest.approx(0.1)  # only request 2 arrived in the window
    assert plain.tpot.p50 == pytest.approx(0.1)
    assert plain.itl.p99 == pytest.approx(0.1)
    assert plain.step_s == pytest.approx(0.1)
    assert plain.tokens_per_pass == 1.0
    assert plain.acceptance_rate is None
    assert (plain.num_identical, plain.num_compared) == (2, 2)


def test_ratios_are_taken_within_a_round_so_a_slow_one_changes_none():
    """The machine is five times slower in the second round; auto stays 1.25 times as fast as plain in all of them."""
    rounds = [
        {"plain": made_up_run(0.1 * slow), "k=1": made_up_run(0.2 * slow), "auto": made_up_run(0.08 * slow)}
        for slow in (1.0, 5.0, 1.0)
    ]
    found = level_of(*rounds)
    assert [arm for arm, each in found.items() if each.is_best] == ["plain"]
    assert found["auto"].against_plain == pytest.approx(1.25)
    assert found["auto"].against_best == pytest.approx(1.25)
    assert found["k=1"].against_plain == pytest.approx(0.5)
    assert {arm: each.outcome for arm, each in found.items()} == {"plain": "even", "k=1": "loses", "auto": "wins"}


def test_the_best_arm_is_chosen_by_its_median_not_by_a_lucky_round():
    rounds = [
        {"plain": made_up_run(0.10), "k=1": made_up_run(speed), "auto": made_up_run(0.10)} for speed in (0.05, 0.2, 0.2)
    ]
    found = level_of(*rounds)
    assert found["plain"].is_best
    assert found["auto"].against_best == pytest.approx(1.0)


def test_draft_lengths_acceptance_and_differences():
    found = level_of(
        {"plain": made_up_run(0.1), "k=2": made_up_run(0.1, length=2, num_draft_tokens=10, last=8)},
    )["k=2"]
    assert found.mean_draft_len == pytest.approx(3.0)
    assert found.mean_draft_len_by_route == {"story": 2.0, "code": 4.0}
    assert found.acceptance_rate == pytest.approx(0.5)
    assert (found.num_identical, found.num_compared) == (1, 2)
    assert mean_draft_len([]) is None


def test_spreads_of_nothing_are_nothing():
    assert Spread.of([]) == Spread(None, None, None)


def test_a_losing_arm_is_called_a_loser_in_the_table():
    options = LoadOptions(model="m", concurrency=(1, 2), draft_lens=(1,))
    runs = {"plain": made_up_run(0.1), "k=1": made_up_run(0.2, length=1), "auto": made_up_run(0.1)}
    results = [each for level in options.levels for each in summarise_level(level, [runs])]
    result = LoadBenchResult(options, results, {1: 1, 2: 1}, "token-identical", "float32", "cpu", 1, False, 3.0)
    throughput, plain, auto, detail, latency = load_grids(result)
    assert throughput.columns == ["", "1", "2"]
    assert throughput.sections[0].rows == [["plain", "20", "20"], ["k=1", "10", "10"], ["auto", "20", "20"]]
    assert plain.sections[0].rows == [["k=1", "0.50 x loses", "0.50 x loses"], ["auto", "1.00 x", "1.00 x"]]
    assert auto.sections[0].rows[0][:4] == ["1", "plain", "1.00 x", "1.00 x"]
    assert [section.heading for section in detail.sections] == ["1", "2"]
    assert latency.sections[0].rows[1] == ["k=1", "200/200/200", "200/200/200", "200/200/200"]
    for grid in (throughput, plain, auto, detail, latency):
        assert all(len(row) == len(grid.columns) for section in grid.sections for row in section.rows)
    assert "3 rounds would have taken more than 540 s" in throughput.caption
    assert "ngram; closed arrivals of code, summary, story" in load_headline(result, "a cpu")
    document = result_document(results[1])
    assert (document["arm"], document["level"], document["outcome"]) == ("k=1", 1, "loses")
    assert document["tpot_s"]["p50"] == pytest.approx(0.2)
