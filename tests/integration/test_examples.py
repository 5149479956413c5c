"""The examples run and show what they promise."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path

import pytest

from foredraft.methods import METHODS

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["quickstart", pytest.param("transformers_batch", marks=pytest.mark.slow)])
def test_example_shows_identical_tokens(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    main("smollm2-135m-instruct", 12)
    shown = capsys.readouterr().out
    assert "True" in shown
    assert "False" not in shown


def test_a_drafter_of_ones_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The example of docs/add_a_drafter.md: it passes the suite and decodes through a line in METHODS."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    importlib.import_module("successor_drafter").main("smollm2-135m-instruct", 24)
    shown = capsys.readouterr().out
    assert "identical: True" in shown
    del METHODS["successor"]
