"""Pictures of a sampling audit, as SVG text to stand inside a page."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes

from foredraft.lab.audit.sampling import SamplingResult
from foredraft.lab.plots import BLUE, GREY, ORANGE
from foredraft.measure.charts import svg

NUM_BINS = 20
_HIGHEST = 12.0


def evidence_chart(result: SamplingResult) -> str:
    """Evidence of each test over the tokens judged; the strongest in colour, above the line one alone convicts."""

    def draw(axes: Axes) -> None:
        tokens = [0, *(judged for judged, _ in result.history)]
        for index, test in enumerate(result.tests):
            if test.num_tokens:
                heights = [0.0, *(min(evidence[index], _HIGHEST) for _, evidence in result.history)]
                is_strongest = test.name == result.reason
                color = ORANGE if is_strongest else GREY
                axes.plot(
                    tokens, heights, color=color, zorder=2 + is_strongest, label=test.name if is_strongest else None
                )
        limit = math.log10(len(result.tests) / result.false_alarm_rate)
        axes.axhline(limit, color=BLUE, linestyle="--", label="certain")
        axes.set_ylim(top=limit * 1.15)
        axes.set_xlabel("tokens judged")
        axes.set_ylabel("evidence, powers of ten")
        axes.legend(loc="center right")

    return svg(draw, 3.2)


def z_chart(result: SamplingResult) -> str:
    """Standard scores; those of an exact engine lie within 3 but for one in 370."""

    def draw(axes: Axes) -> None:
        scored = {test.name: test.z_score for test in result.tests if test.z_score is not None}
        scores = list(scored.values())
        axes.barh(range(len(scores)), scores, color=[ORANGE if abs(z) > 3 else BLUE for z in scores])
        axes.axvspan(-3, 3, color=GREY, alpha=0.15, linewidth=0, zorder=0)
        axes.set_yticks(range(len(scores)), list(scored))
        axes.set_ylim(len(scores) - 0.5, -0.5)
        axes.set_xlabel("standard score")

    return svg(draw, 1.0 + 0.26 * len(result.tests))


def pit_chart(result: SamplingResult) -> str:
    """Where the drawn tokens fall in the target's law; flat if they follow it, with a band of three deviations."""

    def draw(axes: Axes) -> None:
        counts, edges = np.histogram(result.numbers, bins=NUM_BINS, range=(0.0, 1.0))
        expected = len(result.numbers) / NUM_BINS
        spread = 3.0 * math.sqrt(expected * (1.0 - 1.0 / NUM_BINS))
        axes.bar(edges[:-1], counts, width=1.0 / NUM_BINS, align="edge", color=BLUE, edgecolor="white")
        axes.axhspan(expected - spread, expected + spread, color=GREY, alpha=0.3, linewidth=0, zorder=0)
        axes.set_xlabel("place of the token in the cumulative law")
        axes.set_ylabel("tokens")

    return svg(draw, 2.8)
