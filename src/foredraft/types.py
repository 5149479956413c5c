"""The nouns of the engine: requests, sequences, drafts, verdicts and what comes back to the user.

Shape letters used everywhere: B rows (sequences of a step), N draft tokens of a row (padded), M rows of
logits, T tokens of a pass, V vocabulary, H heads, S keys, D head size.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from foredraft.errors import InvalidOptionError

if TYPE_CHECKING:
    from torch import Tensor


class FinishReason(enum.StrEnum):
    """Why a sequence ended; the values are those of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


def check_option_names(options: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """Raise :class:`InvalidOptionError` for the first unknown option, naming the nearest known one."""
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known options: {', '.join(known)}"
            raise InvalidOptionError(f"{where} has no option {name!r}{hint}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How a request is decoded. Names and meaning as in vLLM.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches top_p.
        min_p: drop tokens less likely than min_p times the most likely one.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output.
        presence_penalty: subtracted once from tokens of the output.
        frequency_penalty: subtracted per occurrence in the output.
        logit_bias: added to the logits of the given token ids.
        allowed_token_ids: nothing else is ever emitted.
        banned_token_ids: never emitted.
        seed: with a seed the emitted tokens are those of plain decoding with that seed.
        max_tokens: limit of emitted tokens; None means up to the model's length limit.
        min_tokens: end-of-sequence and stop tokens are banned before that many.
        stop: strings that end the output (cut before the string unless ``include_stop_str_in_output``).
        stop_token_ids: tokens that end the output, besides the model's own end tokens.
        ignore_eos: the model's own end tokens do not end the output.
        logprobs: also return the log-probabilities of this many most likely tokens at each position,
            from the target's unfiltered distribution.
        skip_special_tokens: leave special tokens out of the text.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        as_tuple = {name: getattr(self, name) for name in ("stop", "stop_token_ids")}
        as_tuple["stop"] = (self.stop,) if isinstance(self.stop, str) else self.stop
        for name in ("allowed_token_ids", "banned_token_ids"):
            as_tuple[name] = getattr(self, name)
        for name, value in as_tuple.items():
            object.__setattr__(self, name, None if value is None else tuple(value))
        _check_range("temperature", self.temperature, 0.0, float("inf"), "use 0 for greedy decoding")
        _check_range("top_k", self.top_k, -1, float("inf"), "use 0 to keep all tokens")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidOptionError(f"top_p={self.top_p} is outside (0, 1]; use 1 to keep all tokens")
        _check_range("min_p", self.min_p, 0.0, 1.0, "use 0 to keep all tokens")
        if not self.repetition_penalty > 0.0:
            raise InvalidOptionError(f"repetition_penalty={self.repetition_penalty} must be above 0; 1 means none")
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0, "0 means none")
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "0 means none")
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, float("inf"), "ask for at least one token")
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens or float("inf"), "it cannot exceed max_tokens")
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0, 100, "0 returns the emitted token's own")
        if self.seed is not None:
            _check_range("seed", self.seed, 0, 2**63 - 1, "use a non-negative 63-bit integer")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidOptionError("allowed_token_ids is empty, so nothing could be emitted; use None to allow all")
        if any(not text for text in self.stop):
            raise InvalidOptionError("stop contains an empty string, which would stop at once; leave it out")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping; an unknown name raises and the nearest known one is named."""
        check_option_names(options, tuple(f.name for f in fields(cls)), "SamplingParams")
        return cls(**options)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _check_range(name: str, value: float, low: float, high: float, remedy: str) -> None:
    if not low <= value <= high:
        raise InvalidOptionError(f"{name}={value} is outside [{low:g}, {high:g}]; {remedy}")


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposes for the rows of one step.

    Attributes:
        token_ids: ``[B, N]`` int64; entries at and past ``num_draft_tokens`` are padding.
        parents: ``[B, N]`` int64, index of the node's parent, which is smaller than its own; -1 for children
            of the last committed token. A chain has parent ``i - 1``.
        num_draft_tokens: per row; 0 is legal.
        probs: ``[B, N, V]`` float32, the very tensor the tokens were drawn from, after all filters (a sibling
            drawn without replacement: without the earlier ones, normalised); None means a deterministic
            proposal, whose siblings differ.
        path_probs: per row and token, the source's own estimate of the chance that the token and all before it
            are accepted; None if it makes none.
    """

    token_ids: Tensor
    parents: Tensor
    num_draft_tokens: list[int]
    probs: Tensor | None = None
    path_probs: list[list[float]] | None = None

    def first(self, counts: Sequence[int]) -> Draft:
        """Only the first tokens of each row, at most as many as there are."""
        width = max(counts, default=0)
        return Draft(
            self.token_ids[:, :width],
            self.parents[:, :width],
            list(counts),
            None if self.probs is None else self.probs[:, :width],
            None if self.path_probs is None else [p[:n] for p, n in zip(self.path_probs, counts, strict=True)],
        )

    def depths(self, row: int) -> list[int]:
        """The depth of each of a row's tokens, 1 for children of the text."""
        return node_depths(self.parents[row, : self.num_draft_tokens[row]].tolist())


def node_depths(parents: Iterable[int]) -> list[int]:
    """The depth of each node of a tree, 1 for children of the root; parents come before children."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    return depths


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the verifier decided for one row.

    ``token_ids`` are the emitted tokens: the accepted ones, then one that is the recovered token (a draft
    token was rejected) or the bonus token (none was). ``path`` holds the accepted indices of the draft.
    """

    token_ids: list[int]
    path: list[int]
    is_bonus: bool

    @property
    def num_accepted_tokens(self) -> int:
        return len(self.path)


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token under the target's unfiltered distribution, with its rank from 1."""

    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to decode.

    Attributes:
        request_id: the caller's name for it.
        prediction_token_ids: what the output is expected to be like; drafted from by the method ``prediction``.
        route: label of requests of one kind ("code-edit", "summary"), which share what is learnt of acceptance.
        num_speculative_tokens: most draft tokens of a step for this request; 0 opts out, None is the engine's limit.
        priority: requests with a lower number go first (as in vLLM); among equals the one that came first.
        methods: the parts of the engine's method that may draft for this request; empty are all.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    prediction_token_ids: tuple[int, ...] = ()
    route: str = ""
    num_speculative_tokens: int | None = None
    priority: int = 0
    methods: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step delivered to one request: tokens, their text and log-probabilities, and how it ended."""

    request_id: str
    token_ids: list[int]
    text: str
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


@dataclass(slots=True)
class RequestMetrics:
    """Counts and seconds of one request. Counters are taken from delivered tokens only.

    ``num_emitted_tokens == num_accepted_tokens + num_target_passes`` before any cut at a stop; passes of
    the prompt that emit nothing are not target passes. ``drafted_per_position`` counts the drafts that reach a
    position, of whatever width. ``num_cached_tokens`` of the prompt were in the cache already when the request began.
    ``num_preemptions`` is how often it had to make room for others and feed its text again. Seconds are the request's
    share of each step.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_emitted_tokens: int = 0
    num_target_passes: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)
    draft_s: float = 0.0
    target_s: float = 0.0
    verify_s: float = 0.0
    host_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float | None = None
    total_s: float = 0.0

    @property
    def tokens_per_target_pass(self) -> float:
        return self.num_emitted_tokens / self.num_target_passes if self.num_target_passes else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        return [a / d for a, d in zip(self.accepted_per_position, self.drafted_per_position, strict=True)]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """The generated part of a request so far."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What the user gets for a request, shaped as in vLLM, plus the metrics and the numerics contract."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    contract: str
