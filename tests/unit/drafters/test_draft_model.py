"""The draft model's cache follows the text through rejections, batches and gaps; vocabularies of other sizes."""

from __future__ import annotations

import pytest

from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.testing import (
    RecordingDrafter,
    check_cache,
    engine_for,
    noisy_copy,
    reference,
    run,
    target_for,
    tiny_model,
)
from foredraft.testing.drafters import ScriptedDrafter
from foredraft.types import Request, SamplingParams

PROMPTS = [[1, 2, 3], [10], list(range(20, 37)), [5, 6] * 5]
GREEDY = SamplingParams(temperature=0, max_tokens=16)


@pytest.fixture(scope="module")
def model():
    return tiny_model(0)


@pytest.fixture
def target(model):
    return target_for(model)


def check_follows(engine, _):
    """After every step the cache holds a prefix of the committed text, and lacks two tokens at most."""
    drafter = engine.drafter.inner
    for sequence in engine.scheduler.running:
        if sequence.sequence_id in drafter.model.slots:
            check_cache(drafter.model, sequence.sequence_id, sequence.token_ids)
            assert len(sequence.token_ids) - drafter.model.slots.length(sequence.sequence_id) <= 2


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("seed", [None, 3])
def test_the_cache_is_a_prefix_of_the_text_after_every_step(model, target, noise, k, seed):
    """All accepted (one token to catch up), and some rejected (cut back); nothing is left at the end."""
    params = GREEDY if seed is None else SamplingParams(seed=seed, max_tokens=16)
    drafter = RecordingDrafter(DraftModelDrafter(target_for(noisy_copy(model, noise)), 64))
    sequences = run(engine_for(target, drafter, num_speculative_tokens=k), PROMPTS, params, after_step=check_follows)
    expected = [reference(model, prompt, params).token_ids for prompt in PROMPTS]
    assert [s.output_token_ids for s in sequences] == expected
    accepted, total = (sum(getattr(s.metrics, f"num_{n}_tokens") for s in sequences) for n in ("accepted", "draft"))
    assert accepted == total if noise == 0.0 else 0 < accepted < total
    assert drafter.inner.model.slots.num_open == 0


def test_rows_may_want_drafts_of_other_lengths(model, target):
    """Greedy rows near their ends: 5, 2, 1 and none, in one batch."""
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (12, 3, 2, 1)]
    drafter = RecordingDrafter(DraftModelDrafter(target_for(noisy_copy(model)), 64))
    sequences = run(engine_for(target, drafter, num_speculative_tokens=5), PROMPTS, params)
    assert sorted(drafter.widths[0]) == [0, 1, 2, 5]
    assert [s.output_token_ids for s in sequences] == [
        reference(model, prompt, p).token_ids for prompt, p in zip(PROMPTS, params, strict=True)
    ]


def test_a_sampled_row_may_end_its_draft_before_two_greedy_ones(model, target):
    """Three rows; the sampled one has room for one draft token, the greedy ones for five."""
    params = [GREEDY, GREEDY, SamplingParams(seed=1, max_tokens=2)]
    drafter = DraftModelDrafter(target_for(noisy_copy(model)), 64)
    sequences = run(engine_for(target, drafter, num_speculative_tokens=5), PROMPTS[:3], params)
    assert [s.output_token_ids for s in sequences] == [
        reference(model, prompt, p).token_ids for prompt, p in zip(PROMPTS[:3], params, strict=True)
    ]


def test_a_draft_model_that_was_left_out_catches_up(model, target):
    """Steps by another drafter in between: the tokens it missed are fed with the draft's first pass."""
    drafter = DraftModelDrafter(target_for(model), 64)
    engine = engine_for(target, drafter, num_speculative_tokens=3)
    sequence = engine.add_request(Request("a", PROMPTS[2], GREEDY))
    engine.step()
    engine.drafter = ScriptedDrafter([])
    for _ in range(6):
        engine.step()
    engine.drafter = drafter
    passes = drafter.model.num_passes
    engine.step()
    assert drafter.model.num_passes - passes == 3
    assert sequence.metrics.num_accepted_tokens == 6
    while engine.has_unfinished_requests:
        engine.step()
    assert sequence.output_token_ids == reference(model, PROMPTS[2], GREEDY).token_ids


@pytest.mark.parametrize("draft_vocab", [64, 80])
@pytest.mark.parametrize("seed", [None, 4])
def test_a_larger_draft_vocabulary_is_cut(model, target, draft_vocab, seed):
    """Ids past the target's are never proposed."""
    params = GREEDY if seed is None else SamplingParams(seed=seed, max_tokens=16)
    draft_model = tiny_model(5, vocab_size=draft_vocab)
    drafter = RecordingDrafter(DraftModelDrafter(target_for(draft_model), 64))
    sequences = run(engine_for(target, drafter), PROMPTS, params)
    assert [s.output_token_ids for s in sequences] == [reference(model, p, params).token_ids for p in PROMPTS]
    assert max(int(d.token_ids.max()) for d in drafter.drafts if d.token_ids.numel()) < 64


@pytest.mark.parametrize("seed", [None, 4])
def test_a_smaller_draft_vocabulary_is_filled_up(model, target, seed):
    """The ids that it lacks have probability 0; here the target is kept from them too."""
    banned = tuple(range(48, 64))
    options = {"temperature": 0} if seed is None else {"seed": seed}
    params = SamplingParams(**options, max_tokens=16, banned_token_ids=banned)
    drafter = RecordingDrafter(DraftModelDrafter(target_for(tiny_model(5, vocab_size=48)), 64))
    sequences = run(engine_for(target, drafter), PROMPTS, params)
    assert [s.output_token_ids for s in sequences] == [reference(model, p, params).token_ids for p in PROMPTS]
    assert max(int(d.token_ids.max()) for d in drafter.drafts if d.token_ids.numel()) < 48


@pytest.mark.parametrize("seed", [None, 4])
def test_options_that_leave_it_no_token_leave_no_draft(model, target, seed):
    """Only ids that the draft model lacks are allowed; a row beside it drafts on."""
    options = {"temperature": 0} if seed is None else {"seed": seed}
    params = [SamplingParams(**options, max_tokens=8, allowed_token_ids=tuple(range(48, 64))), GREEDY]
    drafter = DraftModelDrafter(target_for(tiny_model(5, vocab_size=48)), 64)
    only, free = run(engine_for(target, drafter), [PROMPTS[0]] * 2, params)
    assert only.output_token_ids == reference(model, PROMPTS[0], params[0]).token_ids
    assert only.metrics.num_draft_tokens == 0 < free.metrics.num_draft_tokens


def test_a_text_with_a_token_that_the_draft_model_lacks_is_decoded(model, target):
    """No draft, or any draft, but no crash: the engine goes on."""
    drafter = DraftModelDrafter(target_for(tiny_model(5, vocab_size=48)), 64)
    (sequence,) = run(engine_for(target, drafter), [[1, 60, 2]], GREEDY)
    assert sequence.output_token_ids == reference(model, [1, 60, 2], GREEDY).token_ids


def test_a_shorter_draft_model_stops_drafting_at_its_limit(model, target):
    """Past its last position it proposes nothing; the target goes on."""
    drafter = RecordingDrafter(DraftModelDrafter(target_for(noisy_copy(model), max_model_len=24), 64))
    params = SamplingParams(temperature=0, max_tokens=20)
    (sequence,) = run(engine_for(target, drafter), [PROMPTS[2]], params)
    assert sequence.output_token_ids == reference(model, PROMPTS[2], params).token_ids
    assert drafter.widths[0] == [4]
    assert drafter.widths[-1] == [0]


def test_an_aborted_request_leaves_no_cache(model, target):
    """The slot of the draft model is closed with that of the target."""
    drafter = DraftModelDrafter(target_for(model), 64)
    engine = engine_for(target, drafter)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(Request(str(i), prompt, GREEDY))
    engine.step()
    assert drafter.model.slots.num_open == len(PROMPTS)
    for i in range(len(PROMPTS)):
        engine.abort(str(i))
    assert drafter.model.slots.num_open == target.slots.num_open == 0
    assert not drafter._fed


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=3, max_tokens=16), SamplingParams(max_tokens=16)])
def test_a_draft_ends_with_the_first_unlikely_token(model, target, params):
    """The token stays, all before it were likely; and the output is that of plain decoding."""
    drafter = DraftModelDrafter(target_for(noisy_copy(model, 0.05)), 64)
    drafter.stop_below = 0.6
    recorder = RecordingDrafter(drafter)
    sequences = run(engine_for(target, recorder, num_speculative_tokens=5), PROMPTS, params)
    widths = {width for step in recorder.widths for width in step}
    assert len(widths) > 2, "drafts of several lengths"
    assert min(min(step, default=5) for step in recorder.widths[:3]) < 5, "long before the output ends"
    for draft in recorder.drafts:
        if draft.probs is not None:
            for row, width in enumerate(draft.num_draft_tokens):
                taken = draft.probs[row, range(width), draft.token_ids[row, :width]]
                assert (taken[:-1] >= 0.6).all()
                assert width in (0, 5) or taken[-1] < 0.6 or sequences[row].finish_reason
    if params.is_greedy or params.seed is not None:
        for sequence, prompt in zip(sequences, PROMPTS, strict=True):
            assert sequence.output_token_ids == reference(model, prompt, params).token_ids
