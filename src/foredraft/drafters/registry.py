"""The drafters by method name. A new method is one line here and one file beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters.base import Drafter
from foredraft.drafters.combined import CombinedDrafter
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.draft_tree import DraftTreeDrafter
from foredraft.drafters.ngram import NGramDrafter
from foredraft.drafters.none import NoDrafter
from foredraft.drafters.other_vocabulary import SharedVocabularyDrafter, TextAlignmentDrafter
from foredraft.drafters.prediction import PredictionDrafter
from foredraft.drafters.response_store import ResponseStore
from foredraft.drafters.suffix import SuffixDrafter, SuffixRule
from foredraft.drafters.token_text import TokenText
from foredraft.drafters.vocabulary import check_same_vocabulary, vocabulary_name
from foredraft.target.forward import TargetModel
from foredraft.target.load import load_target

Build = Callable[[SpeculativeConfig, EngineConfig, TargetModel, Any], Drafter]


def _draft_model(speculative: SpeculativeConfig, config: EngineConfig, target: TargetModel, tokenizer: Any) -> Drafter:
    assert speculative.model is not None
    if speculative.use_heterogeneous_vocab:
        return _other_vocabulary(speculative.model, speculative.heterogeneous_vocab_method, config, target, tokenizer)
    draft, loaded = load_target(speculative.model, config)
    check_same_vocabulary(tokenizer, loaded.tokenizer, target.vocab_size, draft.vocab_size, speculative.model)
    drafter: Drafter
    if speculative.tree_width == 1:
        drafter = DraftModelDrafter(draft, target.vocab_size)
    else:
        depth = speculative.tree_depth or max(2, speculative.draft_limit("draft_model") // speculative.tree_width)
        drafter = DraftTreeDrafter(draft, target.vocab_size, speculative.tree_width, depth)
    drafter.cost = draft.num_parameters / target.num_parameters
    return drafter


def _suffix(speculative: SpeculativeConfig, config: EngineConfig, target: TargetModel, tokenizer: Any) -> Drafter:
    depth, kept = speculative.suffix_decoding_max_tree_depth, speculative.suffix_decoding_max_cached_requests
    responses = None
    if kept and speculative.suffix_decoding_store:
        path = Path(speculative.suffix_decoding_store).expanduser()
        responses = ResponseStore(depth, kept, path, vocabulary_name(tokenizer, target.vocab_size))
    elif kept:
        responses = ResponseStore(depth, kept)
    rule = SuffixRule(
        max_spec_factor=speculative.suffix_decoding_max_spec_factor,
        min_token_prob=speculative.suffix_decoding_min_token_prob,
        width=speculative.tree_width,
        depth=speculative.tree_depth,
    )
    return SuffixDrafter(depth, rule, responses)


def _other_vocabulary(name: str, method: str, config: EngineConfig, target: TargetModel, tokenizer: Any) -> Drafter:
    """The limit of the target's length counts the target's tokens; the draft model keeps to its own."""
    draft, loaded = load_target(name, replace(config, max_model_len=None))
    target_text = TokenText(tokenizer, target.vocab_size, config.model)
    draft_text = TokenText(loaded.tokenizer, draft.vocab_size, name)
    kind = SharedVocabularyDrafter if method == "tli" else TextAlignmentDrafter
    drafter = kind(draft, target_text, draft_text)
    drafter.cost = draft.num_parameters / target.num_parameters
    return drafter


DRAFTERS: dict[str, Build] = {
    "none": lambda speculative, config, target, tokenizer: NoDrafter(),
    "ngram": lambda speculative, config, target, tokenizer: NGramDrafter(
        speculative.prompt_lookup_min, speculative.prompt_lookup_max
    ),
    "suffix": _suffix,
    "prediction": lambda speculative, config, target, tokenizer: PredictionDrafter(),
    "draft_model": _draft_model,
}


def make_drafter(speculative: SpeculativeConfig, config: EngineConfig, target: TargetModel, tokenizer: Any) -> Drafter:
    """Build the drafter of a configuration, or the combination of several.

    Raises:
        IncompatibleDrafterError: it does not fit the target.
    """
    sources = [DRAFTERS[method](speculative, config, target, tokenizer) for method in speculative.methods]
    if len(sources) == 1:
        return sources[0]
    return CombinedDrafter(sources, [speculative.draft_limit(method) for method in speculative.methods])
