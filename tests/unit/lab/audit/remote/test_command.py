"""``foredraft audit --url`` as a user meets it: tables, the document, the page, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from foredraft.cli import app
from foredraft.lab.audit.remote.client import Endpoint
from foredraft.lab.audit.remote.run import second_endpoint

from .table_server import Behaviour, serve

ENVIRONMENT = {"COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb"}
QUICK = ("--tokens", "600", "--max-tokens", "48", "--max-retries", "0")


def run(
    url: str, *arguments: str, status: int, model: str = "table", **environment: str
) -> tuple[Result, dict[str, Any]]:
    command = ["audit", "--url", url, "--model", model, *QUICK, *arguments]
    result = CliRunner(env={**ENVIRONMENT, **environment}).invoke(app, command)
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    lines = result.stdout.splitlines()
    return result, json.loads(lines[-1]) if lines else {}


def test_a_right_server_is_acquitted_with_status_0(tmp_path: Path) -> None:
    page = tmp_path / "audit.html"
    with serve(Behaviour(key="k1")) as (url, _):
        result, document = run(url, "--report", str(page), "--api-key-env", "MY_KEY", status=0, MY_KEY="k1")
    assert "No fault found" in result.stdout
    assert "the most likely token" in result.stdout
    assert not document["convicted"]
    assert document["complete"]
    assert document["num_top_logprobs"] == 20
    assert document["greedy"]["num_checked"] > 300
    assert document["greedy"]["verdict"] == "own choice"
    assert document["sampling"][0]["num_tested"] >= 600
    assert page.read_text().count("<svg") == 2
    assert "k1" not in result.output + page.read_text()


def test_a_faulty_server_is_convicted_with_status_1() -> None:
    with serve(Behaviour(rule="soft_ratio")) as (url, _):
        result, document = run(url, "--temperature", "1", "--tokens", "20000", status=1)
    assert "FAULT" in result.stdout
    assert document["convicted"]
    assert document["sampling"][0]["num_tested"] < 20_000


def test_a_second_server_is_compared_and_a_wrong_token_convicts() -> None:
    with serve(Behaviour()) as (url, _), serve(Behaviour(greedy_slip=7)) as (other, _):
        _, document = run(url, "--temperature", "0", "--against", other, status=1)
    assert document["greedy"]["divergences"][0]["verdict"] == "fault"
    assert document["greedy"]["noise"] == 0.0
    assert document["against"]["url"] == other


def test_a_server_that_dies_leaves_a_partial_verdict_and_status_2() -> None:
    with serve(Behaviour(dies_after=20)) as (url, _):
        result, document = run(url, status=2)
    assert not document["complete"]
    assert 0 < document["sampling"][0]["num_tested"] < 600
    assert "Ended early" in result.stdout
    assert "did not answer" in result.stderr
    with serve(Behaviour(rule="soft_ratio", dies_after=45)) as (url, _):
        _, document = run(url, "--tokens", "20000", status=1)
    assert document["convicted"]


def test_a_server_without_log_probabilities_cannot_be_tested_and_says_why() -> None:
    with serve(Behaviour(num_top=0)) as (url, _):
        result, document = run(url, status=2)
    assert "gives no log-probabilities" in result.stderr
    assert "No verdict" in document["verdict"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "localhost:8000"], "no web address; write http://host:port/v1"),
        (["--url", "http://localhost:1/v1", "--method", "ngram"], "--method has no effect with --url"),
        (["--url", "http://localhost:1/v1", "--body", "{"], "is not JSON"),
        (["--url", "http://localhost:1/v1", "--body", "[1]"], "is not a JSON object"),
        (["--url", "http://localhost:1/v1", "--temperature", "-1"], "must be numbers from 0 on"),
        (["--url", "http://localhost:1/v1", "--max-retries", "-1"], "max_retries=-1 must be 0 or more"),
        (["--url", "http://localhost:1/v1", "--top-logprobs", "2"], "with which no token can be judged"),
        (["--url", "http://localhost:1/v1", "--prompts-file", "/no/such"], "cannot be read"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_asked(arguments: list[str], words: str) -> None:
    result = CliRunner(env=ENVIRONMENT).invoke(app, ["audit", "--model", "m", *arguments])
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


def test_an_option_of_servers_needs_a_server() -> None:
    result = CliRunner(env=ENVIRONMENT).invoke(app, ["audit", "--concurrency", "3"])
    assert result.exit_code == 2
    assert "--concurrency has no effect without --url" in result.stderr
    result = CliRunner(env=ENVIRONMENT).invoke(app, ["audit", "--url", "http://localhost:1/v1"])
    assert "--url needs --model" in result.stderr


def test_the_key_goes_to_no_other_address() -> None:
    first = Endpoint(url="http://a/v1", model="m", api_key="k", body={"x": 1})
    assert second_endpoint(first, None, None, None) is None
    here, there = second_endpoint(first, None, None, {}), second_endpoint(first, "http://b/v1", None, None)
    assert here is not None
    assert there is not None
    assert (here.api_key, here.url, here.body) == ("k", "http://a/v1", {})
    assert (there.api_key, there.model, there.body) == ("", "m", {"x": 1})


def test_prompts_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"turns": ["two", "three"]}\n')
    with serve(Behaviour()) as (url, server):
        run(url, "--temperature", "0", "--prompts-file", str(tmp_path / "prompts.jsonl"), status=0)
    assert {body["prompt"] for body in server.bodies[2:]} >= {"one", "two"}
    (tmp_path / "wrong.jsonl").write_text('{"prompt": "one"}\n{"text": "two"}\n')
    result = CliRunner(env=ENVIRONMENT).invoke(
        app, ["audit", "--url", url, "--model", "m", "--prompts-file", str(tmp_path / "wrong.jsonl")]
    )
    assert "line 2 has neither" in result.stderr
