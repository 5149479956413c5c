"""The picture of a profile: what passes cost by their tokens, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from foredraft.engine.profile import PassSample
from foredraft.lab.plots import BLUE, GREEN, GREY, ORANGE, save
from foredraft.measure.profile import Profile


def plot_profile(path: Path, profile: Profile) -> None:
    """Passes on the left, steps on the right.

    Raises:
        InvalidOptionError: nothing can be written there.
    """

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, width_ratios=(1.3, 1.0))
        _draw_passes(left, profile)
        _draw_steps(right, profile)

    save(path, draw, width=11.0, height=4.6)


def _draw_passes(axes: Axes, profile: Profile) -> None:
    table = profile.table
    tokens = np.arange(1, max(table.num_tokens) + 1)
    context = min(sample.context_len for sample in profile.samples)
    fitted = [1e3 * table.pass_s(1, int(n), context, int(n) * context) for n in tokens]
    axes.plot(tokens, fitted, color=BLUE, label="fitted, one row")
    groups: dict[str, tuple[str, str, Callable[[PassSample], bool]]] = {
        "one row": (GREY, "o", lambda s: s.num_rows == 1 and s.context_len == context),
        "several rows": (GREEN, "s", lambda s: s.num_rows > 1 and s.context_len == context),
        "long context": (ORANGE, "^", lambda s: s.context_len > context),
    }
    for name, (color, marker, chosen) in groups.items():
        points = [(s.total_tokens, 1e3 * s.seconds) for s in profile.samples if chosen(s)]
        axes.plot(*zip(*points, strict=True), marker, color=color, ls="", label=name)
    axes.axvline(table.free_tokens, color=GREY, ls=":", label=f"free up to {table.free_tokens} tokens")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set(title="A pass of the target", xlabel="tokens of the pass", ylabel="ms", ylim=(0, None))
    axes.legend()


def _draw_steps(axes: Axes, profile: Profile) -> None:
    names = [f"{step.batch_size} x {step.num_draft_tokens}" for step in profile.steps]
    left = np.zeros(len(names))
    for part, color in (("target", BLUE), ("draft", GREEN), ("verify", ORANGE), ("host", GREY)):
        widths = np.array([1e3 * getattr(step, f"{part}_s") for step in profile.steps])
        axes.barh(names, widths, left=left, color=color, label=part)
        left += widths
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.set(title=f"A step: {profile.method}", xlabel="ms", ylabel="rows x draft tokens each")
    axes.legend()
