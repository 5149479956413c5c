"""How many draft tokens the rules accept on the toy language, and what equation 1 makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from foredraft import theory
from foredraft.errors import InvalidOptionError
from foredraft.lab.toy import ToyLanguage
from foredraft.lab.toy_sampling import UniformStream, count_rounds

SEED_DRAFT_LENS = (1, 2, 3, 4, 6, 8)
SEED_NUM_ROUNDS = 50_000
MAX_DRAFT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class DraftLenAcceptance:
    """Counted at one draft length: acceptance rate of judged draft tokens, tokens per target pass, and the
    latter by equation 1 from the former (which takes acceptance to be the same everywhere)."""

    num_draft_tokens: int
    acceptance_rate: float
    tokens_per_target_pass: float
    formula_tokens: float


@dataclass(frozen=True, slots=True)
class ContextAcceptance:
    """Exact acceptance of a draft token after ``token`` by rule, and the bounds of ``coupled`` from TV."""

    token: int
    rejection: float
    match: float
    coupled: float
    coupled_at_least: float
    coupled_at_most: float


def count_acceptance(
    language: ToyLanguage,
    draft_lens: Sequence[int] = SEED_DRAFT_LENS,
    num_rounds: int = SEED_NUM_ROUNDS,
    *,
    progress: Callable[[int], None] = lambda done: None,
) -> Iterator[DraftLenAcceptance]:
    """The seed document's table: one generator of seed 42 through all draft lengths in turn.

    Raises:
        InvalidOptionError: a draft length outside 1..64 (with none, nothing is judged).
    """
    for num_draft_tokens in draft_lens:
        if not 1 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise InvalidOptionError(
                f"num_draft_tokens={num_draft_tokens} is outside [1, {MAX_DRAFT_TOKENS}]; 0 has no acceptance"
            )
    stream = UniformStream(np.random.default_rng(42))
    for num_draft_tokens in draft_lens:
        counted = count_rounds(language, stream, num_rounds, num_draft_tokens)
        progress(1)
        yield DraftLenAcceptance(
            num_draft_tokens=num_draft_tokens,
            acceptance_rate=counted.acceptance_rate,
            tokens_per_target_pass=counted.tokens_per_target_pass,
            formula_tokens=theory.expected_tokens(counted.acceptance_rate, num_draft_tokens),
        )


def acceptance_by_context(language: ToyLanguage) -> list[ContextAcceptance]:
    """Exact acceptances, one entry per preceding token."""
    rows = []
    for token, (target, draft) in enumerate(zip(language.target_probs, language.draft_probs, strict=True)):
        target_probs, draft_probs = target.tolist(), draft.tolist()
        at_least, at_most = theory.coupled_acceptance_bounds(target_probs, draft_probs)
        rows.append(
            ContextAcceptance(
                token=token,
                rejection=theory.rejection_acceptance(target_probs, draft_probs),
                match=theory.match_acceptance(target_probs, draft_probs),
                coupled=theory.coupled_acceptance(target_probs, draft_probs),
                coupled_at_least=at_least,
                coupled_at_most=at_most,
            )
        )
    return rows
