"""The drafters by method name. A new method is one line here and one file beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters.base import Drafter
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.draft_tree import DraftTreeDrafter
from foredraft.drafters.ngram import NGramDrafter
from foredraft.drafters.none import NoDrafter
from foredraft.drafters.other_vocabulary import SharedVocabularyDrafter, TextAlignmentDrafter
from foredraft.drafters.token_text import TokenText
from foredraft.drafters.vocabulary import check_same_vocabulary
from foredraft.target.forward import TargetModel
from foredraft.target.load import load_target

Build = Callable[[SpeculativeConfig, EngineConfig, TargetModel, Any], Drafter]


def _draft_model(speculative: SpeculativeConfig, config: EngineConfig, target: TargetModel, tokenizer: Any) -> Drafter:
    assert speculative.model is not None
    if speculative.use_heterogeneous_vocab:
        return _other_vocabulary(speculative.model, speculative.heterogeneous_vocab_method, config, target, tokenizer)
    draft, loaded = load_target(speculative.model, config)
    check_same_vocabulary(tokenizer, loaded.tokenizer, target.vocab_size, draft.vocab_size, speculative.model)
    if speculative.tree_width == 1:
        return DraftModelDrafter(draft, target.vocab_size)
    depth = speculative.tree_depth or max(2, speculative.max_draft_tokens // speculative.tree_width)
    return DraftTreeDrafter(draft, target.vocab_size, speculative.tree_width, depth)


def _other_vocabulary(name: str, method: str, config: EngineConfig, target: TargetModel, tokenizer: Any) -> Drafter:
    """The limit of the target's length counts the target's tokens; the draft model keeps to its own."""
    draft, loaded = load_target(name, replace(config, max_model_len=None))
    target_text = TokenText(tokenizer, target.vocab_size, config.model)
    draft_text = TokenText(loaded.tokenizer, draft.vocab_size, name)
    kind = SharedVocabularyDrafter if method == "tli" else TextAlignmentDrafter
    return kind(draft, target_text, draft_text)


DRAFTERS: dict[str, Build] = {
    "none": lambda speculative, config, target, tokenizer: NoDrafter(),
    "ngram": lambda speculative, config, target, tokenizer: NGramDrafter(
        speculative.prompt_lookup_min, speculative.prompt_lookup_max
    ),
    "draft_model": _draft_model,
}


def make_drafter(speculative: SpeculativeConfig, config: EngineConfig, target: TargetModel, tokenizer: Any) -> Drafter:
    """Build the drafter of a configuration.

    Raises:
        IncompatibleDrafterError: it does not fit the target.
    """
    return DRAFTERS[speculative.method](speculative, config, target, tokenizer)
