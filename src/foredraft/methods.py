"""The drafting methods by name. A new method is a file and a line here (docs/add_a_drafter.md)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """Where a drafter is found, and what is to be known of it without loading it.

    Attributes:
        module: has ``build(speculative_config, engine_config, target, tokenizer)``, which gives the drafter.
        num_speculative_tokens: most draft tokens of a step if the user names no number.
        takes_tree_width: drafts chains, or trees if ``tree_width`` is above 1.
        takes_tree_beam: has ``tree_beam`` too: each level of a tree is a pass of its model.
        takes_model: has a ``model``: a draft model, or a head that was trained for the target.
        target_may_be_model: without one it is looked for in the target's own folder.
        has_confidence: a draft can end at a token that the drafter finds unlikely (policy ``confidence``).
    """

    module: str
    num_speculative_tokens: int
    takes_tree_width: bool = False
    takes_tree_beam: bool = False
    takes_model: bool = False
    target_may_be_model: bool = False
    has_confidence: bool = False


METHODS: dict[str, Method] = {
    "none": Method(module="foredraft.drafters.none", num_speculative_tokens=0),
    "ngram": Method(module="foredraft.drafters.ngram", num_speculative_tokens=7),
    "suffix": Method(module="foredraft.drafters.suffix", num_speculative_tokens=16, takes_tree_width=True),
    "prediction": Method(module="foredraft.drafters.prediction", num_speculative_tokens=16),
    "recycling": Method(module="foredraft.drafters.recycling", num_speculative_tokens=16),
    "lookahead": Method(module="foredraft.drafters.lookahead", num_speculative_tokens=24),
    "draft_model": Method(
        module="foredraft.drafters.load_draft_model",
        num_speculative_tokens=4,
        takes_tree_width=True,
        takes_tree_beam=True,
        takes_model=True,
        has_confidence=True,
    ),
    "eagle3": Method(
        module="foredraft.drafters.eagle3",
        num_speculative_tokens=4,
        takes_tree_width=True,
        takes_tree_beam=True,
        takes_model=True,
    ),
    "eagle": Method(
        module="foredraft.drafters.eagle",
        num_speculative_tokens=4,
        takes_tree_width=True,
        takes_tree_beam=True,
        takes_model=True,
    ),
    "mtp": Method(
        module="foredraft.drafters.mtp",
        num_speculative_tokens=2,
        takes_tree_width=True,
        takes_tree_beam=True,
        takes_model=True,
        target_may_be_model=True,
    ),
    "mlp": Method(module="foredraft.drafters.mlp", num_speculative_tokens=3, takes_tree_width=True, takes_model=True),
    "medusa": Method(
        module="foredraft.drafters.medusa", num_speculative_tokens=4, takes_tree_width=True, takes_model=True
    ),
    "pard": Method(module="foredraft.drafters.pard", num_speculative_tokens=8, takes_tree_width=True, takes_model=True),
    "dflash": Method(
        module="foredraft.drafters.dflash", num_speculative_tokens=7, takes_tree_width=True, takes_model=True
    ),
    "early_exit": Method(module="foredraft.drafters.early_exit", num_speculative_tokens=4, has_confidence=True),
    "layer_skip": Method(module="foredraft.drafters.layer_skip", num_speculative_tokens=4, has_confidence=True),
    "sparse_kv": Method(module="foredraft.drafters.sparse_kv", num_speculative_tokens=4, has_confidence=True),
}
