"""The benchmark on a tiny model, its document, its time limit, and what an interruption leaves."""

import itertools
import json

import pytest

from foredraft.errors import InvalidOptionError
from foredraft.measure import bench
from foredraft.measure.batches import measure_batches
from foredraft.measure.document import document
from foredraft.measure.options import BenchOptions
from foredraft.measure.tables import grids, headline
from foredraft.measure.workloads import Workload

from .scripted import ScriptedArm

WORKLOADS = [Workload("code", ((10,),)), Workload("story", ((20,), (30,))), Workload("long", ((40,),))]


@pytest.fixture(scope="module")
def result(model_folder):
    options = BenchOptions(
        model=str(model_folder), peer="transformers", prompts=("story", "code"), max_tokens=24, repeats=2,
        batch_sizes=(1, 3), numerics="fast",
    )  # fmt: skip
    return bench.run_bench(options)


@pytest.fixture(scope="module")
def found(result):
    return json.loads(json.dumps(document(result, "foredraft bench tiny")))


def test_every_arm_has_its_figures(found):
    cells = itertools.product(("foredraft", "transformers"), ("none", "ngram"), ("story", "code"), (0.0, 1.0))
    expected = {*cells, *itertools.product(("foredraft", "transformers"), ("draft_model",), ("story", "code"), (0.0,))}
    arms = found["arms"]
    assert {(a["engine"], a["method"], a["prompt"], a["temperature"]) for a in arms} == expected
    assert len(arms) == len(expected)
    for arm in arms:
        assert arm["num_tokens"] == 24
        assert arm["repeats"] == (1 if arm["method"] == "draft_model" else 2)
        assert arm["tokens_per_s"] > 0
        assert arm["decode_tokens_per_s"] > 0
        assert set(arm["time_s"]) == {"draft", "target", "verify", "host"}
        if arm["repeats"] == 1:
            assert sum(arm["time_s"].values()) == pytest.approx(24 / arm["tokens_per_s"], abs=1e-3)
        assert (arm["acceptance_rate"] is None) == (arm["method"] == "none")


def test_plain_makes_one_token_a_pass_on_both_sides(found):
    plain = [arm for arm in found["arms"] if arm["method"] == "none"]
    assert {arm["tokens_per_target_pass"] for arm in plain} == {1.0}
    assert {arm["num_target_passes"] for arm in plain} == {24}


def test_drafts_were_accepted_and_rejected_and_change_no_token_of_ours(found):
    """The tiny model is float32, where identity holds without any self-check."""
    drafting = [arm for arm in found["arms"] if arm["method"] == "ngram"]
    assert any(0 < arm["acceptance_rate"] < 1 for arm in drafting if arm["engine"] == "foredraft")
    assert any(0 < arm["acceptance_rate"] < 1 for arm in drafting if arm["engine"] == "transformers")
    ours = [arm for arm in found["arms"] if arm["engine"] == "foredraft"]
    assert {arm["first_difference"] for arm in ours} == {None}
    assert all(arm["num_identical"] == arm["num_runs"] for arm in ours)


def test_a_model_that_drafts_for_itself_has_every_token_accepted(found):
    itself = [arm for arm in found["arms"] if arm["method"] == "draft_model"]
    assert {arm["acceptance_rate"] for arm in itself} == {1.0}
    assert all(arm["time_s"]["draft"] > 0 for arm in itself)
    assert found["drafts_with_itself"]


def test_the_rest_of_the_document(found, model_folder):
    assert found["model"] == str(model_folder)
    assert found["dtype"] == "float32"
    assert found["numerics"] == "near-tie"  # numerics="fast" promises no more
    assert found["versions"]["torch"]
    assert found["hardware"]["cores"] >= 1
    assert found["threads"] >= 1
    assert not found["interrupted"]
    assert found["ceiling_tokens_per_s"] > 0
    assert {"foredraft none", "foredraft ngram", "foredraft draft_model"} <= {r["arm"] for r in found["ratios"]}


def test_batches_get_the_tokens_they_get_alone(found):
    assert [(b["method"], b["temperature"], b["batch_size"]) for b in found["batches"]] == [
        ("none", 0.0, 3), ("ngram", 0.0, 3), ("none", 1.0, 3), ("ngram", 1.0, 3),
    ]  # fmt: skip
    assert {batch["num_identical"] for batch in found["batches"]} == {3}


def test_tables_name_every_arm_and_say_what_drafting_with_oneself_means(result):
    speed, times, ratios, passes, batches = grids(result)
    assert [row[0] for row in passes.sections[0].rows][-1] == "16 draft tokens in a tree"
    names = {row[0] for section in speed.sections for row in section.rows}
    assert names == {
        "foredraft plain", "foredraft n-gram", "foredraft draft model",
        "transformers plain", "transformers prompt lookup", "transformers assisted",
    }  # fmt: skip
    assert "nothing is won" in speed.caption
    for grid in (speed, times, ratios, batches):
        assert all(len(row) == len(grid.columns) for section in grid.sections for row in section.rows)
    assert "plain decoding of one sequence stays below" in headline(result, "a cpu")


def test_a_prompt_that_leaves_no_room_is_refused_before_anything_runs(model_folder):
    options = BenchOptions(model=str(model_folder), prompts=("long",), num_prompt_tokens=1000, numerics="fast")
    with pytest.raises(InvalidOptionError, match="with max_tokens=192 that is beyond the 1024 positions"):
        bench.run_bench(options)


# ---- scripted arms: no model ------------------------------------------------------------------------------


def options_for(**changes) -> BenchOptions:
    return BenchOptions(model="m", max_tokens=8, temperatures=(0.0, 1.0), **changes)


def scripted_arms(**changes) -> list[ScriptedArm]:
    kinds = itertools.product(("foredraft", "transformers"), ("none", "ngram", "draft_model"))
    return [ScriptedArm(engine, method, **changes) for engine, method in kinds]


def test_the_long_prompt_and_drafting_with_oneself_run_greedily_only():
    cells = bench.plan(options_for(), scripted_arms(), WORKLOADS)
    described = [(cell.workload.name, cell.temperature, len(cell.arms)) for cell in cells]
    assert described == [("code", 0.0, 6), ("story", 0.0, 6), ("long", 0.0, 4), ("code", 1.0, 4), ("story", 1.0, 4)]
    with_a_model = bench.plan(options_for(draft_model="small"), scripted_arms(), WORKLOADS)
    assert {len(cell.arms) for cell in with_a_model} == {6}


def run_scripted(monkeypatch, arms, seconds=lambda: 0.0, **changes):
    """Run the loop over scripted arms with a clock of our own; returns the cells and whether it finished."""
    monkeypatch.setattr(bench.time, "perf_counter", seconds)
    options = options_for(**changes)
    cells = bench.plan(options, arms, WORKLOADS)
    try:
        bench._run_cells(options, cells, 0.0, lambda label, fraction: None)
    except KeyboardInterrupt:
        return cells, False
    return cells, True


def test_a_warm_up_is_not_counted_and_each_repeat_has_its_seed(monkeypatch):
    arms = scripted_arms()
    cells, finished = run_scripted(monkeypatch, arms, repeats=3, seed=5)
    assert finished
    greedy = [asked for asked in arms[0].asked if asked["temperature"] == 0.0]
    sampled = [asked for asked in arms[0].asked if asked["temperature"] == 1.0]
    assert len(greedy) == 3 + 3 * 4  # a warm-up of each cell, then the four prompts in each round
    assert [asked["seed"] for asked in sampled] == [5, 5, 5, 5, 5, 6, 6, 6, 7, 7, 7]
    assert all(result.repeats == 3 for result in cells[0].results() if result.method != "draft_model")
    assert cells[1].results()[0].num_prompts == 2


def test_the_time_limit_cuts_repeats_but_never_the_first_round(monkeypatch):
    clock = itertools.count(0.0, 10.0)
    cells, finished = run_scripted(monkeypatch, scripted_arms(), seconds=lambda: next(clock), repeats=5, time_limit_s=1)
    assert finished
    assert {result.repeats for cell in cells for result in cell.results()} == {1}


@pytest.mark.parametrize("after", [0, 1, 6, 7, 11, 12, 30, 60])
def test_an_interruption_leaves_what_was_measured(monkeypatch, after):
    """Six warm-ups come first; a round that was cut short counts only if there is no other."""
    runs = itertools.count()

    def on_run():
        if next(runs) == after:
            raise KeyboardInterrupt

    cells, finished = run_scripted(monkeypatch, scripted_arms(on_run=on_run), repeats=2)
    assert not finished
    results = [result for cell in cells for result in cell.results()]
    assert bool(results) == (after > 6)
    assert all(result.num_tokens for result in results)
    assert len(cells[0].results()) == min(6, max(0, after - 6))


def test_of_several_prompts_those_that_were_done_count_in_the_first_round_only(monkeypatch):
    """The code cell takes 12 runs; of the story's two prompts, two arms finish one after six warm-ups."""
    runs = itertools.count()

    def on_run():
        if next(runs) == 20:
            raise KeyboardInterrupt

    cells, _ = run_scripted(monkeypatch, scripted_arms(on_run=on_run), repeats=2)
    assert [(result.method, result.num_prompts) for result in cells[1].results()] == [("none", 1), ("ngram", 1)]


def test_a_batch_counts_the_rows_that_get_their_tokens_every_time():
    class Batching(ScriptedArm):
        def run_together(self, prompts, *, temperature, seed, max_tokens):
            rows = [self.run(p, temperature=temperature, seed=seed, max_tokens=max_tokens).token_ids for p in prompts]
            if next(batches) == 1:
                rows[1] = [0, *rows[1][1:]]
            return rows, 4.0

    batches = itertools.count()
    found = []
    options = BenchOptions(model="m", max_tokens=8, temperatures=(0.0,), batch_sizes=(2, 3), repeats=3)
    measure_batches(options, [Batching("foredraft", "none")], [[10], [20], [30]], found.append, lambda *_: None)
    assert [(each.batch_size, each.num_identical, each.tokens_per_s) for each in found] == [(2, 1, 4.0), (3, 3, 6.0)]
    assert {each.alone_tokens_per_s for each in found} == {4.0}


def test_ctrl_c_ends_a_benchmark_with_its_result(monkeypatch, model_folder):
    runs = itertools.count()
    run = bench.ForedraftArm.run

    def interrupted(self, *args, **options):
        if next(runs) == 5:  # two warm-ups, two runs of the first round, one of the second
            raise KeyboardInterrupt
        return run(self, *args, **options)

    monkeypatch.setattr(bench.ForedraftArm, "run", interrupted)
    options = BenchOptions(
        model=str(model_folder), prompts=("story",), methods=("none", "ngram"), max_tokens=8, temperatures=(0.0,),
        numerics="fast",
    )  # fmt: skip
    result = bench.run_bench(options)
    assert result.interrupted
    assert [(arm.method, arm.repeats) for arm in result.arms] == [("none", 2), ("ngram", 1)]
    assert "Interrupted" in grids(result)[0].caption
