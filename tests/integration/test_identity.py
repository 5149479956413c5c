"""The real model in bf16: drafts, batches and seeds leave no trace in the tokens.

The prompts are ours. The full size (40 prompts, 192 tokens) is marked slow.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from foredraft import LLM, RequestOutput, SamplingParams
from foredraft.target.zoo import resolve_model

MODEL = "smollm2-135m-instruct"
SUBJECTS = ("a lighthouse", "the moon", "bread", "a bicycle", "rain", "chess", "a library", "salt", "bees", "glass")
TASKS = (
    "Write three sentences about {}.",
    "List five words about {}, then repeat the list.",
    "Write a Python function that prints facts about {}.",
    "Explain {} to a child.",
)
PROMPTS = [task.format(subject) for subject, task in itertools.product(SUBJECTS, TASKS)]
METHODS = {  # with fixed lengths, since what does not pay would not be drafted
    "ngram": {"method": "ngram", "policy": "fixed"},
    "early_exit": {"method": "early_exit", "exit_layer": 24, "policy": "fixed"},
    "draft_model": {"method": "draft_model", "model": MODEL, "num_speculative_tokens": 3, "policy": "fixed"},
}


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(MODEL, dtype="bfloat16")


def params(count: int, max_tokens: int, seeded: bool) -> list[SamplingParams]:
    sampling = {"temperature": 1.0} if seeded else {"temperature": 0.0}
    return [
        SamplingParams(**sampling, seed=100 + i if seeded else None, max_tokens=max_tokens, ignore_eos=True)
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def alone(plain: LLM) -> Callable[[int, int, bool], list[RequestOutput]]:
    """Plain outputs of the first prompts, each decoded alone; every method is compared with the same ones."""

    @functools.cache
    def outputs(count: int, max_tokens: int, seeded: bool) -> list[RequestOutput]:
        sampling = params(count, max_tokens, seeded)
        return [plain.generate([p], s)[0] for p, s in zip(token_ids(plain, count), sampling, strict=True)]

    return outputs


def token_ids(llm: LLM, count: int) -> list[list[int]]:
    return [llm.chat_token_ids([{"role": "user", "content": p}]) for p in PROMPTS[:count]]


def check_identity(plain: LLM, alone: Any, method: str, count: int, max_tokens: int, batch_size: int) -> None:
    """Decode alone and plain, then with drafts in batches: the same tokens, with drafts accepted and rejected."""
    if plain.engine.contract != "token-identical":
        pytest.skip(f"this machine's kernels give the contract {plain.engine.contract}")
    drafted = LLM(MODEL, dtype="bfloat16", speculative_config=METHODS[method], max_num_seqs=batch_size)
    for seeded in (False, True):
        together = drafted.generate(token_ids(plain, count), params(count, max_tokens, seeded))
        for a, b in zip(alone(count, max_tokens, seeded), together, strict=True):
            assert a.outputs[0].token_ids == b.outputs[0].token_ids
        accepted = sum(out.metrics.num_accepted_tokens for out in together)
        assert accepted > 0
        assert max(out.metrics.tokens_per_target_pass for out in together) > 1.0


ALONE = pytest.mark.slow  # a batch of 5 shows more
BATCHES = [
    pytest.param(method, size, marks=ALONE if size == 1 and method != "ngram" else ())
    for method in METHODS
    for size in (1, 5)
]


@pytest.mark.parametrize(("method", "batch_size"), BATCHES)
def test_drafts_leave_no_trace(plain: LLM, alone: Any, method: str, batch_size: int) -> None:
    check_identity(plain, alone, method, 5, 24, batch_size)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("method", METHODS)
def test_drafts_leave_no_trace_at_full_size(plain: LLM, alone: Any, method: str, batch_size: int) -> None:
    check_identity(plain, alone, method, 40, 192, batch_size)


def _against_generate(count: int, max_tokens: int) -> None:
    ours = LLM(MODEL, dtype="float32", speculative_config=METHODS["ngram"])
    prompts = [p[: len(p) - i % 3] for i, p in enumerate(token_ids(ours, count))]
    outputs = ours.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))
    theirs = AutoModelForCausalLM.from_pretrained(resolve_model(MODEL), dtype=torch.float32)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        expected = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()


def test_float32_batch_equals_transformers() -> None:
    _against_generate(3, 12)


@pytest.mark.slow
def test_float32_batch_of_16_equals_transformers() -> None:
    _against_generate(16, 64)
