"""The command line as a whole: quick help with examples, errors in one line."""

import subprocess
import sys
import time
import warnings

import pytest
from typer.testing import CliRunner

from foredraft.cli import app, generate
from foredraft.errors import ModelLoadError

COMMANDS = ("generate", "chat", "bench", "train", "env")
ENVIRONMENT = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


def run(*arguments: str, status: int = 0, stdin: str | None = None):
    result = CliRunner(env=ENVIRONMENT).invoke(app, list(arguments), input=stdin)
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    return result


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_that_can_be_copied(command):
    assert f"Example: foredraft {command}" in run(command, "--help").output


def test_all_commands_are_there():
    output = run("--help").output
    assert all(f" {command} " in output for command in (*COMMANDS, "lab"))


def test_help_waits_for_no_torch():
    """Best of three, because a busy machine may be slow once."""
    program = (
        "import sys\nsys.argv = ['foredraft', '--help']\nfrom foredraft.cli import main\n"
        "try:\n    main()\nfinally:\n"
        "    print([name for name in ('torch', 'transformers', 'matplotlib') if name in sys.modules])"
    )
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        seconds.append(time.perf_counter() - started)
        assert done.stdout.endswith("[]\n")
    assert min(seconds) < 1.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "some-model", "hi", "--temperature", "-1"], "temperature=-1.0 is outside [0, inf]"),
        (["generate", "some-model", "hi", "--top-p", "0"], "top_p=0.0 is outside (0, 1]"),
        (["generate", "some-model", "hi", "-k", "-1"], "num_speculative_tokens=-1 is outside [0, 64]"),
        (["generate", "some-model", "hi", "--method", "n-gram"], "did you mean 'ngram'"),
        (["generate", "some-model", "hi", "--method", "none", "-k", "3"], "has no effect with method 'none'"),
        (["generate", "some-model", "hi", "--method", "draft_model"], "needs model="),
        (["generate", "some-model", "hi", "--method", "ngram", "--draft-model", "x"], "has no effect"),
        (["generate", "some-model", ""], "a prompt is empty"),
        (["generate", "some-model", "hi", "--file", "x.txt"], "give one of them"),
        (["generate", "some-model", "--file", "/nowhere.txt"], "cannot be read"),
        (["generate", "smollm2-135m-instuct", "hi"], "did you mean 'smollm2-135m-instruct'"),
        (["chat", "some-model", "--max-tokens", "0"], "max_tokens=0 is outside [1, inf]"),
        (["bench", "some-model", "--prompts", "stroy"], "did you mean 'story'"),
        (["bench", "some-model", "--temperatures", "0,warm"], "temperatures='0,warm' is not a list of numbers"),
        (["bench", "some-model", "--batch-sizes", "1,2.5"], "batch_sizes='1,2.5' is not a list of whole numbers"),
        (["bench", "some-model", "--report", "bench.pdf"], "end its name in .html"),
        (["bench", "some-model", "--max-tokens", "0"], "max_tokens=0 is below 2"),
    ],
)
def test_a_bad_value_is_one_line_on_stderr_and_status_2(arguments, words):
    result = run(*arguments, status=2)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("foredraft: error: ")
    assert words in result.stderr


def test_an_unknown_option_names_the_nearest():
    assert "--temperature" in run("generate", "some-model", "hi", "--temprature", "1", status=2).stderr


def test_nothing_on_stdin_is_an_empty_prompt():
    assert "a prompt is empty" in run("generate", "some-model", stdin="", status=2).stderr


def test_an_error_of_several_lines_becomes_one(monkeypatch):
    def fail(*args, **options):
        warnings.warn("something\nis odd", stacklevel=1)
        raise ModelLoadError("one\n  two")

    monkeypatch.setattr(generate.decoding, "load_llm", fail)
    stderr = run("generate", "some-model", "hi", status=2).stderr
    assert stderr.splitlines() == ["foredraft: note: something is odd", "foredraft: error: one two"]


def test_ctrl_c_ends_a_command_with_status_130(monkeypatch):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate.decoding, "load_llm", interrupt)
    assert "interrupted" in run("generate", "some-model", "hi", status=130).stderr
