"""Under load: little room, preemption, priorities and reuse change no token and leave nothing behind."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from foredraft import Engine, SamplingParams
from foredraft.drafters import Drafter
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.drafters.early_exit import EarlyExitDrafter
from foredraft.drafters.ngram import NGramDrafter
from foredraft.drafters.recycling import RecyclingDrafter
from foredraft.errors import InvalidOptionError
from foredraft.policy import FixedPolicy, PlanRow
from foredraft.target.forward import TargetModel
from foredraft.target.storage import GROWTH
from foredraft.testing import OracleDrafter, check_caches, engine_for, noisy_copy, run, target_for, tiny_model
from foredraft.types import Request

MAX_LEN = 250
ROOM = 4
"""Slots of GROWTH positions. A text that grows beyond one block doubles the capacity, and two slots are left."""
SHARED = [(7 * i) % 61 for i in range(40)]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(3, context=0.05, max_position_embeddings=MAX_LEN)


def small(model: Any, drafter: Callable[[TargetModel, Any], Drafter] | None = None, **options: Any) -> Engine:
    """An engine whose cache holds one text of the longest kind, and a little more."""
    target = target_for(model)
    made = None if drafter is None else drafter(target, model)
    limit = target.slots.bytes_per_position * GROWTH * ROOM
    return engine_for(target, made, max_kv_bytes=limit, **options)


def requests(count: int, seed: int) -> list[Request]:
    """Half of them share a prefix, half are greedy; outputs of 20 to 90 tokens, so that texts outgrow a block."""
    choose = random.Random(seed)
    made = []
    for i in range(count):
        prompt = [choose.randrange(64) for _ in range(choose.randint(1, 70))]
        prompt = SHARED[: choose.randint(5, 40)] + prompt if i % 2 else prompt
        sampling = {"temperature": 0.0} if i % 4 < 2 else {"temperature": 0.9, "seed": 50 + i}
        params = SamplingParams(max_tokens=choose.randint(20, 90), **sampling)
        made.append(Request(str(i), prompt, params, route=f"kind {i % 3}", priority=choose.choice([0, 0, 1])))
    return made


@functools.cache
def alone(model: Any, count: int, seed: int) -> list[list[int]]:
    """Each of the requests by itself, without drafts."""
    engine, each = engine_for(model), requests(count, seed)
    return [run(engine, [request.prompt_token_ids], request.params)[0].output_token_ids for request in each]


def run_under_load(engine: Engine, each: list[Request], seed: int) -> list[Any]:
    """Requests in random order, arriving over the first steps; the book-keeping is checked after every step."""
    choose = random.Random(seed)
    order = list(each)
    choose.shuffle(order)
    sequences: dict[str, Any] = {}
    while order or engine.has_unfinished_requests:
        for _ in range(choose.choice([0, 1, 1, 3]) if order else 0):
            if order:
                request = order.pop()
                sequences[request.request_id] = engine.add_request(request)
        engine.step()
        engine.check_integrity()
    return [sequences[request.request_id] for request in each]


class Changing(FixedPolicy):
    """Other lengths in every step, 0 among them, and more than a step can take."""

    def plan(self, rows: Sequence[PlanRow], num_other_tokens: int) -> list[int]:
        return [min(row.limit, row.context_len * 7 % 5) for row in rows]


DRAFTERS: dict[str, Callable[[TargetModel, Any], Drafter]] = {
    "ngram": lambda target, model: NGramDrafter(1, 4),
    "draft_model": lambda target, model: DraftModelDrafter(target_for(noisy_copy(model, 0.08)), 64),
    "early_exit": lambda target, model: EarlyExitDrafter(target, 1),
    "recycling": lambda target, model: RecyclingDrafter(),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_tokens_are_those_of_a_request_alone(model: Any, name: str):
    """16 requests, room for four short or two long ones: all were preempted, reused or both, and none differs."""
    each = requests(16, 1)
    engine = small(
        model,
        DRAFTERS[name],
        max_num_seqs=6,
        max_num_batched_tokens=48,
        enable_prefix_caching=True,
        policy=Changing(4) if name == "draft_model" else None,
    )
    sequences = run_under_load(engine, each, seed=2)
    assert [s.output_token_ids for s in sequences] == alone(model, 16, 1)
    assert sum(s.metrics.num_preemptions for s in sequences) > 3
    assert sum(s.metrics.num_cached_tokens for s in sequences) > 50
    assert sum(s.metrics.num_accepted_tokens for s in sequences) > 5
    assert engine.target.slots.num_open == 0
    assert engine.target.slots.allocated_bytes <= engine.target.slots.bytes_per_position * GROWTH * ROOM


def test_preemption_at_any_moment(model: Any):
    """Each request is set back at some step, in the middle of its prompt or its output: the same tokens and texts."""
    each = requests(5, 4)
    expected = alone(model, 5, 4)
    target = target_for(model)
    for step in (1, 3, 9):
        engine = engine_for(target, DRAFTERS["draft_model"](target, model), max_num_batched_tokens=24)
        sequences = [engine.add_request(request) for request in each]
        for now in itertools.count():
            if now == step:
                for request in each[:3]:
                    engine.preempt(request.request_id)
                    engine.check_integrity()
            engine.step()
            if step <= now < step + 4:
                check_caches(engine)
            if not engine.has_unfinished_requests:
                break
        assert [s.output_token_ids for s in sequences] == expected
    assert sequences[0].metrics.num_preemptions == 1


@pytest.mark.parametrize("seed", [1])
def test_aborts_leave_the_others_alone(model: Any, seed: int):
    """Waiting, running and preempted requests are aborted at random; the rest get their tokens, nothing is left."""
    each, choose = requests(12, seed), random.Random(seed)
    expected = alone(model, 12, seed)
    engine = small(model, DRAFTERS["draft_model"], max_num_batched_tokens=40, enable_prefix_caching=True)
    sequences = [engine.add_request(request) for request in each]
    while engine.has_unfinished_requests:
        if choose.random() < 0.08:
            engine.abort(choose.choice(list(engine.sequences)))
        engine.step()
        engine.check_integrity()
    finished = [i for i, s in enumerate(sequences) if s.finish_reason != "abort"]
    assert 3 < len(finished) < 12
    assert [sequences[i].output_token_ids for i in finished] == [expected[i] for i in finished]
    for sequence, tokens in zip(sequences, expected, strict=True):
        assert sequence.output_token_ids == tokens[: len(sequence.output_token_ids)]
    assert engine.drafter.model.slots.num_open == engine.target.slots.num_open == 0


def test_a_prefix_is_counted_once_and_only_if_it_was_reused(model: Any):
    """The second of two equal prompts feeds one token; without the option it feeds all; after a reset too."""
    prompt = SHARED
    params = SamplingParams(temperature=0, max_tokens=5)
    engine = engine_for(model, enable_prefix_caching=True)
    outputs = [run(engine, [prompt], params)[0] for _ in range(2)]
    engine.target.slots.drop_retained()
    outputs.append(run(engine, [prompt], params)[0])
    assert [s.metrics.num_cached_tokens for s in outputs] == [0, len(prompt) - 1, 0]
    off = engine_for(model)
    outputs += [run(off, [prompt], params)[0] for _ in range(2)]
    assert [s.metrics.num_cached_tokens for s in outputs[3:]] == [0, 0]
    assert all(s.output_token_ids == outputs[0].output_token_ids for s in outputs)


def test_reused_entries_are_the_same_bits_in_bf16(model: Any):
    """Log-probabilities too: behind a copied prefix, one that was taken over, one of a draft's pass, one running."""
    target = target_for(model, dtype=torch.bfloat16)
    if target.native is None:
        pytest.skip("needs AVX512-BF16 and a C++ compiler")
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=3)
    (begun,) = run(engine_for(target), [SHARED], params)
    prompts = [SHARED, [*begun.token_ids, 5, 6], [*SHARED[:30], 9], [*begun.token_ids[:45], 8]]
    cold = [run(engine_for(target), [prompt], params)[0] for prompt in prompts]
    for drafter in (None, OracleDrafter([s.token_ids for s in cold], 64, lambda length: length % 4)):
        target.slots.drop_retained()
        engine = engine_for(target, drafter, enable_prefix_caching=True)
        warm = [run(engine, [prompt], params)[0] for prompt in prompts]
        target.slots.drop_retained()
        warm += run(engine, prompts, params, after_step=lambda engine, _: engine.check_integrity())
        assert [(s.token_ids, s.logprobs) for s in warm] == [(s.token_ids, s.logprobs) for s in cold] * 2
        assert [s.metrics.num_cached_tokens > 20 for s in warm[:4]] == [False, True, True, True]


def test_a_cache_too_small_for_one_request_is_refused(model: Any):
    """The message has what there is, what is needed, and what to change."""
    target = target_for(model)
    with pytest.raises(
        InvalidOptionError, match="one sequence of max_model_len=250 tokens needs .* GiB; raise kv_cache_gb"
    ):
        engine_for(target, max_kv_bytes=target.slots.bytes_per_position * GROWTH)
