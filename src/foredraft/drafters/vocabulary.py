"""Whether two models speak of the same tokens: compared by content, not only by size."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

from foredraft.errors import IncompatibleDrafterError

_REMEDY = "use a draft model of the same family, or the option use_heterogeneous_vocab=True"


def check_same_vocabulary(
    target_tokenizer: Any, draft_tokenizer: Any, target_size: int, draft_size: int, draft_name: str
) -> None:
    """Raise unless the draft model's token ids mean what the target's mean.

    Embeddings may be padded to different sizes; every id that either tokenizer knows must agree.

    Raises:
        IncompatibleDrafterError: names the first id that differs, with both strings.
    """
    if target_tokenizer is None or draft_tokenizer is None:
        if target_size != draft_size:
            raise IncompatibleDrafterError(
                f"draft model {draft_name} has {draft_size} tokens and the target {target_size}, and there is no "
                "tokenizer to compare them by; give both models a tokenizer"
            )
        warnings.warn(
            f"no tokenizer to compare draft model {draft_name} by; only the vocabulary size was checked",
            stacklevel=2,
        )
        return
    target = {index: token for token, index in target_tokenizer.get_vocab().items()}
    draft = {index: token for token, index in draft_tokenizer.get_vocab().items()}
    for index in sorted(target.keys() | draft.keys()):
        if target.get(index) != draft.get(index):
            raise IncompatibleDrafterError(
                f"draft model {draft_name} has another vocabulary: token id {index} is {draft.get(index)!r} there "
                f"and {target.get(index)!r} in the target; {_REMEDY}"
            )
    if target_tokenizer.eos_token_id != draft_tokenizer.eos_token_id:
        raise IncompatibleDrafterError(
            f"draft model {draft_name} ends texts with token id {draft_tokenizer.eos_token_id}, the target with "
            f"{target_tokenizer.eos_token_id}; {_REMEDY}"
        )


def vocabulary_name(tokenizer: Any, vocab_size: int) -> str:
    """The same for the same tokens: their number, and a hash of their strings if there is a tokenizer."""
    if tokenizer is None:
        return f"{vocab_size} tokens"
    tokens = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return f"{vocab_size} tokens, {hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]}"
