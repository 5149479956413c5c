"""From logits to tokens: filters, the one pipeline, keyed noise, draws and log-probabilities."""

from foredraft.sampling.draw import likeliest_tokens, most_likely_tokens, sample_gumbel, sample_inverse_cdf
from foredraft.sampling.logprobs import top_logprobs
from foredraft.sampling.noise import Stream, gumbel, round_position, uniform
from foredraft.sampling.pipeline import (
    SamplingRow,
    TokenCounts,
    adjust_logits,
    check_token_ids,
    has_filters,
    may_change_argmax,
    needs_counts,
    probs_from_logits,
)

__all__ = [
    "SamplingRow",
    "Stream",
    "TokenCounts",
    "adjust_logits",
    "check_token_ids",
    "gumbel",
    "has_filters",
    "likeliest_tokens",
    "may_change_argmax",
    "most_likely_tokens",
    "needs_counts",
    "probs_from_logits",
    "round_position",
    "sample_gumbel",
    "sample_inverse_cdf",
    "top_logprobs",
    "uniform",
]
