"""``foredraft audit`` on a tiny model in a folder: exit status, tables, JSON line and page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foredraft.cli import app
from foredraft.testing import tiny_model

SHORT = ["--tokens", "120", "--max-tokens", "16", "--batch-size", "4", "--seed", "1", "--num-speculative-tokens", "3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model(0, context=0.01, vocab_size=320).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("alpha beta gamma delta alpha beta\n\none two three one two three\n")
    return file


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


def test_an_exact_engine_gets_exit_status_0_and_one_json_document(folder: Path, prompts: Path, tmp_path: Path) -> None:
    report = tmp_path / "audit.html"
    result = run(
        folder, *SHORT, "--temperature", "0,0.4", "--prompts-file", prompts, "--rule", "block", "--report", report
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["lossless"] is True
    assert found["greedy"]["verdict"] == "token-identical"
    assert found["greedy"]["num_texts"] == 2
    sampling = found["sampling"][0]
    assert sampling["rule"] == "block"
    assert sampling["num_tokens"] >= 120
    assert 0 < sampling["num_accepted_tokens"] < sampling["num_draft_tokens"]
    assert {"bias", "z_score", "visible_bias", "tokens_needed"} <= sampling["tests"][1].keys()
    assert "no bias found in" in result.stdout
    page = report.read_text()
    assert page.count("<svg") == 3
    assert "token proposed by a deterministic draft" in page


def test_a_lossy_rule_gets_exit_status_1(folder: Path, prompts: Path) -> None:
    """Typical acceptance keeps whatever is drafted of a flat law; certain after a few hundred tokens."""
    result = run(
        folder, *SHORT, "--tokens", "6000", "--prompts-file", prompts, "--temperature", "1", "--rule", "typical",
        "--allow-lossy",
    )  # fmt: skip
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["lossless"] is False
    assert found["greedy"] is None
    assert found["sampling"][0]["convicted"] is True
    assert found["sampling"][0]["num_tokens"] < 6000
    assert "NOT the target's law" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "hot"], "is not a list of numbers"),
        (["--rule", "typical"], "allow_lossy"),
        (["--false-alarm-rate", "0"], "outside (0, 1)"),
        (["--tokens", "0"], "below 1"),
        (["--prompts-file", "missing.txt"], "does not exist"),
        (["--report", "audit.pdf"], "HTML page"),
    ],
)
def test_usage_errors_get_exit_status_2_before_anything_is_loaded(arguments: list[str], message: str) -> None:
    result = run("no-such-model", *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_help_has_an_example() -> None:
    assert "Example: foredraft audit" in run("--help").output
