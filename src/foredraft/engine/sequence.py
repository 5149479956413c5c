"""A request under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from foredraft.engine.detokenize import Detokenizer
from foredraft.sampling import SamplingRow, TokenCounts
from foredraft.types import FinishReason, Logprob, Request, RequestMetrics


@dataclass(slots=True, kw_only=True)
class Sequence:
    """State of one request. The engine fills in the fields with defaults as it goes.

    Attributes:
        sequence_id: unique within the engine.
        token_ids: prompt and emitted tokens; the caches hold a prefix of them.
        noise_seed: the request's seed, or a random one.
        rule: name of the acceptance rule.
        max_len: ``token_ids`` never grows longer.
        stop_ids: tokens that end the output.
        max_draft_tokens: most draft tokens of a step.
        admitted_s: clock when it first began to run; finished when ``finish_reason`` is set.
    """

    sequence_id: int
    request: Request
    token_ids: list[int]
    noise_seed: int
    rule: str
    max_len: int
    stop_ids: tuple[int, ...]
    detokenizer: Detokenizer
    counts: TokenCounts | None
    arrived_s: float
    max_draft_tokens: int
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    admitted_s: float | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def order(self) -> tuple[int, int]:
        """By priority, then by arrival."""
        return self.request.priority, self.sequence_id

    @property
    def draft_limit(self) -> int:
        """Draft tokens that make sense now: verification always adds one more."""
        return max(0, min(self.max_draft_tokens, self.max_len - len(self.token_ids) - 1))

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_len - len(self.token_ids)

    def sampling_row(self, draft_prefix: tuple[int, ...] = ()) -> SamplingRow:
        """What the sampling pipeline needs for the token after ``draft_prefix``."""
        return SamplingRow(
            params=self.request.params,
            num_output_tokens=self.num_output_tokens + len(draft_prefix),
            counts=self.counts,
            draft_prefix=draft_prefix,
            stop_ids=self.stop_ids,
        )
