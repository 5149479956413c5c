"""The loop: whatever the batch, the limits and the drafts, each request gets the tokens of plain decoding."""

from __future__ import annotations

import re

import pytest
import torch

from foredraft.drafters.ngram import NGramDrafter
from foredraft.errors import RequestError
from foredraft.testing import OracleDrafter, check_caches, engine_for, reference, run, target_for, tiny_model
from foredraft.types import FinishReason, Request, SamplingParams

PROMPTS = [[1, 2, 3], [10], [7, 8, 9, 10, 7, 8], list(range(20, 37)), [5] * 9]
GREEDY = SamplingParams(temperature=0, max_tokens=14)


@pytest.fixture(scope="module")
def model():
    return tiny_model(3, context=0.05)


@pytest.fixture(scope="module")
def target(model):
    return target_for(model)


@pytest.fixture(scope="module")
def plain(model):
    return [reference(model, prompt, GREEDY).token_ids for prompt in PROMPTS]


def half_right(plain):
    """Drafts of which as many are right as the length of the text says: 0 to 4."""
    return OracleDrafter([p + o for p, o in zip(PROMPTS, plain, strict=True)], 64, lambda n: n % 5)


def check_empty(engine):
    """Nothing of a finished request is left anywhere."""
    assert not engine.sequences
    assert not engine.has_unfinished_requests
    assert engine.target.slots.num_open == 0


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 1024])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 64])
def test_limits_do_not_change_tokens(target, plain, budget, max_num_seqs):
    """Prompts in chunks of one token, one sequence at a time: the same tokens, and no more than the limits."""
    engine = engine_for(target, half_right(plain), max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)

    def within_limits(engine, outputs):
        assert len(engine.scheduler.running) <= max_num_seqs
        assert engine.target.slots.num_open <= max_num_seqs
        assert len(outputs) <= min(max_num_seqs, budget)

    num_fed = []
    engine.watchers.append(lambda sequences, draft, *_: num_fed.append(len(sequences) + sum(draft.num_draft_tokens)))
    sequences = run(engine, PROMPTS, GREEDY, after_step=within_limits)
    assert [s.output_token_ids for s in sequences] == plain
    assert max(num_fed) <= budget
    accepted = sum(s.metrics.num_accepted_tokens for s in sequences)
    assert 0 < accepted < sum(s.metrics.num_draft_tokens for s in sequences) or budget < 3
    check_empty(engine)


def test_caches_hold_a_prefix_of_the_text_after_every_step(target, plain):
    """Rejected drafts leave nothing behind, in chunks and in batches."""
    engine = engine_for(target, half_right(plain), max_num_batched_tokens=8)
    run(engine, PROMPTS, GREEDY, after_step=lambda engine, _: check_caches(engine))


def test_modes_can_be_mixed_in_one_batch(model, target):
    """Greedy, seeded, penalised and filtered rows: each as if it were alone."""
    params = [
        GREEDY,
        SamplingParams(seed=5, max_tokens=14, temperature=0.8),
        SamplingParams(temperature=0, max_tokens=14, repetition_penalty=1.5),
        SamplingParams(seed=9, max_tokens=14, top_k=5, top_p=0.9),
        SamplingParams(seed=2, max_tokens=9, frequency_penalty=0.5, logit_bias={3: 2.0}),
    ]
    expected = [reference(model, prompt, p).token_ids for prompt, p in zip(PROMPTS, params, strict=True)]
    for drafter in (
        None,
        NGramDrafter(1, 3),
        OracleDrafter([p + o for p, o in zip(PROMPTS, expected, strict=True)], 64),
    ):
        sequences = run(engine_for(target, drafter), PROMPTS, params)
        assert [s.output_token_ids for s in sequences] == expected
    assert sum(s.metrics.num_accepted_tokens for s in sequences) > 20
    assert {s.rule for s in sequences} == {"greedy", "coupled"}


def test_requests_may_come_while_others_run(target, plain):
    """Continuous batching: one more at each step."""
    engine = engine_for(target, half_right(plain))
    sequences = []
    for i, prompt in enumerate(PROMPTS):
        sequences.append(engine.add_request(Request(str(i), prompt, GREEDY)))
        engine.step()
    while engine.has_unfinished_requests:
        engine.step()
    assert [s.output_token_ids for s in sequences] == plain


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_abort_in_any_state_leaves_the_others_alone(target, plain, steps):
    """Waiting, in the middle of its prompt, decoding; a second abort and an unknown id do nothing."""
    engine = engine_for(target, half_right(plain), max_num_seqs=4, max_num_batched_tokens=9)
    sequences = [engine.add_request(Request(str(i), p, GREEDY)) for i, p in enumerate(PROMPTS)]
    for _ in range(steps):
        engine.step()
    for gone in ("0", "3", "4", "4", "unknown"):
        engine.abort(gone)
        engine.target.slots.check_integrity()
    kept = [list(sequences[i].output_token_ids) for i in (0, 3, 4)]
    while engine.has_unfinished_requests:
        assert {out.request_id for out in engine.step()} <= {"1", "2"}
    assert [sequences[i].output_token_ids for i in (1, 2)] == [plain[i] for i in (1, 2)]
    assert [sequences[i].output_token_ids for i in (0, 3, 4)] == kept
    assert kept == [plain[i][: len(k)] for i, k in zip((0, 3, 4), kept, strict=True)]
    assert all(sequences[i].finish_reason == FinishReason.ABORT for i in (0, 3, 4))
    check_empty(engine)


def test_an_aborted_id_can_be_used_again(target, plain):
    """Its slot and its draft state are gone."""
    engine = engine_for(target, NGramDrafter(1, 3))
    engine.add_request(Request("a", PROMPTS[0], GREEDY))
    engine.step()
    engine.abort("a")
    again = engine.add_request(Request("a", PROMPTS[2], GREEDY))
    while engine.has_unfinished_requests:
        engine.step()
    assert again.output_token_ids == plain[2]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt is empty; give at least one token"),
        ([1] * 256, {}, "the prompt has 256 tokens and the model's limit is 256.*shorten the prompt"),
        ([1, 64], {}, r"token id 64 is outside the vocabulary \[0, 64\)"),
        ([1, -1], {}, r"token id -1 is outside the vocabulary \[0, 64\)"),
        ([1], {"stop": "x"}, "stop strings need a tokenizer; use stop_token_ids"),
        ([1], {"stop_token_ids": (64,)}, "stop_token_ids has token id 64; the vocabulary ends at 63"),
        ([1], {"allowed_token_ids": (3,), "banned_token_ids": (3,)}, "no token can be emitted"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(target, prompt, options, message):
    """The value, the limit and the remedy are named; nothing is queued."""
    engine = engine_for(target)
    with pytest.raises(RequestError, match=message):
        engine.add_request(Request("a", prompt, SamplingParams(**options)))
    check_empty(engine)


def test_an_id_in_use_is_refused(target):
    """Two requests of one name could not be told apart in the outputs."""
    engine = engine_for(target)
    engine.add_request(Request("a", [1], GREEDY))
    with pytest.raises(RequestError, match=re.escape("request id 'a' is in use")):
        engine.add_request(Request("a", [2], GREEDY))
    assert len(engine.sequences) == 1


@pytest.mark.parametrize("with_drafts", [False, True])
def test_the_last_position_of_the_model_is_used(model, with_drafts):
    """A prompt one short of the limit gives one token; max_tokens=None runs up to the limit."""
    target = target_for(model, max_model_len=24)
    for prompt in (list(range(23)), [4, 5, 6]):
        params = SamplingParams(temperature=0, max_tokens=None)
        expected = reference(model, prompt, params, max_model_len=24).token_ids
        drafter = OracleDrafter([prompt + expected], 64) if with_drafts else None
        (sequence,) = run(engine_for(target, drafter), [prompt], params)
        assert sequence.output_token_ids == expected
        assert len(sequence.token_ids) == 24
        assert sequence.finish_reason == FinishReason.LENGTH


def test_logprobs_with_drafts_are_those_of_plain_decoding(model, target, plain):
    """Each token's own, the most likely ones and the ranks, from the unfiltered distribution."""
    params = SamplingParams(temperature=0, max_tokens=14, logprobs=3)
    alone = [run(engine_for(target), [p], params)[0].logprobs for p in PROMPTS]
    drafted = [s.logprobs for s in run(engine_for(target, half_right(plain)), PROMPTS, params)]
    for prompt, one, other, ids in zip(PROMPTS, alone, drafted, plain, strict=True):
        exact = reference(model, prompt, params).logprobs
        assert len(one) == len(other) == len(ids)
        for a, b, all_logprobs, token in zip(one, other, exact, ids, strict=True):
            assert a.keys() == b.keys()
            assert next(iter(b)) == token
            for key in a:
                assert a[key].rank == b[key].rank
                assert a[key].logprob == pytest.approx(b[key].logprob, abs=1e-4)
                assert b[key].logprob == pytest.approx(float(all_logprobs[key]), abs=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ("ngram", "sufix")}, "'sufix' is no part of this engine's method; choose among ngram"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1 is below 0; 0 opts out"),
    ],
)
def test_what_a_request_may_not_ask_of_the_drafter(options, message):
    engine = engine_for(tiny_model(0), NGramDrafter(1, 4))
    with pytest.raises(RequestError, match=message):
        engine.add_request(Request("a", [1, 2, 3], SamplingParams(), **options))
    assert not engine.has_unfinished_requests


@pytest.mark.parametrize("num_right", [0, 3])
def test_a_drafter_gets_each_state_of_a_text_once(target, plain, num_right):
    """To the last step, and none of what was accepted behind the stop or the limit."""
    texts = [p + o for p, o in zip(PROMPTS, plain, strict=True)]
    counts: dict[int, int] = {}

    class Counting(OracleDrafter):
        feature_layers = (1,)

        def observe_features(self, sequence_id, token_ids, start, features):
            assert counts.get(sequence_id, 0) == start
            assert len(features) > 0
            counts[sequence_id] = start + len(features)
            assert counts[sequence_id] < len(token_ids)

    stops = [SamplingParams(temperature=0, max_tokens=14, stop_token_ids=(output[6],)) for output in plain]
    sequences = run(engine_for(target, Counting(texts, 64, num_right)), PROMPTS, [*stops[:-1], GREEDY])
    assert {sequence.finish_reason for sequence in sequences} == {FinishReason.STOP, FinishReason.LENGTH}
    for sequence in sequences:
        assert counts[sequence.sequence_id] == len(sequence.token_ids) - 1


def test_states_come_along_with_a_prefix_of_another_sequence(model, plain):
    """Those that a pass of its own would give; not from an engine whose passes give none."""
    texts = [prompt + output for prompt, output in zip(PROMPTS, plain, strict=True)]
    longer = [[*text, 3, 1, 4, 1, 5] for text in texts]

    class Collecting(OracleDrafter):
        feature_layers = (0, 2)

        def observe_features(self, sequence_id, token_ids, start, features):
            parts = states.setdefault(sequence_id, [])
            assert sum(map(len, parts)) == start
            parts.append(features.clone())

    found = []
    for caching in (False, True):
        states: dict[int, list[torch.Tensor]] = {}
        target = target_for(model)
        engine = engine_for(target, Collecting(texts, 64, 2), enable_prefix_caching=caching)
        stateless = engine_for(target, enable_prefix_caching=caching)
        run(stateless, longer, SamplingParams(temperature=0, max_tokens=2))
        sequences = run(engine, PROMPTS, GREEDY) + run(engine, longer, GREEDY)
        num_cached = [sequence.metrics.num_cached_tokens for sequence in sequences]
        assert not any(num_cached[: len(PROMPTS)]), "the other engine's passes gave no states"
        assert all(num_cached[len(PROMPTS) :]) == caching
        found.append([torch.cat(states[sequence.sequence_id]) for sequence in sequences])
    assert all(map(torch.equal, *found))
