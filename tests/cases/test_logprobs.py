"""LP: log-probabilities are the target's own at accepted, recovered and bonus places."""

from __future__ import annotations

import math
from typing import Any

import pytest

from foredraft import SamplingParams
from foredraft.drafters import Drafter
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.testing import (
    OracleDrafter,
    RecordingDrafter,
    ScriptedDrafter,
    constant_bigram,
    engine_for,
    reference,
    run,
    target_for,
)
from foredraft.types import StepOutput

PROBS = [0.60, 0.25, 0.10, 0.05]
LOGPROBS = [math.log(p) for p in PROBS]
PROMPT = [1, 2]


def alternating(right: int, wrong: int) -> Drafter:
    """Right on odd places of the text and wrong on even ones; every third text all right, so a bonus follows."""

    def script(text: list[int]) -> list[int]:
        if len(text) % 3 == 0:
            return [right] * 4
        return [right if (len(text) + i) % 2 else wrong for i in range(4)]

    return ScriptedDrafter(script)


def kinds_of_places(drafter: RecordingDrafter, sequence_id: int, blocks: list[list[int]]) -> set[str]:
    """Which of accepted, recovered and bonus places a run had."""
    kinds = set()
    for draft, emitted in zip(drafter.proposed(sequence_id), blocks, strict=True):
        accepted = len(emitted) - 1
        assert emitted[:accepted] == draft[:accepted]
        kinds |= {"accepted"} if accepted else set()
        kinds |= {"bonus" if accepted == len(draft) else "recovered"}
    return kinds


def decode(model: Any, drafter: Drafter | None, prompt: list[int], params: SamplingParams) -> Any:
    """The sequence, what the steps delivered, and the kinds of places."""
    outputs: list[StepOutput] = []
    recorder = None if drafter is None else RecordingDrafter(drafter)
    (sequence,) = run(engine_for(model, recorder), [prompt], params, after_step=lambda _, outs: outputs.extend(outs))
    kinds = recorder and kinds_of_places(recorder, sequence.sequence_id, [out.token_ids for out in outputs])
    return sequence, outputs, kinds


@pytest.mark.parametrize("num_top", [0, 1, 2, 4])
def test_o28_every_place_has_the_targets_logprob(num_top: int):
    """p = 0.60, 0.25, 0.10, 0.05 after every token, greedy: ln 0.60 wherever the token comes from."""
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=num_top)
    sequence, outputs, kinds = decode(constant_bigram(LOGPROBS), alternating(0, 1), PROMPT, params)
    assert kinds == {"accepted", "recovered", "bonus"}
    assert sequence.output_token_ids == [0] * 24
    streamed = [entry for out in outputs for entry in out.logprobs]
    assert streamed == sequence.logprobs
    assert len(sequence.logprobs) == len(sequence.output_token_ids)
    for entry in sequence.logprobs:
        assert list(entry) == list(range(max(1, num_top)))
        assert [value.logprob for value in entry.values()] == pytest.approx(LOGPROBS[: max(1, num_top)], abs=1e-4)
        assert [value.rank for value in entry.values()] == list(range(1, max(1, num_top) + 1))


@pytest.mark.parametrize("rule", ["auto", "rejection", "block", "match"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 1.5, "top_p": 0.9, "frequency_penalty": 0.5},
        {"logit_bias": {3: 2.0}, "banned_token_ids": (1,)},
    ],
    ids=str,
)
def test_o28_sampled_tokens_have_the_unfiltered_logprob(rule: str, options: dict[str, Any]):
    """Whatever the filters: the numbers are those of the model, and only the token's own place in them changes."""
    params = SamplingParams(**{"temperature": 1.0, **options}, seed=11, max_tokens=60, logprobs=2)
    drafter = RecordingDrafter(alternating(0, 2))
    engine = engine_for(constant_bigram(LOGPROBS), drafter, acceptance_rule=rule)
    (sequence,) = run(engine, [PROMPT], params)
    assert len(sequence.logprobs) == len(sequence.output_token_ids) == 60
    assert len(set(sequence.output_token_ids)) > 1
    assert 0 < sequence.metrics.num_accepted_tokens < sequence.metrics.num_draft_tokens
    for token, entry in zip(sequence.output_token_ids, sequence.logprobs, strict=True):
        assert next(iter(entry)) == token
        assert set(entry) == {token, 0, 1}
        for other, value in entry.items():
            assert value.logprob == pytest.approx(LOGPROBS[other], abs=1e-4)
            assert value.rank == other + 1


@pytest.mark.parametrize("name", ["oracle", "draft_model"])
@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"seed": 3}, {"temperature": 0.0, "repetition_penalty": 1.2}], ids=str
)
def test_o28_the_list_is_that_of_a_run_without_a_drafter(
    tiny: Any, tiny_draft: Any, name: str, options: dict[str, Any]
):
    """And that of the reference loop, on a model whose distribution depends on the whole text."""
    prompt = [7, 8, 9, 10]
    params = SamplingParams(**options, max_tokens=30, logprobs=3)
    plain, _, _ = decode(tiny, None, prompt, params)
    if name == "oracle":
        drafter: Drafter = OracleDrafter([prompt + plain.output_token_ids], 64, lambda length: (2, 4, 0)[length % 3])
    else:
        drafter = DraftModelDrafter(target_for(tiny_draft), 64)
    ours, outputs, kinds = decode(tiny, drafter, prompt, params)
    assert kinds == {"accepted", "recovered", "bonus"}
    assert ours.output_token_ids == plain.output_token_ids
    assert len(ours.logprobs) == len(plain.logprobs) == 30
    assert sum(len(out.logprobs) for out in outputs) == 30
    wanted = reference(tiny, prompt, params).logprobs
    for ours_at, plain_at, all_logprobs in zip(ours.logprobs, plain.logprobs, wanted, strict=True):
        assert list(ours_at) == list(plain_at)
        for token, value in ours_at.items():
            assert value.logprob == pytest.approx(plain_at[token].logprob, abs=1e-4)
            assert value.logprob == pytest.approx(float(all_logprobs[token]), abs=1e-4)
            assert value.rank == plain_at[token].rank
    assert len({round(next(iter(entry.values())).logprob, 3) for entry in ours.logprobs}) > 5


def test_o28_rows_of_a_batch_keep_their_own(tiny: Any, tiny_draft: Any):
    """Rows with and without log-probabilities, and drafts of different lengths, in one batch."""
    prompts = [[7, 8, 9, 10], [1], list(range(20, 31))]
    params = [SamplingParams(temperature=0.0, max_tokens=n, logprobs=top) for n, top in ((17, 2), (20, None), (9, 0))]
    drafter = RecordingDrafter(DraftModelDrafter(target_for(tiny_draft), 64))
    sequences = run(engine_for(tiny, drafter), prompts, params)
    assert any(len(set(widths)) > 1 for widths in drafter.widths)
    assert sequences[1].logprobs == []
    for i in (0, 2):
        wanted = reference(tiny, prompts[i], params[i])
        assert sequences[i].output_token_ids == wanted.token_ids
        assert sequences[i].metrics.num_accepted_tokens > 0
        assert [len(entry) for entry in sequences[i].logprobs] == [max(1, params[i].logprobs)] * params[i].max_tokens
        for token, entry, row in zip(wanted.token_ids, sequences[i].logprobs, wanted.logprobs, strict=True):
            assert entry[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
