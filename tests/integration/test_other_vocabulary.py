"""Real draft models that read the text through their own tokenizer: the output is that of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft import LLM, SamplingParams
from foredraft.config import HETEROGENEOUS_VOCAB_METHODS

SMOLLM2, GEMMA3 = "smollm2-135m-instruct", "gemma3-270m"
PROMPTS = [
    "The capital of France is Paris. The capital of Germany is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Grüße 🙂 aus 東京, 1, 2, 3, 4, 5, 6,",
]
NUM_TOKENS = 16
GREEDY = [SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)] * len(PROMPTS)
SEEDED = [SamplingParams(seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True) for seed in range(len(PROMPTS))]


def outputs(target: str, params: list[SamplingParams], /, **speculative: Any) -> list[Any]:
    """Without a draft model one by one, else in a batch."""
    config = (
        {"method": "draft_model", "num_speculative_tokens": 4, "policy": "fixed", **speculative}
        if speculative
        else None
    )
    llm = LLM(target, speculative_config=config)
    if llm.engine.contract != "token-identical":
        pytest.skip(f"this machine's kernels give the contract {llm.engine.contract}")
    if speculative:
        return [llm.generate(PROMPTS, params[i : i + len(PROMPTS)]) for i in range(0, len(params), len(PROMPTS))]
    several = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    alone = [llm.generate(prompt, param)[0] for prompt, param in zip(several, params, strict=True)]
    return [alone[i : i + len(PROMPTS)] for i in range(0, len(alone), len(PROMPTS))]


def check(plain: list[Any], drafted: list[Any]) -> list[tuple[int, int]]:
    """The same tokens; returns the accepted and drafted tokens of the greedy and of the seeded requests."""
    counts = []
    for ones, others in zip(plain, drafted, strict=True):
        assert [o.outputs[0].token_ids for o in ones] == [o.outputs[0].token_ids for o in others]
        accepted, total = (sum(getattr(o.metrics, f"num_{n}_tokens") for o in others) for n in ("accepted", "draft"))
        counts.append((accepted, total))
    return counts


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    return outputs(SMOLLM2, GREEDY + SEEDED)


@pytest.mark.parametrize("method", HETEROGENEOUS_VOCAB_METHODS)
def test_a_model_drafts_for_itself_through_text(plain: list[Any], method: str):
    """The way through text and back is the only loss: drafts are nearly all right."""
    options = {"model": SMOLLM2, "use_heterogeneous_vocab": True, "heterogeneous_vocab_method": method}
    (greedy, greedy_total), (seeded, seeded_total) = check(plain, outputs(SMOLLM2, GREEDY + SEEDED, **options))
    assert greedy > 0.8 * greedy_total
    assert 0 < seeded < seeded_total or method == "tli"


@pytest.mark.slow
@pytest.mark.parametrize("method", HETEROGENEOUS_VOCAB_METHODS)
@pytest.mark.parametrize(("target", "draft"), [(GEMMA3, SMOLLM2), (SMOLLM2, GEMMA3)])
def test_gemma_and_smollm_draft_for_each_other(plain: list[Any], target: str, draft: str, method: str):
    """Slow the first time: 238 MB are fetched. Byte-level tokens against sentencepiece, either way."""
    expected = plain if target == SMOLLM2 else outputs(target, GREEDY + SEEDED)
    options = {"model": draft, "use_heterogeneous_vocab": True, "heterogeneous_vocab_method": method}
    for accepted, total in check(expected, outputs(target, GREEDY + SEEDED, **options)):
        assert 0 < accepted < total
