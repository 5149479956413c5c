"""Loads the draft model of a configuration and puts the drafter around it that fits its vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters.base import Drafter
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.draft_tree import DraftTreeDrafter
from foredraft.drafters.other_vocabulary import SharedVocabularyDrafter, TextAlignmentDrafter
from foredraft.drafters.token_text import TokenText
from foredraft.drafters.vocabulary import check_same_vocabulary
from foredraft.target.forward import TargetModel
from foredraft.target.load import load_target


def build(speculative: SpeculativeConfig, config: EngineConfig, target: TargetModel, tokenizer: Any) -> Drafter:
    assert speculative.model is not None
    if speculative.use_heterogeneous_vocab:
        return _other_vocabulary(speculative.model, speculative.heterogeneous_vocab_method, config, target, tokenizer)
    draft, loaded = load_target(speculative.model, config)
    check_same_vocabulary(tokenizer, loaded.tokenizer, target.vocab_size, draft.vocab_size, speculative.model)
    drafter: Drafter
    if speculative.tree_width == 1:
        drafter = DraftModelDrafter(draft, target.vocab_size)
    else:
        depth = speculative.depth_of_tree("draft_model")
        drafter = DraftTreeDrafter(draft, target.vocab_size, speculative.tree_width, depth, speculative.tree_beam)
    drafter.cost = draft.num_parameters / target.num_parameters
    return drafter


def _other_vocabulary(name: str, method: str, config: EngineConfig, target: TargetModel, tokenizer: Any) -> Drafter:
    """The limit of the target's length counts the target's tokens; the draft model keeps to its own."""
    draft, loaded = load_target(name, replace(config, max_model_len=None))
    target_text = TokenText(tokenizer, target.vocab_size, config.model)
    draft_text = TokenText(loaded.tokenizer, draft.vocab_size, name)
    kind = SharedVocabularyDrafter if method == "tli" else TextAlignmentDrafter
    drafter = kind(draft, target_text, draft_text)
    drafter.cost = draft.num_parameters / target.num_parameters
    return drafter
