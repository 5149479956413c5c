"""The commands with the real model, as they lie in the ordinary cache folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from foredraft.cli import app

MODEL = "smollm2-135m-instruct"
REPEAT = "Repeat this three times: the quick brown fox jumps over the lazy dog."


def run(*arguments: str, status: int = 0, stdin: str | None = None):
    environment = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    result = CliRunner(env=environment).invoke(app, list(arguments), input=stdin)
    assert result.exit_code == status, result.output
    return result


def test_generate_writes_the_text_to_stdout_and_the_counts_to_stderr():
    result = run("generate", MODEL, "The capital of France is", "--max-tokens", "8")
    assert result.stdout.startswith(" Paris")
    assert result.stderr.startswith("8 tokens in ")
    assert result.stderr.rstrip().endswith(("token-identical", "near-tie"))


def test_show_drafts_marks_what_was_accepted_and_changes_no_text():
    arguments = ["generate", MODEL, "--chat", REPEAT, "--max-tokens", "48"]
    plain = run(*arguments, "--method", "none").stdout
    marked = run(*arguments, "--show-drafts")
    assert "[" in marked.stdout
    assert marked.stdout.replace("[", "").replace("]", "") == plain
    assert "accepted draft tokens stand in [ ]" in marked.stderr
    assert "draft tokens accepted" in marked.stderr


def test_a_prediction_and_kept_responses_change_no_text(tmp_path):
    """The answer itself as the prediction: few passes. Kept in a file, it is found again by the next run."""
    arguments = ["generate", MODEL, "The capital of France is", "--max-tokens", "24"]
    plain = run(*arguments, "--method", "none").stdout
    prediction, store = tmp_path / "expected.txt", tmp_path / "responses.npz"
    prediction.write_text(plain.rstrip("\n"))
    predicted = run(*arguments, "--prediction", str(prediction))
    assert predicted.stdout == plain
    assert tokens_per_pass(predicted) > 4
    options = {"method": "suffix", "suffix_decoding_max_cached_requests": 5, "suffix_decoding_store": str(store)}
    first, second = (run(*arguments, "--speculative-config", json.dumps(options)) for _ in range(2))
    assert first.stdout == second.stdout == plain
    assert tokens_per_pass(second) > 2 > tokens_per_pass(first)


def tokens_per_pass(result) -> float:
    return float(result.stderr.split(" tokens per target pass")[0].split()[-1])


def test_several_prompts_come_in_order_and_as_alone():
    prompts = ["1, 2, 3, 4,", "The capital of Italy is"]
    alone = [run("generate", MODEL, prompt, "--max-tokens", "6").stdout.rstrip("\n") for prompt in prompts]
    together = run("generate", MODEL, *prompts, "--max-tokens", "6").stdout
    assert [together.index(text) for text in alone] == sorted(together.index(text) for text in alone)
    assert together.count("---") >= 2


def test_a_stop_string_ends_the_text_and_a_prompt_may_come_from_stdin(tmp_path):
    result = run("generate", MODEL, "--stop", ", 7", "--max-tokens", "30", stdin="1, 2, 3, 4,")
    assert result.stdout == " 5, 6\n"
    (tmp_path / "prompt.txt").write_text("1, 2, 3, 4,")
    assert run("generate", MODEL, "--file", str(tmp_path / "prompt.txt"), "--max-tokens", "30", "--stop", ", 7") \
        .stdout == " 5, 6\n"  # fmt: skip


def test_a_seed_makes_a_sample_that_drafting_does_not_change():
    arguments = ["generate", MODEL, "--chat", REPEAT, "--temperature", "1", "--seed", "7", "--max-tokens", "40"]
    drafted = run(*arguments)
    assert "0 of" not in drafted.stderr
    assert drafted.stdout == run(*arguments, "--method", "none").stdout


def test_chat_remembers_until_it_is_reset():
    def answers(*lines: str) -> list[str]:
        result = run("chat", MODEL, "--max-tokens", "16", stdin="\n".join(lines))
        assert result.stderr.count("tokens in") == len(result.stdout.splitlines())
        assert ("/reset forgets" in result.stderr) == ("/help" in lines)
        return result.stdout.splitlines()

    hello, again = "Say hello.", "Say that once more."
    first, after_hello, alone = answers(hello, again, "/help", "/reset", again, "/quit", "never read")
    assert [alone] == answers(again)
    assert [first, after_hello] == answers(hello, again)
    assert after_hello != alone


def test_a_prompt_beyond_the_model_s_limit_is_refused():
    assert "the model's limit is 8192" in run("generate", MODEL, "word " * 9000, status=2).stderr


def test_bench_prints_tables_and_its_document_last(tmp_path):
    page = tmp_path / "bench.html"
    result = run(
        "bench", MODEL, "--peer", "transformers", "--prompts", "code", "--methods", "none,ngram", "--max-tokens", "12",
        "--temperatures", "0", "--repeats", "1", "--batch-sizes", "3", "--report", str(page),
    )  # fmt: skip
    document = json.loads(result.stdout.splitlines()[-1])
    assert "foredraft n-gram" in result.stdout
    assert "transformers prompt lookup" in result.stdout
    ours = [arm for arm in document["arms"] if arm["engine"] == "foredraft"]
    assert len(document["arms"]) == 4
    assert {arm["num_tokens"] for arm in document["arms"]} == {12}
    if document["numerics"] == "token-identical":
        assert {arm["first_difference"] for arm in ours} == {None}
        assert {batch["num_identical"] for batch in document["batches"]} == {3}
    assert document["dtype"] == "bfloat16"
    assert page.stat().st_size > 10_000


@pytest.mark.slow  # the principle is that of the unit test of the benchmark
@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_ctrl_c_prints_what_the_benchmark_has():
    program = "from foredraft.cli import main; main()"
    arguments = ["bench", MODEL, "--prompts", "story", "--methods", "none", "--temperatures", "0", "--repeats", "1000"]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments, "--max-tokens", "8", "--time-limit", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background shell ignores it
    )  # fmt: skip
    assert process.stderr is not None
    while "3 of 1000" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    document = json.loads(stdout.splitlines()[-1])
    assert document["interrupted"]
    assert document["arms"][0]["repeats"] >= 2
    assert process.returncode == 130
    assert "interrupted" in stderr


def test_env_tells_what_is_here():
    document = json.loads(run("env", "--json").stdout)
    assert MODEL in {model["name"] for model in document["models"]}
    assert document["versions"]["torch"]
    assert document["kernels"]["built"] or document["kernels"]["reason"]
    assert "cache folder" in run("env").stdout
