"""Heads on the last state behind a target that goes back to a snapshot after a rejection (Qwen3.5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from foredraft import SamplingParams
from foredraft.drafters.mlp import MlpDrafter
from foredraft.drafters.recurrent_head import make_head_drafter
from foredraft.heads.convention import check_conventions
from foredraft.heads.runner import HeadRunner
from foredraft.target.features import AFTER_NORM, HiddenStates
from foredraft.target.forward import TargetModel
from foredraft.target.layout import PassRow
from foredraft.target.stateful import StatefulModel
from foredraft.testing import (
    RecordingDrafter,
    check_chains,
    engine_for,
    mlp_speculator,
    mtp_head,
    random_model,
    reference,
    run,
    target_for,
)

PROMPTS = ([3, 4, 5], [9], [5, *range(20, 33)])
GREEDY = SamplingParams(temperature=0.0, max_tokens=10)


@pytest.fixture(scope="module")
def hybrid() -> Any:
    config = Qwen3_5TextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16, initializer_range=0.3,
        max_position_embeddings=128, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return random_model(Qwen3_5ForCausalLM, config, seed=0)


@pytest.fixture(scope="module")
def target(hybrid: Any) -> TargetModel:
    return target_for(hybrid)


@pytest.mark.parametrize("kind", ["mtp", pytest.param("mlp", marks=pytest.mark.slow)])  # the states are the same
def test_tokens_that_are_fed_again_bring_their_states_again(hybrid: Any, target: TargetModel, kind: str):
    """Each state is read once; drafts are what unrolling gives, the output is that of plain decoding."""
    head: Any = mtp_head(hybrid, "qwen3_5_text") if kind == "mtp" else mlp_speculator(hybrid)
    assert isinstance(target, StatefulModel)
    recorder: RecordingDrafter
    if kind == "mtp":
        runner = HeadRunner(head, head.config.layer, target)
        recorder = RecordingDrafter(make_head_drafter(runner, (AFTER_NORM,), 64, None, 1, 2))
    else:
        recorder = RecordingDrafter(MlpDrafter(head, target))
    sequences = run(engine_for(target, recorder, num_speculative_tokens=2), PROMPTS, GREEDY)
    assert [s.output_token_ids for s in sequences] == [reference(hybrid, p, GREEDY).token_ids for p in PROMPTS]
    assert check_chains(recorder, hybrid, head) > 20
    assert all(s.metrics.num_accepted_tokens < s.metrics.num_draft_tokens for s in sequences)


def test_only_conventions_whose_states_are_to_be_had_are_compared(hybrid: Any, target: TargetModel):
    def tokenizer(_: str) -> dict[str, list[int]]:
        return {"input_ids": list(range(40))}

    scores = check_conventions(mtp_head(hybrid, "qwen3_5_text"), target, tokenizer, "a head")
    assert list(scores) == ["as read", "mtp_hidden_states_first True", "norm_output False"]
    before_norm = mtp_head(hybrid, "qwen3_5_text", feature_layers=(2,))
    assert check_conventions(before_norm, target, tokenizer, "a head") == {}


def test_states_are_what_the_lm_head_reads(hybrid: Any, target: TargetModel):
    target.tap((AFTER_NORM,))
    target.slots.open(-1)
    wanted = HiddenStates((AFTER_NORM,))
    logits = target.forward([PassRow(-1, list(range(12)), 3, [-1, 0])], wanted)
    target.slots.close(-1)
    states = wanted.of_sequence[-1]
    assert states.shape == (12, 1, 64)
    assert torch.allclose(hybrid.lm_head(states[-3:, 0]), logits, atol=1e-4)
