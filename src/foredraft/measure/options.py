"""What a benchmark is asked to do, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from foredraft.config import NUMERICS, POLICIES, SpeculativeConfig, check_method
from foredraft.errors import InvalidOptionError
from foredraft.measure.workloads import check_prompt_names
from foredraft.methods import METHODS

PEERS = ("transformers",)
DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """Settings of ``foredraft bench``.

    Attributes:
        model: folder, hub id or short name.
        peer: also run this engine on the same weights; None for none.
        prompts: built-in ones (see ``workloads``); not used with ``dataset``.
        num_prompt_tokens: length of the prompt ``long``.
        dataset, per_category: the user's JSONL file, and how many prompts of each category are taken.
        methods: drafting methods; ``none`` (plain) is always run, as the reference.
        draft_model: for the method of that name; None drafts with the target itself.
        num_speculative_tokens: most draft tokens of a pass; None is each engine's and method's default.
        speculative_config: more options of foredraft's arms that have a draft model or head; one that is named here
            itself goes before it.
        policy: of foredraft's arms, how many of them are drafted.
        max_tokens: new tokens of every run; end tokens are ignored.
        temperatures: 0 is greedy; above it, repeat i uses ``seed + i``.
        repeats: rounds over all arms and prompts.
        time_limit_s: no repeat begins that would end later than that after the start; the first always runs.
            0 is no limit.
        batch_sizes: also decode so many different prompts together; 1 adds nothing.
    """

    model: str
    peer: str | None = None
    prompts: tuple[str, ...] = ("code", "story")
    num_prompt_tokens: int = 1024
    dataset: Path | None = None
    per_category: int | None = None
    methods: tuple[str, ...] = ("none", "ngram", "draft_model")
    draft_model: str | None = None
    num_speculative_tokens: int | None = None
    speculative_config: Mapping[str, Any] = field(default_factory=dict)
    policy: str = "fixed"
    max_tokens: int = 192
    temperatures: tuple[float, ...] = (0.0, 1.0)
    repeats: int = 3
    time_limit_s: float = 0.0
    batch_sizes: tuple[int, ...] = ()
    seed: int = 0
    dtype: str = "auto"
    threads: int | None = None
    numerics: str = "invariant"

    def __post_init__(self) -> None:
        check_choices("peer", [self.peer] if self.peer else [], PEERS)
        for method in self.methods:
            check_method(method)
        check_choices("policy", [self.policy], POLICIES)
        check_choices("numerics", [self.numerics], NUMERICS)
        check_choices("dtype", [self.dtype], DTYPES)
        check_prompt_names(self.prompts)
        if not (self.prompts or self.dataset) or not self.methods or not self.temperatures:
            raise InvalidOptionError("prompts, methods and temperatures need at least one entry each")
        self._check_counts()
        if any(not 0.0 <= temperature < float("inf") for temperature in self.temperatures):
            raise InvalidOptionError(f"temperatures={self.temperatures} must be 0 (greedy) or above")
        if self.per_category is not None and self.dataset is None:
            raise InvalidOptionError(f"per_category={self.per_category} has no effect without a dataset")
        for name in ("draft_model", "speculative_config"):
            if getattr(self, name) and not any(map(needs_draft_model, self.methods)):
                raise InvalidOptionError(
                    f"{name}={getattr(self, name)!r} has no effect on the methods {', '.join(self.methods)}; "
                    "add draft_model to them"
                )
        _ = self.arms

    def _check_counts(self) -> None:
        check_range("max_tokens", self.max_tokens, 2, "the rate after the first token needs two")
        check_range("repeats", self.repeats, 1, "at least one round is counted")
        check_range("num_prompt_tokens", self.num_prompt_tokens, 1, "a prompt needs tokens")
        check_range("seed", self.seed, 0, "use a non-negative integer")
        check_range("time_limit_s", self.time_limit_s, 0, "0 is no limit")
        for size in self.batch_sizes:
            check_range("batch_sizes", size, 1, "a batch has at least one prompt")
        if self.per_category is not None:
            check_range("per_category", self.per_category, 1, "leave it out to take all prompts")
        if self.num_speculative_tokens is not None:
            check_range("num_speculative_tokens", self.num_speculative_tokens, 1, "plain decoding is always run")

    @property
    def all_methods(self) -> tuple[str, ...]:
        """The methods in order, plain first."""
        return ("none", *(name for name in dict.fromkeys(self.methods) if name != "none"))

    @property
    def arms(self) -> dict[str, SpeculativeConfig]:
        """The configuration of each of the methods.

        Raises:
            InvalidOptionError: options do not fit a method.
        """
        arms = {}
        for method in self.all_methods:
            chosen: dict[str, Any] = {}
            if needs_draft_model(method):
                chosen = {**self.speculative_config, "model": self.draft_model or self.model}
            if method != "none" and self.num_speculative_tokens is not None:
                chosen["num_speculative_tokens"] = self.num_speculative_tokens
            arms[method] = SpeculativeConfig.from_options({**chosen, "method": method, "policy": self.policy})
        return arms

    @property
    def drafts_with_itself(self) -> bool:
        """Whether the draft model is the target, so that every token is accepted and nothing is won."""
        return self.draft_model in (None, self.model)


def needs_draft_model(method: str) -> bool:
    """Whether a method, or a part of it, needs a draft model or a head."""
    return any(METHODS[part].takes_model for part in method.split("+"))


def check_choices(name: str, values: Sequence[Any], choices: tuple[str, ...]) -> None:
    """Raise :class:`InvalidOptionError` for a value that is no choice, naming the nearest one."""
    for value in values:
        if value not in choices:
            near = get_close_matches(str(value), choices, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InvalidOptionError(f"{name}: {value!r} is not one of {', '.join(choices)}{hint}")


def check_range(name: str, value: float, low: float, reason: str) -> None:
    """Raise :class:`InvalidOptionError` for a value below ``low``."""
    if not value >= low:
        raise InvalidOptionError(f"{name}={value} is below {low:g}; {reason}")
