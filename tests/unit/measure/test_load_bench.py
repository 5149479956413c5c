"""The benchmark under load on a tiny model, from the command line to its document, picture and page."""

import itertools
import json

import pytest
from typer.testing import CliRunner

from foredraft.cli import app
from foredraft.measure import load_bench
from foredraft.measure.load_options import LoadOptions
from foredraft.measure.load_run import LoadArm
from foredraft.measure.load_tables import load_grids


def run(*arguments: str, status: int = 0):
    environment = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    result = CliRunner(env=environment).invoke(app, ["bench", *arguments])
    assert result.exit_code == status, result.output
    return result


@pytest.fixture(scope="module")
def shown(model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown")
    arguments = ["--concurrency", "1,3", "--draft-lens", "2", "--max-tokens", "24", "--repeats", "2",
                 "--numerics", "fast", "--routes", "code,story"]  # fmt: skip
    pictures = ["--plot", str(folder / "load.svg"), "--report", str(folder / "load.html")]
    return run(str(model_folder), *arguments, *pictures), folder


def test_the_document_has_every_arm_at_every_level(shown):
    document = json.loads(shown[0].stdout.splitlines()[-1])
    assert document["rounds"] == [2, 2]
    assert document["numerics"] == "near-tie"  # numerics="fast" promises no more
    arms = document["arms"]
    assert [(each["level"], each["arm"]) for each in arms] == list(itertools.product((1, 3), ("plain", "k=2", "auto")))
    for each in arms:
        assert each["tokens_per_s"] > 0
        assert each["num_compared"] == 2 * max(2, each["level"])
        assert each["num_identical"] == each["num_compared"]  # float32: drafting changes no token
        assert set(each["mean_draft_len_by_route"]) == {"code", "story"}
        assert None not in each["tpot_s"].values()
    assert [each["mean_draft_len"] for each in arms if each["arm"] == "plain"] == [0.0, 0.0]
    assert all(0.0 < each["mean_draft_len"] <= 2.0 for each in arms if each["arm"] == "k=2")
    assert any(each["acceptance_rate"] for each in arms if each["arm"] == "k=2")


def test_tables_picture_and_page_are_there(shown):
    result, folder = shown
    text = " ".join(result.stdout.split())
    assert "Throughput, new tokens per second, by concurrency" in text
    assert "auto against the best of the others" in text
    assert "Against plain decoding" in (folder / "load.svg").read_text()
    page = (folder / "load.html").read_text()
    assert page.count("<svg") == 2
    assert "In detail" in page


def test_poisson_arrivals_run_by_rate(model_folder):
    arguments = ["--rate", "100", "--draft-lens", "1", "--requests", "3", "--max-tokens", "4", "--repeats", "1",
                 "--routes", "story", "--numerics", "fast"]  # fmt: skip
    document = json.loads(run(str(model_folder), *arguments).stdout.splitlines()[-1])
    assert document["arrivals"] == "poisson"
    assert {each["level"] for each in document["arms"]} == {100.0}
    assert {each["num_compared"] for each in document["arms"]} == {3}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--concurrency", "2", "--peer", "transformers"], "--peer has no effect with --concurrency"),
        (["--draft-lens", "3"], "--draft-lens has no effect without --concurrency"),
        (["--concurrency", "2", "--temperatures", "0,1"], "under load give one"),
        (["--concurrency", "2", "--rate", "1"], "has no effect with arrivals='poisson'"),
        (["--arrivals", "closed"], "needs concurrency"),
        (["--concurrency", "2", "--plot", "x.xyz"], "cannot plot to 'x.xyz'"),
    ],
)
def test_options_of_the_other_benchmark_are_refused(arguments, words):
    assert words in " ".join(run("some-model", *arguments, status=2).stderr.split())


@pytest.fixture(scope="module")
def quick(model_folder):
    return LoadOptions(
        model=str(model_folder), concurrency=(1, 2), draft_lens=(1,), max_tokens=4, repeats=3, routes=("story",),
        numerics="fast",
    )  # fmt: skip


def test_the_time_limit_cuts_rounds_but_never_the_first(quick, monkeypatch):
    ticks = itertools.count(0.0, 100.0)
    monkeypatch.setattr(load_bench.time, "perf_counter", lambda: next(ticks))
    result = load_bench.run_load_bench(quick)
    assert result.num_rounds == {1: 1, 2: 1}
    assert {each.num_rounds for each in result.results} == {1}


def test_arms_take_turns_in_going_first_and_ctrl_c_keeps_the_complete_rounds(quick, monkeypatch):
    order: list[str] = []
    complete = LoadArm.run

    def noted(self, *arguments):
        order.append(self.name)
        if len(order) == 11:  # in the second round at two clients
            raise KeyboardInterrupt
        return complete(self, *arguments)

    monkeypatch.setattr(LoadArm, "run", noted)
    result = load_bench.run_load_bench(quick)
    assert result.interrupted
    assert order[:9] == ["plain", "k=1", "auto"] * 2 + ["k=1", "auto", "plain"]
    assert result.num_rounds == {1: 2, 2: 1}
    assert "Interrupted" in load_grids(result)[0].caption
