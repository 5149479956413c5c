"""Pictures of a server's audit, as SVG text to stand inside a page."""

from __future__ import annotations

import math

from matplotlib.axes import Axes

from foredraft.lab.audit.remote.sampling import SamplingResult
from foredraft.lab.audit.statistics import MartingaleTest
from foredraft.lab.plots import BLUE, GREY, RED
from foredraft.measure.charts import svg

NUM_BINS = 20


def pictures(results: list[SamplingResult]) -> list[tuple[str, str]]:
    """Headings and pictures: for each temperature the transformed tokens and the z-scores of the tests."""
    found = []
    for result in results:
        where = f"temperature {result.plan.temperature:g}"
        if result.num_tested:
            found.append((f"Where tokens fall in their distribution, {where}", transform_chart(result)))
            found.append((f"How far each test is from what an exact server shows, {where}", score_chart(result)))
    return found


def transform_chart(result: SamplingResult) -> str:
    """Histogram of the transformed tokens; flat for an exact server."""

    def draw(axes: Axes) -> None:
        expected = len(result.pit) / NUM_BINS
        spread = 3.0 * math.sqrt(expected * (1 - 1 / NUM_BINS))
        axes.hist(result.pit, bins=NUM_BINS, range=(0.0, 1.0), color=BLUE, edgecolor="white")
        axes.axhline(expected, color=GREY)
        axes.axhspan(expected - spread, expected + spread, color=GREY, alpha=0.25, label="flat, three deviations")
        axes.set(xlabel="place of the token in its distribution, the most likely tokens first", ylabel="tokens")
        axes.legend(loc="lower right")

    return svg(draw, 3.2)


def score_chart(result: SamplingResult) -> str:
    """The z-score of each test; within -3 and 3 for an exact server, mostly."""
    tests = [test for test in result.judge.panel.tests if isinstance(test, MartingaleTest) and test.num_observations]

    def draw(axes: Axes) -> None:
        for row, test in enumerate(tests):
            axes.barh(row, test.z_score, color=RED if test.log_evidence >= result.judge.panel.limit else BLUE)
        axes.axvspan(-3, 3, color=GREY, alpha=0.2)
        axes.set_yticks(range(len(tests)), [test.name for test in tests])
        axes.set_ylim(len(tests) - 0.5, -0.5)
        axes.set_xlabel("z-score")

    return svg(draw, 1.0 + 0.24 * len(tests))
