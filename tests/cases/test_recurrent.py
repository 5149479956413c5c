"""Public bug reports as acceptance cases: targets whose state cannot be rewound (O16)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, MambaConfig, MambaForCausalLM

from foredraft.drafters.draft_tree import DraftTreeDrafter
from foredraft.errors import IncompatibleDrafterError, UnsupportedModelError
from foredraft.target import states
from foredraft.testing import (
    OracleDrafter,
    engine_for,
    random_model,
    reference,
    run,
    target_for,
    tiny_mamba,
    tiny_model,
)
from foredraft.types import SamplingParams

PROMPT = [1, 2, 3]
GREEDY = SamplingParams(temperature=0, max_tokens=30)


def mamba() -> Any:
    config = MambaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, initializer_range=0.3, max_position_embeddings=128
    )
    return random_model(MambaForCausalLM, config, 0)


MODELS: dict[str, Callable[[], Any]] = {"mamba": mamba, "mamba2": tiny_mamba}


def draft_wrongly(model: Any, expected: list[int], target: Any) -> Any:
    """Three wrong tokens in every round."""
    oracle = OracleDrafter([[*PROMPT, *expected]], vocab_size=64, num_right=0)
    (sequence,) = run(engine_for(target, oracle, num_speculative_tokens=3), [PROMPT], GREEDY)
    return sequence


@pytest.mark.parametrize("name", MODELS)
def test_o16_rejected_drafts_leave_no_trace_in_a_state(name: str):
    model = MODELS[name]()
    expected = reference(model, PROMPT, GREEDY).token_ids
    sequence = draft_wrongly(model, expected, target_for(model))
    assert sequence.output_token_ids == expected
    assert sequence.metrics.num_accepted_tokens == 0
    assert sequence.metrics.num_draft_tokens > 60


@pytest.mark.parametrize("name", MODELS)
def test_o16_without_the_copy_the_output_would_be_wrong(name: str, monkeypatch: pytest.MonkeyPatch):
    """The fault as reported: no error and other tokens. So the case above puts the copy to the test."""
    model = MODELS[name]()
    expected = reference(model, PROMPT, GREEDY).token_ids
    target = target_for(model)
    monkeypatch.setattr(states, "copy_state", lambda cache: cache)
    assert draft_wrongly(model, expected, target).output_token_ids != expected


class ClaimsToCrop(DynamicCache):  # type: ignore[misc]
    """Says that it can be cropped, and does nothing when it is."""

    is_croppable = True

    def crop(self, tokens_to_remove: int) -> None:
        pass


class ClaimsToCopy(ClaimsToCrop):
    """A copy of it is the thing itself."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ClaimsToCopy:
        return self


def with_cache(kind: type[DynamicCache]) -> Any:
    """A tiny Mamba 2 that brings a cache of its own."""

    class OwnCache(type(tiny_mamba())):  # type: ignore[misc]
        @classmethod
        def _supports_default_dynamic_cache(cls) -> bool:
            return False

        def forward(self, input_ids: torch.Tensor, cache: Any = None, use_cache: bool = False) -> Any:
            if use_cache and cache is None:
                cache = kind(config=self.config)
            return super().forward(input_ids=input_ids, cache=cache, use_cache=use_cache)

    return random_model(OwnCache, tiny_mamba().config, 0)


def test_o16_a_cache_that_ignores_crop_is_not_trusted():
    """Nothing relies on what a cache says of itself: the output is right all the same."""
    model = with_cache(ClaimsToCrop)
    expected = reference(model, PROMPT, GREEDY).token_ids
    target = target_for(model)
    assert draft_wrongly(model, expected, target).output_token_ids == expected
    target.slots.open(0)
    target.prefill(0, PROMPT)
    assert type(target.slots.cache(0)[0]) is ClaimsToCrop  # type: ignore[attr-defined]


def test_o16_a_cache_that_cannot_be_restored_is_noticed():
    with pytest.raises(UnsupportedModelError, match=r"OwnCache \(mamba2, layers of linear_attention\) .*from a copy"):
        target_for(with_cache(ClaimsToCopy))


def test_o16_trees_are_refused_when_the_engine_is_built():
    """A state cannot branch: neither a target nor a draft model of this kind takes a tree."""
    drafter = DraftTreeDrafter(target_for(tiny_model()), 64, width=2, depth=2)
    with pytest.raises(
        IncompatibleDrafterError, match="DraftTreeDrafter needs verification of trees.*Mamba2ForCausalLM"
    ):
        engine_for(tiny_mamba(), drafter)
    with pytest.raises(IncompatibleDrafterError, match=r"Mamba2ForCausalLM .*cannot draft trees; use tree_width=1"):
        DraftTreeDrafter(target_for(tiny_mamba()), 64, width=2, depth=2)
