"""The target drafts with some of its layers, in its own slots: same tokens, nothing left behind."""

from __future__ import annotations

import pytest
import torch

from foredraft.drafters.early_exit import EarlyExitDrafter
from foredraft.drafters.layer_skip import LayerSkipDrafter
from foredraft.drafters.sparse_kv import SparseKVDrafter
from foredraft.errors import InvalidOptionError
from foredraft.testing import RecordingDrafter, check_caches, engine_for, reference, run, target_for, tiny_model
from foredraft.types import SamplingParams

PROMPTS = [[1, 2, 3], [10], list(range(20, 57)), [5, 6] * 5]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
DRAFTERS = {
    "early_exit": lambda target: EarlyExitDrafter(target, 2),
    "layer_skip": lambda target: LayerSkipDrafter(target, [1]),
    "sparse_kv": lambda target: SparseKVDrafter(target, 12, 1, "window"),
    "snapkv": lambda target: SparseKVDrafter(target, 12, 1, "snapkv"),
}


@pytest.fixture(scope="module")
def model():
    return tiny_model(2, context=0.05, num_hidden_layers=4)


@pytest.fixture(params=DRAFTERS)
def make(request):
    return DRAFTERS[request.param]


@pytest.fixture(scope="module")
def plain(model):
    """The tokens of plain decoding, by the seed."""
    params = {None: GREEDY, 3: SamplingParams(seed=3, max_tokens=24)}
    return {seed: (p, [reference(model, prompt, p).token_ids for prompt in PROMPTS]) for seed, p in params.items()}


SHORTEST_AND_LONGEST = [
    pytest.param(1, None, marks=pytest.mark.slow), (1, 3), (8, None), pytest.param(8, 3, marks=pytest.mark.slow)
]  # fmt: skip
"""By default the one sampled and the other greedy."""


@pytest.mark.parametrize(("k", "seed"), [(3, None), (3, 3), *SHORTEST_AND_LONGEST])
def test_tokens_are_those_of_plain_decoding(model, plain, make, k, seed):
    """Ragged batch, greedy and sampled with a seed; caches right after every step, drafts judged both ways."""
    params, expected = plain[seed]
    target = target_for(model)
    drafter = make(target)
    engine = engine_for(target, drafter, num_speculative_tokens=k)
    sequences = run(engine, PROMPTS, params, after_step=lambda engine, _: check_caches(engine))
    assert [s.output_token_ids for s in sequences] == expected
    accepted, total = (sum(getattr(s.metrics, f"num_{n}_tokens") for s in sequences) for n in ("accepted", "draft"))
    assert 0 < accepted < total
    assert target.slots.num_open == drafter._slots.num_open == 0
    assert not target.slots.scratch_of


@pytest.mark.parametrize("seed", [None, 3])
def test_bits_are_those_of_plain_decoding_in_bf16(model, make, seed):
    """On the native kernels; log-probabilities too, to the last bit."""
    target = target_for(model, dtype=torch.bfloat16)
    if target.native is None:
        pytest.skip("needs AVX512-BF16 and a C++ compiler")
    params = SamplingParams(temperature=0 if seed is None else 1, seed=seed, max_tokens=40, logprobs=3)
    plain = run(engine_for(target), PROMPTS, params)
    drafted = run(engine_for(target, make(target), num_speculative_tokens=4), PROMPTS, params)
    assert [s.output_token_ids for s in drafted] == [s.output_token_ids for s in plain]
    assert [s.logprobs for s in drafted] == [s.logprobs for s in plain]
    assert sum(s.metrics.num_accepted_tokens for s in drafted) > 0


def test_the_step_that_ends_a_prompt_drafts_nothing(model, make):
    """The prompt's end is not in the cache before that step; a prompt of one token has no such step."""
    target = target_for(model)
    recorder = RecordingDrafter(make(target))
    run(engine_for(target, recorder), PROMPTS[:3], GREEDY)
    assert [row.sequence_id for row in recorder.rows[0]] == [0, 1, 2]
    assert recorder.widths[:2] == [[0, 4, 0], [4, 4, 4]]


def test_drafts_end_at_the_last_position(model, make):
    """Nothing is drafted for places that the model does not have."""
    target = target_for(model, max_model_len=45)
    recorder = RecordingDrafter(make(target))
    (sequence,) = run(engine_for(target, recorder, num_speculative_tokens=6), [PROMPTS[2]], GREEDY)
    expected = reference(model, PROMPTS[2], SamplingParams(temperature=0, max_tokens=8))
    assert sequence.output_token_ids == expected.token_ids
    assert recorder.widths[1] == [6]


def test_two_ways_of_drafting_take_turns(model, plain):
    """Early exit and layer skipping write into the same places; each step uses the one that drafted last."""
    target = target_for(model)
    first, second = EarlyExitDrafter(target, 2), LayerSkipDrafter(target, [1])

    class Both(RecordingDrafter):
        def propose(self, rows):
            first.propose(rows)
            return super().propose(rows)

    for inner in (first, second):
        sequences = run(engine_for(target, Both(inner)), PROMPTS, GREEDY)
        assert [s.output_token_ids for s in sequences] == plain[None][1]


@pytest.mark.parametrize("skipped", [[], [4], [0, 1, 2, 3]])
def test_layers_to_skip_must_be_some_of_the_models(model, skipped):
    with pytest.raises(InvalidOptionError, match="some, but not all, of the layers 0 to 3 of LlamaForCausalLM"):
        LayerSkipDrafter(target_for(model), skipped)
