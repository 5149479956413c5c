"""Files and tests that the documents name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}


def test_exactness_names_real_tests() -> None:
    text = (ROOT / "docs" / "exactness.md").read_text()
    named = re.findall(r"((?:tests/[\w/]+/)?test_\w+\.py)(?:::(\w+))?", text)
    assert len(named) > 40
    for file, function in named:
        path = ROOT / file if "/" in file else TESTS.get(file)
        assert path is not None, file
        assert path.is_file(), file
        assert not function or f"def {function}(" in path.read_text(), function


@pytest.mark.parametrize(
    "document", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")], key=str), ids=lambda p: p.name
)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target
