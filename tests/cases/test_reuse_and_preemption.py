"""ST: the prefix cache holds what clients saw; preempted requests begin their drafts anew."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft import SamplingParams
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.target.storage import GROWTH
from foredraft.testing import (
    OracleDrafter,
    RecordingDrafter,
    check_caches,
    engine_for,
    reference,
    run,
    scripted_model,
    target_for,
)
from foredraft.types import Request

PROMPT = list(range(20, 30))
SCRIPT = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 40, 41]


@pytest.mark.parametrize("end", ["length", "stop"])
def test_o22_only_returned_tokens_are_kept_for_reuse(end: str):
    """Five tokens are returned of a block of eight that was right; the next turn goes on otherwise behind the fifth."""
    model = scripted_model(SCRIPT, len(PROMPT))
    target = target_for(model)
    drafter = OracleDrafter([[*PROMPT, *SCRIPT]], 64)
    stop = {"max_tokens": 5} if end == "length" else {"max_tokens": 12, "stop_token_ids": (SCRIPT[4],)}
    engine = engine_for(target, drafter, num_speculative_tokens=7, enable_prefix_caching=True)
    (first,) = run(engine, [PROMPT], SamplingParams(temperature=0, **stop))
    assert first.output_token_ids == SCRIPT[:5]
    assert first.metrics.num_target_passes == 1
    engine.target.slots.check_integrity()
    known = [*PROMPT, *SCRIPT[:5]]
    kept = [target.slots._retained[slot] for slot in target.slots._retained]
    assert kept == [known[: len(kept[0])]]
    assert len(kept[0]) >= len(PROMPT) + 4

    turn = [*known, *SCRIPT[5:7], 60]
    params = SamplingParams(temperature=0, max_tokens=6)
    (second,) = run(engine, [turn], params)
    (cold,) = run(engine_for(target_for(model)), [turn], params)
    assert len(PROMPT) + 4 <= second.metrics.num_cached_tokens <= len(known)
    assert second.output_token_ids == cold.output_token_ids


PROMPTS = [list(range(20, 25)), list(range(30, 39)), list(range(1, 14))]
OUTPUT = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def solo(tiny: Any) -> list[list[int]]:
    return [reference(tiny, prompt, OUTPUT).token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("kind", ["draft_model", "oracle"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_o23_a_preempted_request_equals_a_solo_run(tiny: Any, tiny_draft: Any, solo: Any, kind: str, steps: int):
    """Request 2 is set back after some steps; its drafts begin anew, and each draft is counted once."""
    made = DraftModelDrafter(target_for(tiny_draft), 64)
    oracle = OracleDrafter([[*p, *o] for p, o in zip(PROMPTS, solo, strict=True)], 64, lambda length: length % 4)
    recorder = RecordingDrafter(made if kind == "draft_model" else oracle)
    engine = engine_for(tiny, recorder)
    sequences = [engine.add_request(Request(str(i), p, OUTPUT)) for i, p in enumerate(PROMPTS)]
    for _ in range(steps):
        engine.step()
    second = sequences[1]
    engine.preempt("1")
    assert second.sequence_id not in engine.target.slots
    assert second.sequence_id not in made._fed
    assert second.sequence_id not in made.model.slots
    while engine.has_unfinished_requests:
        engine.step()
        check_caches(engine)
    assert [s.output_token_ids for s in sequences] == solo
    assert second.metrics.num_preemptions == 1
    for sequence in sequences:
        assert sequence.metrics.num_draft_tokens == sum(map(len, recorder.proposed(sequence.sequence_id)))
        assert 0 < sequence.metrics.num_accepted_tokens < sequence.metrics.num_draft_tokens


def test_o23_a_request_that_is_skipped_for_steps_equals_a_solo_run(tiny: Any, tiny_draft: Any, solo: Any):
    """Two tokens a step for three requests: the third stands still while the first two decode, then catches up."""
    recorder = RecordingDrafter(DraftModelDrafter(target_for(tiny_draft), 64))
    engine = engine_for(tiny, recorder, max_num_batched_tokens=30)
    sequences = [engine.add_request(Request(str(i), p, OUTPUT)) for i, p in enumerate(PROMPTS)]
    for _ in range(3):
        engine.step()
    engine.scheduler.max_num_batched_tokens = 2
    before = len(sequences[2].token_ids)
    for _ in range(2):
        engine.step()
    assert len(sequences[2].token_ids) == before
    engine.scheduler.max_num_batched_tokens = 30
    while engine.has_unfinished_requests:
        engine.step()
        check_caches(engine)
    assert [s.output_token_ids for s in sequences] == solo


def test_o23_preemption_by_the_memory_equals_solo_runs(tiny: Any, tiny_draft: Any):
    """Room for two of three requests once a text is longer than a block of the cache: the last one waits."""
    params = SamplingParams(temperature=0, max_tokens=100)
    solo = [run(engine_for(tiny), [prompt], params)[0].output_token_ids for prompt in PROMPTS]
    target = target_for(tiny)
    limit = 4 * GROWTH * target.slots.bytes_per_position
    engine = engine_for(target, DraftModelDrafter(target_for(tiny_draft), 64), max_kv_bytes=limit)
    sequences = run(engine, PROMPTS, params, after_step=lambda engine, _: engine.check_integrity())
    assert [s.output_token_ids for s in sequences] == solo
    assert [s.metrics.num_preemptions > 0 for s in sequences] == [False, False, True]
