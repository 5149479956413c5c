"""KV: lengths, rollback and positions of the caches of target and draft model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from foredraft import Engine, SamplingParams
from foredraft.drafters import Drafter
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.ngram import NGramDrafter
from foredraft.errors import RequestError
from foredraft.target.layout import PassRow
from foredraft.target.slots import KVSlots
from foredraft.target.storage import LayerShape
from foredraft.testing import (
    OracleDrafter,
    RecordingDrafter,
    ScriptedDrafter,
    check_cache,
    check_caches,
    constant_bigram,
    engine_for,
    last_logits,
    noisy_copy,
    reference,
    run,
    scripted_model,
    target_for,
    tiny_model,
)


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens)


@pytest.mark.parametrize("removed", [0, 1, 2, 3])
def test_o15_rollback_leaves_the_first_entries_of_every_layer(removed: int):
    slots = KVSlots([LayerShape(2, 8, 8), LayerShape(1, 16, 8)], torch.float32, torch.device("cpu"), 16)
    for other in (1, 2, 3):
        slots.open(other)
    for layer in range(2):
        slots.keys[layer].normal_(), slots.values[layer].normal_()
    slots.commit(2, 3)
    before = [(k.clone(), v.clone()) for k, v in slots.read(2)]
    slots.truncate(2, 3 - removed)
    assert slots.length(2) == 3 - removed
    for (keys, values), (old_keys, old_values) in zip(slots.read(2), before, strict=True):
        assert torch.equal(keys, old_keys[: 3 - removed])
        assert torch.equal(values, old_values[: 3 - removed])
    assert slots.length(1) == slots.length(3) == 0


@pytest.mark.parametrize("length", [-2, -1, 4, 16])
def test_o15_a_length_that_is_not_held_is_refused(length: int):
    """Removing five of three entries (length -2) does not wrap around."""
    slots = KVSlots([LayerShape(1, 8, 8)], torch.float32, torch.device("cpu"), 16)
    slots.open(0)
    slots.commit(0, 3)
    with pytest.raises(ValueError, match=r"it holds 3; use a length in \[0, 3\]"):
        slots.truncate(0, length)
    assert slots.length(0) == 3


def test_o15_rejection_of_everything_from_the_first_round_on(tiny: Any):
    """Prompt of one token, six wrong drafts: the first round rolls six of seven entries back."""
    expected = reference(tiny, [10], greedy(30)).token_ids
    oracle = OracleDrafter([[10, *expected]], vocab_size=64, num_right=0)
    engine = engine_for(tiny, oracle, num_speculative_tokens=6)
    lengths: list[int] = []

    def after_step(engine: Engine, _: Any) -> None:
        check_caches(engine)
        lengths.extend(engine.target.slots.length(s.sequence_id) for s in engine.scheduler.running)

    (sequence,) = run(engine, [[10]], greedy(30), after_step=after_step)
    assert sequence.output_token_ids == expected
    assert lengths == list(range(1, 30)), "one entry stays in each round"
    assert sequence.metrics.num_accepted_tokens == 0
    assert len(sequence.metrics.drafted_per_position) == 6


def from_scratch(model: Any, num_tokens: int) -> Callable[[list[int]], list[int]]:
    """Greedy drafts of a model without any cache."""

    def propose(token_ids: list[int]) -> list[int]:
        text = list(token_ids)
        for _ in range(num_tokens):
            text.append(int(last_logits(model, text).argmax()))
        return text[len(token_ids) :]

    return propose


def test_o17_the_draft_models_cache_keeps_up_with_the_text(tiny: Any, tiny_draft: Any):
    """After each round it holds what the model was fed and the target kept, and its logits are those of the text.

    The last draft token is never fed, so the rule is: all but the next input token after a rejection, one
    less after full acceptance.
    """
    drafter = DraftModelDrafter(target_for(tiny_draft), 64)
    accepted: list[int] = []
    text_len = 3

    def after_step(engine: Engine, outputs: Any) -> None:
        nonlocal text_len
        count = len(outputs[0].token_ids) - 1
        accepted.append(count)
        text_len += count + 1
        for sequence in engine.scheduler.running:
            slots, text = drafter.model.slots, sequence.token_ids
            cached = slots.length(sequence.sequence_id)
            assert cached == len(text) - (2 if count == 4 else 1)
            check_cache(drafter.model, sequence.sequence_id, text)
            logits = drafter.model.forward([PassRow(sequence.sequence_id, text[cached:], 1)])[0]
            assert float((logits - last_logits(tiny_draft, text)).abs().max()) < 1e-4

    engine = engine_for(tiny, drafter, num_speculative_tokens=4)
    (sequence,) = run(engine, [[1, 2, 3]], greedy(150), after_step=after_step)
    assert 0.3 < sequence.metrics.acceptance_rate < 0.8
    assert {0, 4} < set(accepted)
    slow_engine = engine_for(tiny, ScriptedDrafter(from_scratch(tiny_draft, 4)), num_speculative_tokens=4)
    slow: list[int] = []
    run(slow_engine, [[1, 2, 3]], greedy(150), after_step=lambda _, outs: slow.append(len(outs[0].token_ids) - 1))
    assert accepted == slow


def test_o17_a_token_that_was_rejected_may_be_emitted_all_the_same():
    """Under `typical` the token after a rejection follows the target's own law: here it is often the rejected one."""
    target, draft = [0.48, 0.48, 0.04], [0.1, 0.1, 0.8]
    models = [constant_bigram([math.log(p) for p in probs]) for probs in (target, draft)]
    recorder = RecordingDrafter(DraftModelDrafter(target_for(models[1]), 64))
    engine = engine_for(models[0], recorder, num_speculative_tokens=3, acceptance_rule="typical", allow_lossy=True)
    repeated = 0

    def after_step(engine: Engine, outputs: Any) -> None:
        nonlocal repeated
        draft = recorder.drafts[-1]
        for out, tokens, count in zip(outputs, draft.token_ids.tolist(), draft.num_draft_tokens, strict=True):
            accepted = len(out.token_ids) - 1
            repeated += accepted < count and tokens[accepted] == out.token_ids[-1]
        check_caches(engine)

    params = [SamplingParams(seed=i, max_tokens=40) for i in range(10)]
    run(engine, [[0]] * 10, params, after_step=after_step)
    assert repeated > 3


O18_PROMPTS = ([10], [10, 11], list(range(20, 37)))
METHODS: dict[str, Callable[[Any, list[list[int]]], Drafter]] = {
    "ngram": lambda model, texts: NGramDrafter(1, 4),
    "draft_model": lambda model, texts: DraftModelDrafter(target_for(noisy_copy(model)), 64),
    "oracle": lambda model, texts: OracleDrafter(texts, vocab_size=64),
    "half right": lambda model, texts: OracleDrafter(texts, 64, lambda length: length % 3),
}


def watch_positions(engine: Engine) -> list[list[int]]:
    """Position ids of every pass of the target."""
    seen: list[list[int]] = []
    engine.target.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"][0].tolist()), with_kwargs=True
    )
    return seen


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("name", METHODS)
def test_o18_positions_follow_the_committed_length(tiny: Any, name: str, k: int):
    """Each verify pass feeds consecutive positions that begin at the last committed token."""
    references = [reference(tiny, prompt, greedy(30)).token_ids for prompt in O18_PROMPTS]
    texts = [[*p, *out] for p, out in zip(O18_PROMPTS, references, strict=True)]
    engine = engine_for(tiny, METHODS[name](tiny, texts), num_speculative_tokens=k)
    positions = watch_positions(engine)
    drafted = 0
    for prompt, expected in zip(O18_PROMPTS, references, strict=True):
        positions.clear()
        starts: list[int] = [0]
        (sequence,) = run(
            engine, [prompt], greedy(30),
            after_step=lambda engine, _, starts=starts: starts.extend(
                len(s.token_ids) - 1 for s in engine.scheduler.running
            ),
        )  # fmt: skip
        assert sequence.output_token_ids == expected
        assert [fed[0] for fed in positions] == starts
        assert all(fed == list(range(fed[0], fed[0] + len(fed))) for fed in positions)
        drafted += sequence.metrics.num_draft_tokens
    assert drafted > 10


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("name", METHODS)
def test_o18_a_slip_of_positions_would_show(name: str, k: int):
    """The model says what its script has at the position that it is told."""
    script = [(i * i * 7 + 3 * i + 11) % 64 for i in range(40)]
    for prompt_len in (1, 2, 17):
        prompt = list(range(20, 20 + prompt_len))
        model = scripted_model(script, prompt_len)
        drafter = METHODS[name](model, [prompt + script])
        engine = engine_for(model, drafter, num_speculative_tokens=k)
        (sequence,) = run(engine, [prompt], greedy(40))
        assert sequence.output_token_ids == script


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("prompt_len", [28, 31, 32])
def test_o19_nothing_is_drafted_or_fed_beyond_the_length_limit(name: str, prompt_len: int):
    model = tiny_model(0, max_position_embeddings=32)
    prompt = ([5, 6, 7, 5, 6, 7, 9] * 5)[:prompt_len]
    if prompt_len == 32:
        engine = engine_for(model, METHODS[name](model, []), num_speculative_tokens=6)
        with pytest.raises(RequestError, match="32 tokens.*limit is 32.*shorten the prompt"):
            run(engine, [prompt], greedy(10))
        assert not engine.has_unfinished_requests
        return
    expected = reference(model, prompt, greedy(10)).token_ids
    recorder = RecordingDrafter(METHODS[name](model, [prompt + expected]))
    engine = engine_for(model, recorder, num_speculative_tokens=6)
    positions = watch_positions(engine)
    (sequence,) = run(engine, [prompt], greedy(10))
    assert sequence.output_token_ids == expected
    assert len(expected) == 32 - prompt_len
    assert sequence.finish_reason == "length"
    assert max(max(fed) for fed in positions) <= 31
    asked = [row.num_draft_tokens for rows in recorder.rows for row in rows]
    assert asked[0] == 32 - prompt_len - 1, "one place is for the token that verification adds"
    assert all(0 <= width <= wanted for (width,), wanted in zip(recorder.widths, asked, strict=True))
