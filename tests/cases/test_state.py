"""ST: nothing of one request is seen by another, and what the caller passes in stays as it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from foredraft import Engine, SamplingParams, SpeculativeConfig
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.ngram import NGramDrafter
from foredraft.testing import OracleDrafter, RecordingDrafter, bigram_model, engine_for, reference, run, target_for
from foredraft.types import Request

A, B = [20, 21, 22] * 20, [20, 21]


def loop_model() -> Any:
    """20, 21, 30, 31 and again."""
    table = torch.full((32, 32), float("-inf"))
    for before in range(32):
        table[before, {20: 21, 21: 30, 30: 31, 31: 20}.get(before, 20)] = 0.0
    return bigram_model(table)


@pytest.fixture(scope="module")
def loop() -> Any:
    return loop_model()


def seen_by(recorder: RecordingDrafter, engine: Engine, prompt: list[int]) -> dict[str, Any]:
    """What a request got: its drafts, its tokens and its counts."""
    (sequence,) = run(engine, [prompt], SamplingParams(temperature=0, max_tokens=24))
    metrics = sequence.metrics
    return {
        "drafts": recorder.proposed(sequence.sequence_id),
        "token_ids": sequence.output_token_ids,
        "counts": (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens),
    }


@pytest.mark.parametrize("name", ["ngram", "draft_model"])
def test_o20_a_new_request_starts_with_an_empty_drafter(loop: Any, name: str):
    """B after A is drafted as on a fresh engine: never with 22, which only A's text holds."""

    def fresh() -> tuple[RecordingDrafter, Engine]:
        drafter = NGramDrafter(1, 4) if name == "ngram" else DraftModelDrafter(target_for(loop), 64)
        recorder = RecordingDrafter(drafter)
        return recorder, engine_for(loop, recorder, num_speculative_tokens=5)

    alone = seen_by(*fresh(), B)
    recorder, engine = fresh()
    first = seen_by(recorder, engine, B)
    of_a = seen_by(recorder, engine, A)
    last = seen_by(recorder, engine, B)
    assert first == last == alone
    assert alone["token_ids"] == [30, 31, 20, 21] * 6
    assert alone["counts"][2] > 0
    assert not any(22 in draft for draft in last["drafts"])
    if name == "ngram":
        assert any(22 in draft for draft in of_a["drafts"]), "A's text invites drafts with 22"


def test_o21_the_draft_length_does_not_survive_a_call(tiny: Any):
    """Full acceptance in one call, and a request that runs beside it, leave the next call's length alone."""
    params = SamplingParams(temperature=0, max_tokens=30)
    prompts = [[1, 2, 3], [10, 11]]
    texts = [[*p, *reference(tiny, p, params).token_ids] for p in prompts]
    recorder = RecordingDrafter(OracleDrafter(texts, 64, lambda length: 64 if length % 2 else 1))
    engine = engine_for(tiny, recorder, num_speculative_tokens=5)
    asked = []
    for _ in range(2):
        recorder.rows.clear()
        (sequence,) = run(engine, prompts[:1], params)
        asked.append([rows[0].num_draft_tokens for rows in recorder.rows])
        assert sequence.metrics.num_accepted_tokens > 15
    assert asked[0] == asked[1]
    assert asked[0][0] == 5
    both = run(engine, prompts, params)
    assert both[0].output_token_ids == texts[0][3:]
    assert recorder.rows[-1][0].num_draft_tokens <= 5


def test_o21_nothing_of_the_callers_is_changed(tiny: Any, tiny_draft: Any):
    """Configurations of both models, options, parameters and prompts are equal before and after."""
    options = {"method": "ngram", "num_speculative_tokens": 5}
    bias = {3: 0.5}
    params = SamplingParams(temperature=0, max_tokens=12, logit_bias=bias, stop_token_ids=[63])
    prompt = [1, 2, 3]
    held = {
        "target": (tiny.config.to_dict(), tiny.generation_config.to_dict(), tiny.state_dict()),
        "draft": (tiny_draft.config.to_dict(), tiny_draft.generation_config.to_dict(), tiny_draft.state_dict()),
        "options": options,
        "bias": bias,
        "prompt": prompt,
    }
    before = copy.deepcopy(held)
    config = SpeculativeConfig.from_options(options)
    engine = Engine(target_for(tiny), DraftModelDrafter(target_for(tiny_draft), 64), config)
    request = Request("a", prompt, params)
    engine.add_request(request)
    while engine.has_unfinished_requests:
        engine.step()
    held["target"] = (tiny.config.to_dict(), tiny.generation_config.to_dict(), tiny.state_dict())
    held["draft"] = (tiny_draft.config.to_dict(), tiny_draft.generation_config.to_dict(), tiny_draft.state_dict())
    for name in ("options", "bias", "prompt"):
        assert held[name] == before[name]
    for name in ("target", "draft"):
        assert held[name][:2] == before[name][:2]
        assert all(torch.equal(held[name][2][key], before[name][2][key]) for key in before[name][2])
    assert request == Request("a", [1, 2, 3], SamplingParams(
        temperature=0, max_tokens=12, logit_bias={3: 0.5}, stop_token_ids=(63,)
    ))  # fmt: skip
