"""KV: targets with sliding-window layers, drafted before, at and after the edge of the window."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM

from foredraft import Engine, SamplingParams
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.testing import (
    RecordingDrafter,
    check_caches,
    engine_for,
    noisy_copy,
    random_model,
    reference,
    run,
    target_for,
)
from foredraft.types import StepOutput

WINDOW = 8
PROMPT_LENGTHS = (3, 6, 7, 8, 9, 20)
PROMPTS = [[(17 * place + 5 * length + 3) % 64 for place in range(length)] for length in PROMPT_LENGTHS]
PARAMS = SamplingParams(temperature=0, max_tokens=40)
COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "sliding_window": WINDOW,
    "attn_implementation": "eager",
}
SEED = 0
KINDS = {
    "mistral": (MistralForCausalLM, MistralConfig(**COMMON)),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **COMMON, head_dim=16, query_pre_attn_scalar=16, layer_types=["sliding_attention", "full_attention"]
        ),
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    return random_model(*KINDS[request.param], SEED)


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    """Of the whole text through the model for every token, with the mask of its window."""
    return [reference(model, prompt, PARAMS).token_ids for prompt in PROMPTS]


@pytest.mark.parametrize(("packed", "k"), [(True, 1), (True, 3), (True, 5), (False, 3)])
def test_o14_drafts_across_the_window(model: Any, expected: list[list[int]], packed: bool, k: int):
    """In one batch, so that rows stand on both sides of the edge; target and draft model both have the window."""
    drafter = RecordingDrafter(DraftModelDrafter(target_for(noisy_copy(model), packed=packed), 64))
    engine = engine_for(target_for(model, packed=packed), drafter, num_speculative_tokens=k)
    full, cut = [], []

    def note(engine: Engine, outputs: Sequence[StepOutput]) -> None:
        for row, drafted, out in zip(drafter.rows[-1], drafter.widths[-1], outputs, strict=True):
            accepted, before = len(out.token_ids) - 1, len(row.token_ids) - len(out.token_ids)
            if drafted and before >= WINDOW:
                (full if accepted == drafted else cut).append(before)
        if packed and k == 5:
            check_caches(engine)

    sequences = run(engine, PROMPTS, PARAMS, after_step=note)
    assert [s.output_token_ids for s in sequences] == expected
    assert len(full) > 3
    assert len(cut) > 3


def test_o14_each_length_alone(model: Any, expected: list[list[int]]):
    """A prompt that fills the window, or one token more or less, has the batch to itself."""
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        engine = engine_for(model, DraftModelDrafter(target_for(noisy_copy(model)), 64), num_speculative_tokens=3)
        (sequence,) = run(engine, [prompt], PARAMS)
        assert sequence.output_token_ids == tokens


def test_o14_the_window_decides(model: Any, expected: list[list[int]]):
    """With a wider window the same weights say something else, so a wrong mask would show above."""
    wide = copy.deepcopy(model.config)
    wide.sliding_window = 128
    other = random_model(type(model), wide, SEED)
    assert [reference(other, prompt, PARAMS).token_ids for prompt in PROMPTS] != expected
