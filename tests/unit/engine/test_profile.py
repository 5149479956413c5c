"""Pass times of a tiny model, and an engine whose draft lengths come from them."""

from __future__ import annotations

import pytest

from foredraft.config import EngineConfig
from foredraft.drafters.ngram import NGramDrafter
from foredraft.engine.profile import measure_pass_table, settle_pass_table
from foredraft.policy import GoodputPolicy, StepCost
from foredraft.testing import engine_for, reference, run, target_for, tiny_model
from foredraft.types import SamplingParams


@pytest.fixture(scope="module")
def model():
    return tiny_model(3)


@pytest.mark.parametrize("max_model_len", [24, 200, 2000])
def test_a_table_rises_and_leaves_the_model_as_it_was(model, max_model_len):
    target = target_for(model, max_model_len=max_model_len)
    told = []
    table = measure_pass_table(target, told.append, repeats=2)
    assert list(table.num_tokens) == sorted(table.num_tokens)
    assert list(table.seconds) == sorted(table.seconds)
    assert 0 < table.seconds[0] < 1
    assert table.key_s >= 0
    assert table.pair_s >= 0
    assert told == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert target.slots.num_open == 0


def test_the_table_is_kept(model, tmp_path, monkeypatch):
    target, config = target_for(model, max_model_len=100), EngineConfig(model="tiny", cache_dir=str(tmp_path))
    first = settle_pass_table(target, "a", config)
    monkeypatch.setattr("foredraft.engine.profile.measure_pass_table", None)
    assert settle_pass_table(target, "a", config) == first
    with pytest.raises(TypeError):  # another model is measured anew
        settle_pass_table(target, "b", config)


def test_lengths_from_goodput_change_no_token(model):
    """A greedy row and a seeded one."""
    target = target_for(model, max_model_len=200)
    policy = GoodputPolicy(StepCost(measure_pass_table(target, repeats=2)))
    engine = engine_for(target, NGramDrafter(1, 4), num_speculative_tokens=6, policy=policy)
    params = [SamplingParams(temperature=0.0, max_tokens=60), SamplingParams(seed=3, max_tokens=60)]
    prompts = [[7, 8, 9, 10, 7, 8, 9], [3, 5, 3, 5, 3]]
    sequences = run(engine, prompts, params)
    for sequence, prompt, param in zip(sequences, prompts, params, strict=True):
        assert sequence.output_token_ids == reference(model, prompt, param).token_ids
    assert sequences[0].metrics.num_draft_tokens > 0
