"""The page: complete in itself, with every table and picture."""

import re
from pathlib import Path

import pytest

from foredraft.errors import InvalidOptionError
from foredraft.measure import results
from foredraft.measure.bench import BenchResult
from foredraft.measure.document import document
from foredraft.measure.options import BenchOptions
from foredraft.measure.passes import PassTime
from foredraft.measure.report import check_report_path, write_report

from .scripted import made_up_run


@pytest.fixture
def result() -> BenchResult:
    arms = [
        results.summarise(
            [[made_up_run(range(12), width=width)]], [[made_up_run(range(12))]], num_speculative_tokens=width,
            num_prompt_tokens=9, engine=engine, method=method, prompt="<code>", temperature=0.0,
        )
        for engine, method, width in (("foredraft", "none", 0), ("foredraft", "ngram", 3), ("transformers", "none", 0))
    ]  # fmt: skip
    return BenchResult(
        options=BenchOptions(model="a/b"), arms=arms, batches=[], contract="token-identical", dtype="bfloat16",
        passes=[PassTime(0, False, 0.01), PassTime(16, True, 0.014)],
        device="cpu", threads=2, weight_bytes=10**9, bandwidth_bytes_per_s=5e10, interrupted=False, total_s=1.0,
    )  # fmt: skip


def test_the_page_needs_nothing_else(result, tmp_path):
    path = tmp_path / "bench.html"
    write_report(path, result, document(result, "foredraft bench a/b --report bench.html"))
    page = path.read_text()
    assert page.count("<svg") == page.count("</svg>") == 2
    assert page.count("<table>") == 4
    assert not re.search(r"""(src|href)=["'](?!#)""", page)
    assert "&lt;code&gt;, greedy" in page
    assert "<code>" not in page
    assert "foredraft n-gram" in page
    assert "transformers plain" in page
    assert "16 draft tokens in a tree" in page
    assert "1.40 x" in page
    assert "&quot;arms&quot;" in page
    assert "stays below 50 tok/s" in page


def test_a_page_without_results_can_be_written(result, tmp_path):
    empty = BenchResult(
        options=result.options, arms=[], passes=[], batches=[], contract="token-identical", dtype="bfloat16",
        device="cpu", threads=2, weight_bytes=1, bandwidth_bytes_per_s=1.0, interrupted=True, total_s=0.1,
    )  # fmt: skip
    write_report(tmp_path / "bench.html", empty, document(empty, "foredraft bench"))
    assert "<svg" not in (tmp_path / "bench.html").read_text()


@pytest.mark.parametrize(
    ("path", "message"), [("bench.pdf", "end its name in .html"), ("nowhere/bench.html", "does not exist")]
)
def test_a_page_that_cannot_be_written_is_refused_at_once(tmp_path, path, message):
    with pytest.raises(InvalidOptionError, match=message):
        check_report_path(tmp_path / path)
    check_report_path(Path("bench.html"))
