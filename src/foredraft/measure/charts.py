"""Pictures of a benchmark's figures, as SVG text to stand inside a page."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from foredraft.lab.plots import BLUE, GREEN, GREY, ORANGE
from foredraft.measure.results import ArmResult, cell_name
from foredraft.measure.tables import arm_name

_COLORS = {"none": GREY, "ngram": BLUE, "draft_model": GREEN}
_PARTS = (("target", BLUE), ("draft", GREEN), ("verify", ORANGE), ("host", GREY))
_STYLE = {
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "grid.color": "#E5E7EB",
    "legend.frameon": False,
    "svg.fonttype": "none",
}


def rate_chart(arms: Sequence[ArmResult]) -> str:
    """Decode rates of all arms; peers are hatched."""

    def draw(axes: Axes) -> None:
        for index, arm in enumerate(arms):
            hatch = "" if arm.engine == "foredraft" else "///"
            axes.barh(
                index, arm.decode_tokens_per_s, color=_COLORS.get(arm.method, ORANGE), hatch=hatch, edgecolor="white"
            )
            axes.text(arm.decode_tokens_per_s, index, f" {arm.decode_tokens_per_s:.1f}", va="center")
        axes.set_xlabel("tokens/s without prefill")
        axes.margins(x=0.12)

    return _bars(arms, draw)


def time_chart(arms: Sequence[ArmResult]) -> str:
    """Milliseconds per new token, by what they are spent on."""

    def draw(axes: Axes) -> None:
        left = [0.0] * len(arms)
        for part, color in _PARTS:
            widths = [1e3 * getattr(arm.split, f"{part}_s") / max(1, arm.num_tokens) for arm in arms]
            axes.barh(range(len(arms)), widths, left=left, color=color, label=part)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set_xlabel("ms per new token, prefill included")
        axes.legend(ncols=len(_PARTS), loc="lower center", bbox_to_anchor=(0.5, 1.0))

    return _bars(arms, draw)


def svg(draw: Callable[[Axes], None], height: float) -> str:
    """What ``draw`` puts on the axes, as SVG text to stand inside a page; ``height`` in inches, of 8.5 wide."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8.5, height), layout="constrained")
        draw(figure.subplots())
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _bars(arms: Sequence[ArmResult], draw: Callable[[Axes], None]) -> str:
    """Horizontal bars, one an arm, the first on top."""

    def draw_with_names(axes: Axes) -> None:
        draw(axes)
        labels = [f"{cell_name(a.prompt, a.temperature)}: {arm_name(a.engine, a.method)}" for a in arms]
        axes.set_yticks(range(len(arms)), labels)
        axes.set_ylim(len(arms) - 0.5, -0.5)

    return svg(draw_with_names, 1.2 + 0.26 * len(arms))
