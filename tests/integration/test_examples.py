"""The examples run and show what they promise."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["quickstart", "transformers_batch"])
def test_example_shows_identical_tokens(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    main("smollm2-135m-instruct", 12)
    shown = capsys.readouterr().out
    assert "True" in shown
    assert "False" not in shown
