"""The notebook that explains the rejection rule runs from top to bottom; its cells hold assertions of their own."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "docs" / "rejection_rule.ipynb"
SOURCE = Path(__file__).parents[2] / "src"


def num_pictures(notebook: nbformat.NotebookNode) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_runs_and_draws_what_it_was_committed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    committed, notebook = (nbformat.read(NOTEBOOK, as_version=4) for _ in range(2))
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    assert num_pictures(notebook) == num_pictures(committed) == 5
