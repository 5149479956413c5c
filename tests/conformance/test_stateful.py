"""Models whose state cannot be cut: float32 output equals transformers' own ``generate``, or they are refused by name.

Ragged batches with plain decoding, n-gram drafts and half-right ones, so that states are restored again and again;
prompts are fed in chunks in one of the runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf

from foredraft.drafters import Drafter
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.ngram import NGramDrafter
from foredraft.errors import UnsupportedModelError
from foredraft.target.kinds import ATTENTION, REFUSED, REPLAYED, STEPPED
from foredraft.target.stateful import StatefulModel
from foredraft.testing import (
    Models,
    OracleDrafter,
    Totals,
    check_caches,
    check_drafter,
    check_interface,
    check_tokens,
    engine_for,
    noisy_copy,
    reference,
    run,
    target_for,
    tiny_mamba,
)
from foredraft.types import SamplingParams

from . import test_architectures, test_more_architectures
from .stateful_configs import CONFIGS, MAX_LEN, NOT_CONTINUED, VOCAB, make_model

NUM_TOKENS = 24
PROMPTS = [[9], [5, 6, 7, 5, 6, 7, 5], [(i * 17 + 3) % VOCAB for i in range(21)]]
QUICK = {"mamba2", "qwen3_next", "qwen3_5_text", "lfm2", "jamba"}
"""Run by default; the other kinds take two minutes together."""
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]


@pytest.mark.parametrize("name", NAMES)
def test_output_equals_generate(name: str):
    model = make_model(CONFIGS[name]())
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        expected.append(out[0, len(prompt) :].tolist())
    assert len({token for out in expected for token in out}) > 6, "too uniform to show anything"
    target = target_for(model, max_model_len=MAX_LEN)
    assert isinstance(target, StatefulModel)
    assert target.single_steps == (name in STEPPED)
    texts = [prompt + out for prompt, out in zip(PROMPTS, expected, strict=True)]
    drafters: list[Drafter | None] = [None, NGramDrafter(1, 3), OracleDrafter(texts, VOCAB, lambda length: length % 4)]
    for drafter, budget in zip(drafters, (1024, 1024, 12), strict=True):
        engine = engine_for(target, drafter, max_num_batched_tokens=budget)
        sequences = run(engine, PROMPTS, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
        assert [s.output_token_ids for s in sequences] == expected
        assert target.slots.num_open == 0
    accepted = sum(s.metrics.num_accepted_tokens for s in sequences)
    assert 0 < accepted < sum(s.metrics.num_draft_tokens for s in sequences)


def stateful_models(kind: str) -> Models:
    model = tiny_mamba(3, context=0.2) if kind == "mamba2" else make_model(CONFIGS[kind](), seed=1)
    return Models(model, noisy_copy(model, 0.08))


@pytest.mark.parametrize("mode", ["greedy", "temperature", "top-k"])
def test_ragged_batches_of_a_recurrent_target(mode: str):
    """n-gram drafts; seeded rows equal plain decoding with the same seed."""
    totals, models = Totals(), stateful_models("mamba2")
    check_tokens(lambda target, draft: NGramDrafter(1, 4), "auto", mode, 5, totals=totals, models=models)
    totals.check_not_vacuous()


def test_the_states_follow_the_text():
    """After every step each cache holds the state of a prefix of the text, and a request leaves nothing behind."""
    check_interface(lambda target, draft: NGramDrafter(1, 4), models=stateful_models("mamba2"))


@pytest.mark.slow  # minutes each
def test_the_whole_suite_on_a_recurrent_target():
    check_drafter(lambda target, draft: NGramDrafter(1, 4), models=stateful_models("mamba2"))


@pytest.mark.slow  # minutes each
def test_the_whole_suite_on_a_hybrid_target():
    """With a draft model of its own kind: the output is too varied for n-grams."""
    check_drafter(
        lambda target, draft: DraftModelDrafter(target_for(draft), VOCAB), models=stateful_models("qwen3_5_text")
    )


def test_a_recurrent_draft_model():
    """Its state goes back with the text, in a ragged batch, for a target of the same kind."""
    models = stateful_models("mamba2")
    params = SamplingParams(temperature=0, max_tokens=40)
    expected = [reference(models.target, prompt, params).token_ids for prompt in PROMPTS]
    drafter = DraftModelDrafter(target_for(models.draft), VOCAB)
    engine = engine_for(models.target, drafter)
    sequences = run(engine, PROMPTS, params, after_step=lambda engine, _: check_caches(engine))
    assert [s.output_token_ids for s in sequences] == expected
    assert all(0 < s.metrics.num_accepted_tokens < s.metrics.num_draft_tokens for s in sequences)
    assert drafter.model.slots.num_open == 0


@pytest.mark.parametrize("name", NOT_CONTINUED)
def test_two_formulas_are_refused(name: str):
    """The message names class, kind, layers, the reason and by how much; without the limit the model runs."""
    with pytest.raises(
        UnsupportedModelError, match=rf"\({name}, layers of .*token by token.*time_step_min.*limit 3e-04"
    ):
        target_for(make_model(NOT_CONTINUED[name]()), max_model_len=MAX_LEN)
    model = make_model(NOT_CONTINUED[name](time_step_min=1e-9))
    assert isinstance(target_for(model, max_model_len=MAX_LEN), StatefulModel)


def test_a_state_in_the_modules_is_refused():
    config = tf.RecurrentGemmaConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=2, attention_window_size=8, block_types=("recurrent", "attention"),
        w_init_variance_scale=1.0,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match=r"RecurrentGemmaForCausalLM .*restored from a copy.*own modules"):
        target_for(make_model(config), max_model_len=MAX_LEN)


def test_layers_that_a_short_text_does_not_test_are_refused():
    config = tf.DeepseekV4Config(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16, q_lora_rank=16,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, sliding_window=8, o_groups=2,
        o_lora_rank=16, index_n_heads=2, index_head_dim=16, index_topk=4, hc_mult=2,
    )  # fmt: skip
    with pytest.raises(
        UnsupportedModelError, match=r"DeepseekV4ForCausalLM .*heavily_compressed_attention.*not proved"
    ):
        target_for(make_model(config), max_model_len=MAX_LEN)


def test_what_is_listed_is_tested():
    """`foredraft env --models` shows what these files prove, no more and no less."""
    assert {*REPLAYED, *STEPPED} == set(CONFIGS)
    assert all(make().model_type == name for name, make in CONFIGS.items())
    attention = [*test_architectures.CONFIGS.values(), *(make() for make in test_more_architectures.EXACT.values())]
    assert set(ATTENTION) == {config.model_type for config in attention}
    refused = {make().model_type for make, _ in test_more_architectures.REFUSED.values()}
    sometimes = {"falcon", "gemma3_text"}  # with alibi, with attention in both directions
    assert refused - sometimes <= set(REFUSED)
    assert not set(REFUSED) & {*ATTENTION, *REPLAYED, *STEPPED}


def test_every_model_that_transformers_calls_stateful_is_listed():
    """Those whose assisted generation transformers refuses: each is run, or refused with a reason."""
    folder = Path(tf.__file__).parent / "models"
    stateful = {
        file.parent.name
        for file in folder.glob("*/modeling_*.py")
        if "_is_stateful = True" in file.read_text(encoding="utf-8")
    }
    listed = {name.removesuffix("_text") for name in (*REPLAYED, *STEPPED, *REFUSED)}
    assert len(stateful) > 20
    assert stateful <= listed
