"""`foredraft lab` at the command line: documents, tables, pictures, and refusals that help."""

import json

import pytest
from typer.testing import CliRunner

from foredraft.cli.lab import app

COMMANDS = {
    "distribution": ["--size", "1000"],
    "uniformity": ["--num-seeds", "3", "--samples", "1000"],
    "acceptance": ["-k", "2", "--rounds", "500"],
    "speedup": [],
    "roofline": [],
    "rules": ["--instances", "4", "-k", "2", "--keyed-sequences", "3"],
}


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).invoke(app, list(arguments))
    assert result.exit_code == status, result.output
    return result.output


def run_json(*arguments: str) -> dict:
    return json.loads(run(*arguments, "--json").splitlines()[-1])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_that_can_be_copied(command):
    assert f"foredraft lab {command}" in run(command, "--help")


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_one_document_and_the_picture_is_drawn(command, tmp_path):
    picture = tmp_path / "picture.png"
    document = run_json(command, *COMMANDS[command], "--plot", str(picture))
    assert document
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize("command", COMMANDS)
def test_people_get_tables(command):
    output = run(command, *COMMANDS[command])
    assert "┃" in output
    assert "{" not in output


def test_distribution_prints_the_seed_s_figures_and_the_exact_ones():
    output = run("distribution", "--size", "1000")
    assert "0.1631" in output
    assert "0.0564" in output
    assert "0.105808612169" in output
    document = run_json("distribution", "--size", "1000")
    assert [round(row["total_variation"], 4) for row in document["rows"]] == [0.1631, 0.163, 0.2099]


def test_distribution_samples_every_rule(tmp_path):
    picture = tmp_path / "rules.svg"
    document = run_json("distribution", "--samples", "20000", "-k", "2", "--plot", str(picture))
    assert len(document["rows"]) == 7
    assert document["rows"][4] | {"sampler": "coupled", "num_unlike_plain": 0} == document["rows"][4]
    assert "<svg" in picture.read_text()


def test_speedup_with_own_values():
    (row,) = run_json("speedup", "--alpha", "0.8", "-c", "0.05", "-k", "3", "-k", "0")["rows"]
    assert row["best_num_draft_tokens"] == 8
    assert set(row["speedups"]) == {"3", "0"}
    assert run_json("speedup", "--alpha", "0.8", "-c", "0")["rows"][0]["continuous_best"] is None


def test_roofline_of_the_seed_and_of_all_devices():
    document = run_json("roofline", "--params", "7e9", "--bytes", "2", "--device", "h100-sxm")
    assert document["weight_read_s"] == pytest.approx(4.18e-3, rel=1e-3)
    assert document["contexts"][-1]["compute_bound_batch"] is None
    assert len(run_json("roofline", "--devices")["devices"]) > 20
    assert "rtx-4090" in run("roofline", "--devices")


def test_rules_report_what_was_enumerated():
    document = run_json("rules", "--instances", "8", "-k", "2", "--keyed-sequences", "5")
    assert document["keyed_sequences_unlike_plain"] == 0
    assert all(row["passed"] for row in document["rows"])
    assert {row["shown_by"] for row in document["rows"]} > {"engine", "engine + law of the pair", "reference"}


def test_rules_end_with_status_1_if_a_promise_is_broken(monkeypatch):
    from foredraft.lab import rules

    broken = tuple(
        rules.Rule(rule.name, rule.shape, "exact", rule.shown_by, rule.emissions) for rule in rules.RULES[-1:]
    )
    monkeypatch.setattr(rules, "RULES", broken)
    assert "NOT as promised" in run("rules", "--instances", "4", status=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["speedup", "--alpha", "1.0"], "1 is outside [0, 1)"),
        (["speedup", "--alpha", "-0.1"], "-0.1 is outside [0, 1)"),
        (["speedup", "--alpha", "nan"], "nan is outside [0, 1)"),
        (["speedup", "-k", "-1"], "-1 is below 0"),
        (["speedup", "-c", "-1"], "--draft-cost"),
        (["acceptance", "-k", "0"], "outside [1, 64]"),
        (["distribution", "-k", "-2"], "-2 is below 0"),
        (["distribution", "-k", "9"], "num_draft_tokens=9 is outside [1, 4]"),
        (["distribution", "--size", "10", "--samples", "10"], "give one of them"),
        (["uniformity", "--num-seeds", "1"], "--num-seeds"),
        (["roofline", "--device", "h100"], "did you mean 'h100-sxm'"),
        (["roofline", "--params", "-3"], "must be above 0"),
        (["roofline", "--model", "/nowhere"], "no config.json"),
        (["roofline", "--devices", "--plot", "x.png"], "leave out --devices"),
        (["speedup", "--plot", "x.foo"], "cannot plot to 'x.foo'"),
        (["speedup", "--plot", "/nowhere/x.png"], "does not exist"),
        (["rules", "--instances", "0"], "--instances"),
    ],
)
def test_bad_input_is_a_usage_error_that_says_what_is_wrong(arguments, words):
    output = " ".join(run(*arguments, status=2).replace("│", " ").split())
    assert words in output
    assert "Traceback" not in output
