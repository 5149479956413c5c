"""Pass times of a tiny model, the table fitted to them, and an engine whose draft lengths come from them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters.ngram import NGramDrafter
from foredraft.engine.profile import (
    BATCHES,
    NUM_TOKENS,
    PassSample,
    fit_table,
    make_policy,
    measure_pass_samples,
    settle_pass_samples,
)
from foredraft.policy import GoodputPolicy, PassTable, StepCost
from foredraft.testing import engine_for, reference, run, target_for, tiny_model
from foredraft.types import SamplingParams

TABLE = PassTable(NUM_TOKENS, tuple(0.01 + 5e-4 * max(0, n - 8) for n in NUM_TOKENS), 2e-6, 5e-7, 1e-4)


@pytest.fixture(scope="module")
def model():
    return tiny_model(3)


@pytest.mark.parametrize("max_model_len", [24, 200, 2000])
def test_samples_cover_rows_tokens_and_context_and_leave_the_model_as_it_was(model, max_model_len):
    target = target_for(model, max_model_len=max_model_len)
    told = []
    samples = measure_pass_samples(target, told.append, repeats=2)
    assert told == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert target.slots.num_open == 0
    assert max(sample.num_rows for sample in samples) > 4
    assert max(sample.context_len for sample in samples) > max_model_len // 2 - 8
    table = fit_table(samples)
    assert list(table.seconds) == sorted(table.seconds)
    assert 0 < table.seconds[0] < 1
    assert min(table.key_s, table.pair_s, table.row_s) >= 0


def test_a_slow_model_gets_fewer_rounds(model, monkeypatch):
    monkeypatch.setattr("foredraft.engine.profile.BUDGET_S", 0.0)
    told = []
    measure_pass_samples(target_for(model, max_model_len=100), told.append, repeats=5)
    assert told == pytest.approx([1 / 6, 2 / 6, 3 / 6, 1.0])


def test_the_fit_finds_what_a_row_a_key_and_a_token_cost():
    sizes = [(1, n, 17) for n in NUM_TOKENS] + [(rows, n, 17) for rows, n in BATCHES]
    sizes += [(rows, n, 1025) for rows, n in itertools.product((1, 2), (1, 8))]
    samples = [PassSample(*size, 1.0) for size in sizes]
    samples = [replace(sample, seconds=sample.predicted_s(TABLE)) for sample in samples]
    found = fit_table(samples)
    assert found.seconds == pytest.approx(TABLE.seconds, rel=0.01)
    assert (found.key_s, found.pair_s, found.row_s) == pytest.approx((2e-6, 5e-7, 1e-4), rel=0.05)
    assert found.free_tokens == 8
    unseen = PassSample(32, 3, 300, 0.0)
    assert unseen.predicted_s(found) == pytest.approx(unseen.predicted_s(TABLE), rel=0.01)


def test_samples_are_kept(model, tmp_path, monkeypatch):
    target, config = target_for(model, max_model_len=100), EngineConfig(model="tiny", cache_dir=str(tmp_path))
    first = settle_pass_samples(target, "a", config)
    monkeypatch.setattr("foredraft.engine.profile.measure_pass_samples", None)
    assert settle_pass_samples(target, "a", config) == first
    for other in ({"fingerprint": "b"}, {"fingerprint": "a", "refresh": True}):  # measured anew
        with pytest.raises(TypeError):
            settle_pass_samples(target, config=config, **other)


@pytest.mark.parametrize(("max_passes", "expected"), [(None, 1.5), (2, 0.6), (1, 0.3)])
def test_a_drafters_own_cost_is_the_first_estimate(model, tmp_path, max_passes, expected):
    """Of a draft of five tokens, as a share of a pass."""
    target, config = target_for(model, max_model_len=100), EngineConfig(model="tiny", cache_dir=str(tmp_path))
    drafter = NGramDrafter(1, 4)
    drafter.cost, drafter.max_passes = 0.3, max_passes
    policy = make_policy(SpeculativeConfig(method="ngram", policy="goodput"), drafter, target, "a", config)
    assert isinstance(policy, GoodputPolicy)
    pass_s = fit_table(settle_pass_samples(target, "a", config)).seconds[0]
    seconds = policy.cost.prices(1, 10, 0)
    assert seconds(0, 5, 5, 10) - seconds(0, 0, 0, 10) == pytest.approx(expected * pass_s)


@pytest.mark.parametrize("name", ["fixed", "heuristic", "specdec++", "tiers"])
def test_every_policy_that_needs_no_measurement_is_made_without(model, name):
    speculative = SpeculativeConfig(method="ngram", policy=name)
    policy = make_policy(speculative, NGramDrafter(1, 4), None, "", EngineConfig(model="tiny"))  # type: ignore[arg-type]
    assert type(policy).__name__.lower().startswith(name[:5])


def test_lengths_from_goodput_change_no_token(model):
    """A greedy row and a seeded one."""
    target = target_for(model, max_model_len=200)
    policy = GoodputPolicy(StepCost(fit_table(measure_pass_samples(target, repeats=2))))
    engine = engine_for(target, NGramDrafter(1, 4), num_speculative_tokens=6, policy=policy)
    params = [SamplingParams(temperature=0.0, max_tokens=60), SamplingParams(seed=3, max_tokens=60)]
    prompts = [[7, 8, 9, 10, 7, 8, 9], [3, 5, 3, 5, 3]]
    sequences = run(engine, prompts, params)
    for sequence, prompt, param in zip(sequences, prompts, params, strict=True):
        assert sequence.output_token_ids == reference(model, prompt, param).token_ids
    assert sequences[0].metrics.num_draft_tokens > 0
