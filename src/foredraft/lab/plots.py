"""Pictures of the laboratory's results, written to a file (PNG, SVG, PDF, ... by its ending)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from foredraft import theory
from foredraft.errors import InvalidOptionError

if TYPE_CHECKING:
    from foredraft.lab.acceptance import ContextAcceptance
    from foredraft.lab.distribution import SamplerFit, Uniformity
    from foredraft.lab.roofline import Roofline
    from foredraft.lab.rules import RuleReport
    from foredraft.lab.speedups import SpeedupRow

BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#6B7280"
_BY_PROMISE = {"exact": GREEN, "lossy": ORANGE, "wrong": RED}
_STYLE = {
    "font.family": "sans-serif",
    "font.size": 10.0,
    "axes.titlesize": 12.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E5E7EB",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "savefig.dpi": 160,
    "svg.fonttype": "none",
}


def check_path(path: Path) -> None:
    """Raise :class:`InvalidOptionError` if no picture can be written there, before anything is computed."""
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise InvalidOptionError(f"cannot plot to {path.name!r}; end the name in one of {', '.join(sorted(known))}")
    if not path.parent.is_dir():
        raise InvalidOptionError(f"cannot plot to {path}; the folder {path.parent} does not exist")


def save(path: Path, draw: Callable[[Figure], None], *, width: float = 7.5, height: float = 4.8) -> None:
    """Draw with the house style and save."""
    check_path(path)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        figure.savefig(path)


def plot_distribution(path: Path, rows: Sequence[SamplerFit], noise: Mapping[int, float], wrong_limit: float) -> None:
    """Total variation against N. ``noise`` is what a correct sampler shows by chance at each N."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        marks = {"target only": (BLUE, "o"), "speculative": (GREEN, "s"), "wrong fallback": (RED, "^")}
        for name, (color, marker) in marks.items():
            points = [(row.num_samples, row.total_variation) for row in rows if row.sampler == name]
            axes.loglog(*zip(*points, strict=True), color=color, marker=marker, label=name)
        axes.loglog(list(noise), list(noise.values()), color=GREY, ls=":", label="expected by chance, ~ 1/sqrt(N)")
        axes.axhline(wrong_limit, color=RED, ls="--", lw=1.0, label=f"wrong fallback, exact: {wrong_limit:.4f}")
        axes.set(
            title="More samples: the right rule converges, the wrong one does not",
            xlabel="sequences sampled, N",
            ylabel="total variation to the exact law",
        )
        axes.legend()

    save(path, draw)


def plot_samplers(path: Path, rows: Sequence[SamplerFit], promises: Mapping[str, str], noise: float) -> None:
    """Total variation of every rule at one N as bars, with the level of chance."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        rows_up = rows[::-1]
        colors = [_BY_PROMISE[promises[row.sampler]] for row in rows_up]
        bars = axes.barh([row.sampler for row in rows_up], [row.total_variation for row in rows_up], color=colors)
        axes.bar_label(bars, fmt="%.4f", padding=4)
        axes.axvline(noise, color=GREY, ls=":", label=f"expected by chance: {noise:.4f}")
        axes.set_xscale("log")
        axes.margins(x=0.15)
        axes.set(
            title=f"Distance to the exact law after {rows[0].num_samples:,} sequences",
            xlabel="total variation",
        )
        axes.grid(axis="y", visible=False)
        axes.legend(loc="upper right")

    save(path, draw)


def plot_uniformity(path: Path, rows: Sequence[Uniformity]) -> None:
    """Histogram of the p-values of each sampler."""

    def draw(figure: Figure) -> None:
        num_columns = -(-len(rows) // 2)
        all_axes = figure.subplots(2, num_columns).ravel()
        for axes in all_axes[len(rows) :]:
            axes.set_axis_off()
        for axes, row in zip(all_axes, rows, strict=False):
            axes.hist(row.p_values, bins=np.linspace(0, 1, 11).tolist(), color=_BY_PROMISE[row.promise], rwidth=0.9)
            axes.axhline(len(row.p_values) / 10, color=GREY, ls=":")
            axes.set_title(f"{row.sampler}\nKS p = {row.kolmogorov_smirnov_p:.3f}", fontsize=10)
            axes.set(xlim=(0, 1), xlabel="chi-square p")
            axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        for axes in all_axes[::num_columns]:
            axes.set_ylabel(f"seeds (of {len(rows[0].p_values)})")
        figure.suptitle("p-values of a correct sampler are uniform (dotted)", x=0.01, ha="left", weight="bold")

    save(path, draw, width=10.0, height=5.4)


def plot_acceptance(path: Path, rows: Sequence[ContextAcceptance]) -> None:
    """Acceptance by context: grouped bars for rejection, coupled and match."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        rules = {"rejection": BLUE, "coupled": GREEN, "match": ORANGE}
        places = np.arange(len(rows))
        for i, (rule, color) in enumerate(rules.items()):
            bars = axes.bar(
                places + (i - 1) * 0.27, [getattr(row, rule) for row in rows], 0.25, color=color, label=rule
            )
            axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
        axes.set_xticks(places, [str(row.token) for row in rows])
        axes.set(
            title="Chance that a draft token is accepted, by rule",
            xlabel="token before the draft token",
            ylabel="acceptance",
            ylim=(0, 1),
        )
        axes.grid(axis="x", visible=False)
        axes.legend(ncols=3, loc="upper left")

    save(path, draw)


def plot_speedup(path: Path, rows: Sequence[SpeedupRow], *, limit: int) -> None:
    """Speedup against draft length, one panel per draft cost, the best length marked."""

    def draw(figure: Figure) -> None:
        panels = [list(group) for _, group in groupby(rows, key=lambda row: row.draft_cost)]
        all_axes = np.atleast_1d(figure.subplots(1, len(panels), sharey=True))
        colors = mpl.colormaps["viridis"](np.linspace(0.1, 0.85, max(len(panel) for panel in panels)))
        lengths = np.arange(limit + 1)
        for axes, panel in zip(all_axes, panels, strict=True):
            for row, color in zip(panel, colors, strict=False):
                values = [theory.speedup(row.acceptance_rate, int(k), row.draft_cost) for k in lengths]
                axes.plot(lengths, values, color=color, label=f"{row.acceptance_rate:g}")
                axes.plot(row.best_num_draft_tokens, row.best_speedup, "o", color=color, mec="white", ms=8)
            axes.axhline(1.0, color=GREY, ls=":", lw=1.2)
            axes.set(title=f"draft cost c = {panel[0].draft_cost:g}", xlabel="draft tokens, k", xlim=(0, limit))
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        all_axes[0].set_ylabel("expected speedup over plain decoding")
        handles, labels = all_axes[0].get_legend_handles_labels()
        title = "acceptance\n(dot: best k)"
        figure.legend(handles[::-1], labels[::-1], title=title, loc="outside right center")

    save(path, draw, width=5.0 * len({row.draft_cost for row in rows}) + 0.5)


def plot_roofline(path: Path, result: Roofline) -> None:
    """Time of a target pass against batch: weights, KV caches, arithmetic without and with draft tokens."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        crossing = max(result.compute_bound_batch, 2.0)
        batches = np.logspace(0, np.log10(crossing) + 1, 200)
        width = result.num_draft_tokens + 1
        _line(axes, batches, np.full_like(batches, result.weight_read_s), BLUE, "-", "reading the weights")
        shades = mpl.colormaps["Blues"](np.linspace(0.35, 0.75, max(len(result.contexts), 1)))
        for cost, shade in zip(result.contexts, shades, strict=False):
            read_s = result.weight_read_s + batches * cost.kv_bytes / result.device.bandwidth_bytes_per_s
            _line(axes, batches, read_s, shade, "-", f"... and KV cache of {cost.context_len:,} tokens")
        _line(axes, batches, batches * result.arithmetic_s, RED, "--", "arithmetic, plain decoding")
        _line(
            axes,
            batches,
            batches * width * result.arithmetic_s,
            RED,
            ":",
            f"arithmetic, {width - 1} draft tokens",
        )
        for batch in (result.compute_bound_batch, result.compute_bound_batch_drafting):
            axes.plot(batch, result.weight_read_s * 1e3, "o", color=RED, mec="white", ms=9, zorder=5)
            axes.annotate(
                f"{batch:,.0f}",
                (batch, result.weight_read_s * 1e3),
                (6, -14),
                textcoords="offset points",
                color=RED,
            )
        axes.set_title(
            f"{result.model.name}, {result.device.name}\nBlue: memory. Red: arithmetic, busy from the dots on"
        )
        axes.set(xlabel="batch (sequences per pass)", ylabel="time of a target pass, ms", xlim=(1, batches[-1]))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        figure.legend(loc="outside right center", fontsize=8)

    save(path, draw, width=9.0)


def _line(axes: Axes, batches: np.ndarray, seconds: np.ndarray, color: object, style: str, label: str) -> None:
    axes.loglog(batches, seconds * 1e3, color=color, ls=style, label=label)


def plot_rules(path: Path, reports: Sequence[RuleReport], exact_limit: float) -> None:
    """Largest distance of every rule on a log axis, with the limit of what counts as exact."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        reports_up = reports[::-1]
        for i, report in enumerate(reports_up):
            distance = max(report.max_distance, 1e-17)
            color = _BY_PROMISE[report.rule.promise]
            axes.plot([1e-18, distance], [i, i], color=color, lw=1.2)
            axes.plot(distance, i, "o", color=color, ms=8)
        for promise, color in _BY_PROMISE.items():
            axes.plot([], [], "o", color=color, label=promise)
        axes.axvline(exact_limit, color=GREY, ls=":", label=f"limit {exact_limit:.0e}")
        axes.set_yticks(range(len(reports)), [report.rule.name for report in reports_up])
        axes.set_xscale("log")
        axes.set(
            title="Exact or not: distance by enumeration",
            xlabel="largest total variation to the target's law",
            xlim=(1e-17, 2),
        )
        axes.grid(axis="y", visible=False)
        axes.legend(loc="center")

    save(path, draw, height=0.3 * len(reports) + 1.4)
