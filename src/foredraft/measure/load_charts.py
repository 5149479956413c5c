"""The pictures of a benchmark under load: throughput, and the ratio to plain, by level."""

from __future__ import annotations

from functools import partial
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from foredraft.lab.plots import BLUE, GREEN, GREY, ORANGE, RED, save
from foredraft.measure.charts import svg
from foredraft.measure.load_bench import LoadBenchResult
from foredraft.measure.load_options import AUTO, PLAIN

_PANELS = (("New tokens per second", "tokens_per_s"), ("Against plain decoding", "against_plain"))
_FIXED_COLORS = (BLUE, "#56B4E9", ORANGE, RED, "#CC79A7", "#F0E442")


def plot_load(path: Path, result: LoadBenchResult) -> None:
    """Write both pictures side by side to a file."""

    def draw(figure: Figure) -> None:
        for axes, (title, name) in zip(figure.subplots(1, 2), _PANELS, strict=True):
            axes.set_title(title)
            _draw(result, name, axes)

    save(path, draw, width=10.0, height=4.6)


def load_svgs(result: LoadBenchResult) -> list[tuple[str, str]]:
    """The pictures with their titles, as SVG texts to stand inside a page."""
    return [(title, svg(partial(_draw, result, name), 4.2)) for title, name in _PANELS]


def _draw(result: LoadBenchResult, name: str, axes: Axes) -> None:
    """One figure of all arms by level."""
    colors = cycle(_FIXED_COLORS)
    for arm in result.options.arms:
        found = [each for each in result.results if each.arm == arm]
        color = {PLAIN: GREY, AUTO: GREEN}.get(arm) or next(colors)
        axes.plot(
            [each.level for each in found], [getattr(each, name) for each in found], color=color, label=arm,
            marker="o", markersize=4, linewidth=2.8 if arm == AUTO else 1.4, zorder=3 if arm == AUTO else 2,
        )  # fmt: skip
    _label_levels(axes, result)
    axes.set_ylim(bottom=0.0)
    axes.legend()


def _label_levels(axes: Axes, result: LoadBenchResult) -> None:
    levels = sorted(result.options.levels)
    axes.set_xscale("log", base=2)
    axes.set_xticks(levels, [f"{level:g}" for level in levels])
    axes.minorticks_off()
    axes.set_xlabel(result.level_name)
