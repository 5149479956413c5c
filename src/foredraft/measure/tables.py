"""A benchmark's figures as tables: once as plain cells, shown in a terminal or in a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rich import box
from rich.markup import escape
from rich.table import Table

from foredraft.measure.bench import BenchResult
from foredraft.measure.results import ArmResult, Ratio, cell_name, ratios

METHOD_NAMES = {"none": "plain", "ngram": "n-gram", "draft_model": "draft model"}
PEER_NAMES = {"none": "plain", "ngram": "prompt lookup", "draft_model": "assisted"}

Measured = TypeVar("Measured", ArmResult, Ratio)


@dataclass(frozen=True, slots=True)
class Section:
    """Rows under a heading; an empty heading shows none."""

    heading: str
    rows: list[list[str]]


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of texts. The columns from ``first_number`` on hold numbers."""

    title: str
    columns: list[str]
    first_number: int
    caption: str
    sections: list[Section] = field(default_factory=list)


def grids(result: BenchResult) -> list[Grid]:
    """The tables of a result: speed, where the time goes, ratios, passes, batches; those without rows left out."""
    found = [speed_grid(result), time_grid(result), ratio_grid(result), pass_grid(result), batch_grid(result)]
    return [grid for grid in found if grid.sections]


def arm_name(engine: str, method: str) -> str:
    """An arm as people call it."""
    if engine != "foredraft":
        return f"{engine} {PEER_NAMES[method]}"
    return f"{engine} {method_name(method)}"


def method_name(method: str) -> str:
    """A method, or a combination, as people call it."""
    return " + ".join(METHOD_NAMES.get(part, part) for part in method.split("+"))


def speed_grid(result: BenchResult) -> Grid:
    """Rates, tokens per target pass, acceptance, and the first token that differs from plain."""

    def row(arm: ArmResult) -> list[str]:
        return [
            arm_name(arm.engine, arm.method),
            f"{arm.tokens_per_s:.1f}",
            f"{arm.decode_tokens_per_s:.1f}",
            f"{arm.tokens_per_target_pass:.2f}",
            "" if arm.acceptance_rate is None else f"{arm.acceptance_rate:.0%}",
            _difference(arm),
        ]

    columns = ["", "tok/s", "decode", "tok/pass", "accepted", "differs at"]
    sections = [Section(_cell_heading(arms[0]), list(map(row, arms))) for arms in _by_cell(result.arms)]
    return Grid("Speed", columns, 1, _speed_caption(result), sections)


def time_grid(result: BenchResult) -> Grid:
    """Milliseconds of a target pass and of what comes with it."""

    def row(arm: ArmResult) -> list[str]:
        split = arm.split
        parts = (split.draft_s, split.target_s, split.verify_s, split.host_s)
        share = (split.verify_s + split.host_s) / sum(parts) if sum(parts) else 0.0
        per_pass = [f"{1e3 * part / max(1, arm.num_target_passes):.2f}" for part in parts]
        return [arm_name(arm.engine, arm.method), *per_pass, f"{share:.1%}"]

    return Grid(
        "Where the time goes, ms per target pass",
        ["", "draft", "target", "verify", "host", "host share"],
        1,
        "Of the round with the median time, prefill included. host share: all but draft and target. "
        "transformers: target and draft by hooks on the models, all else is host.",
        [
            Section(cell_name(arms[0].prompt, arms[0].temperature), list(map(row, arms)))
            for arms in _by_cell(result.arms)
        ],
    )


def ratio_grid(result: BenchResult) -> Grid:
    """How many times as fast an arm is as the peer's of the same kind, and as its own plain arm."""

    def row(each: Ratio) -> list[str]:
        numbers = (each.tokens_per_s, each.decode_tokens_per_s)
        return [
            arm_name(*each.arm),
            arm_name(*each.base),
            *("" if value is None else f"{value:.2f} x" for value in numbers),
            "loses" if round(each.tokens_per_s or 1.0, 2) < 1.0 else "",
        ]

    sections = [
        Section(cell_name(found[0].prompt, found[0].temperature), list(map(row, found)))
        for found in _by_cell(ratios(result.arms))
    ]
    caption = "Of the medians above. loses: slower than what it is compared with, by however little."
    return Grid("Ratios", ["", "against", "tok/s", "decode", ""], 2, caption, sections)


def pass_grid(result: BenchResult) -> Grid:
    """What a pass costs that verifies a draft."""
    rows = [
        [
            f"{each.num_draft_tokens} draft tokens{' in a tree' if each.is_tree else ''}" if i else "no draft",
            f"{1e3 * each.seconds:.2f}",
            f"{each.seconds / result.passes[0].seconds:.2f} x",
        ]
        for i, each in enumerate(result.passes)
    ]
    return Grid(
        "A pass of the target (foredraft), ms",
        ["", "ms", "ratio"],
        1,
        "One sequence, 128 tokens of context. ratio: to the pass without a draft.",
        [Section("", rows)] if rows else [],
    )


def batch_grid(result: BenchResult) -> Grid:
    """Several sequences at once against one."""
    rows = [
        [
            f"{method_name(each.method)}, {'greedy' if not each.temperature else 'sampled'}",
            str(each.batch_size),
            f"{each.tokens_per_s:.1f}",
            f"{each.alone_tokens_per_s:.1f}",
            f"{each.tokens_per_s / each.alone_tokens_per_s:.2f} x",
            f"{each.num_identical} of {each.batch_size}",
        ]
        for each in result.batches
    ]
    return Grid(
        "Sequences decoded together (foredraft)",
        ["", "sequences", "tok/s", "alone", "ratio", "same tokens"],
        1,
        "alone: the same prompts one by one. same tokens: rows that get the tokens they get alone.",
        [Section("", rows)] if rows else [],
    )


def headline(result: BenchResult, cpu_name: str) -> str:
    """What ran, where, and what no plain decoding can exceed."""
    return (
        f"{result.options.model}, {result.dtype}, {result.device} ({cpu_name}), {result.threads} threads, "
        f"{result.options.max_tokens} new tokens a run; numerics: {result.contract}. "
        f"Weights of {result.weight_bytes / 1e6:.0f} MB at {result.bandwidth_bytes_per_s / 1e9:.0f} GB/s: "
        f"plain decoding of one sequence stays below {result.ceiling_tokens_per_s:.0f} tok/s."
    )


def rich_table(grid: Grid) -> Table:
    """The grid for a terminal."""
    table = Table(
        title=grid.title, caption=grid.caption, title_justify="left", caption_justify="left",
        title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    for index, column in enumerate(grid.columns):
        is_number = index >= grid.first_number
        table.add_column(column, justify="right" if is_number else "left", no_wrap=is_number)
    for section in grid.sections:
        if section.heading:
            table.add_row(f"[bold]{escape(section.heading)}[/]")
        for row in section.rows:
            table.add_row(*map(escape, row))
        table.add_section()
    return table


def _by_cell(items: Iterable[Measured]) -> list[list[Measured]]:
    groups: dict[tuple[str, float], list[Measured]] = {}
    for item in items:
        groups.setdefault((item.prompt, item.temperature), []).append(item)
    return list(groups.values())


def _cell_heading(arm: ArmResult) -> str:
    """Short enough to leave the columns of numbers their width."""
    size = f"{arm.num_prompt_tokens} tokens" if arm.num_prompts == 1 else f"{arm.num_prompts} prompts"
    return f"{cell_name(arm.prompt, arm.temperature)}, {size}"


def _difference(arm: ArmResult) -> str:
    if arm.method == "none":
        return ""
    if arm.first_difference is None:
        return "identical"
    return f"token {arm.first_difference}"


def _speed_caption(result: BenchResult) -> str:
    parts = [
        f"{_rounds(result)} decode: without prefill, from the first delivery on. tok/pass: new tokens per pass of "
        "the target, prefill counted. accepted: of the draft tokens. differs at: first token unlike the same "
        "engine's plain arm."
    ]
    if _has(result.arms, method="draft_model") and result.options.drafts_with_itself:
        parts.append(
            "The draft model here is the target itself, run once: nearly every draft token is accepted and nothing "
            "is won, because a draft token costs as much as a token. It shows the price of drafting; for a gain, "
            "name a smaller model with --draft-model."
        )
    if any(not arm.is_greedy for arm in result.arms):
        parts.append(
            "Above temperature 0, foredraft's noise belongs to seed and position, so drafting changes no token."
        )
        if _has(result.arms, engine="transformers"):
            parts.append("transformers draws from one stream, so its tokens change with the method.")
    if result.interrupted:
        parts.append("Interrupted: what had been measured until then.")
    return " ".join(parts)


def _rounds(result: BenchResult) -> str:
    """How many rounds the medians are of, and why not more."""
    wanted = result.options.repeats
    rounds = sorted({arm.repeats for arm in result.arms if arm.method == "none"}) or [wanted]
    counts = " to ".join(map(str, sorted({rounds[0], rounds[-1]})))
    text = "One round" if counts == "1" else f"Medians of {counts} rounds"
    if rounds[0] < wanted and not result.interrupted:
        text += f" ({wanted} would have taken more than {result.options.time_limit_s:g} s)"
    return text + "."


def _has(arms: Sequence[ArmResult], **wanted: str) -> bool:
    return any(all(getattr(arm, name) == value for name, value in wanted.items()) for arm in arms)
