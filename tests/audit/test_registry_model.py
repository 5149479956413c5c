"""The real model with its real vocabulary: every planted fault is convicted within 20,000 tokens.

Each fault is known to be there, so the only chance is that of missing it: seeds are fixed, and the audits ended after
64 to 15,924 tokens when this was written. An exact engine is convicted with a probability of at most 1e-6 an audit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foredraft import LLM, SamplingParams
from foredraft.config import SpeculativeConfig
from foredraft.drafters import make_drafter
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.engine import Engine
from foredraft.lab.audit.sampling import SamplingResult, audit_sampling
from foredraft.target.attention import ATTENTION_NAME
from foredraft.target.forward import TargetModel
from foredraft.target.loader import load_model

from . import faults

pytestmark = pytest.mark.slow  # minutes each: thousands of tokens of a real model

MODEL = "smollm2-135m-instruct"
TASKS = ("Write a short story about {}.", "Write three facts about {}, then repeat them.")
SUBJECTS = ("a lighthouse", "the moon", "bread", "chess")
MOST_TOKENS = 20_000


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, dtype="bfloat16")


@pytest.fixture(scope="module")
def noised(llm: LLM) -> TargetModel:
    """The model with noise on its weights: about half of what it drafts is accepted."""
    model = load_model(MODEL, dtype="bfloat16", device="cpu", attn_implementation=ATTENTION_NAME).model
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data = (parameter.float() + 0.1 * parameter.float().std() * noise).to(parameter.dtype)
    return TargetModel(model, llm.engine.target.max_model_len)


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    texts = [task.format(subject) for task in TASKS for subject in SUBJECTS]
    return [llm.chat_token_ids([{"role": "user", "content": text}]) for text in texts]


def engine_with(llm: LLM, drafter: Any, rule: str) -> Engine:
    """An engine with ``drafter``, or with that of the registry if it is a method's name."""
    method = drafter if isinstance(drafter, str) else "ngram"
    config = SpeculativeConfig(
        method=method, num_speculative_tokens=0 if method == "none" else 4, acceptance_rule=rule,
        allow_lossy=rule == "typical",
    )  # fmt: skip
    target = llm.engine.target
    made = make_drafter(config, llm.config, target, llm.tokenizer) if isinstance(drafter, str) else drafter
    return Engine(target, made, config, tokenizer=llm.tokenizer, eos_token_ids=llm.loaded.eos_token_ids)


def audit(engine: Engine, prompts: list[list[int]], num_tokens: int = MOST_TOKENS, **options: Any) -> SamplingResult:
    params = SamplingParams(**{"temperature": 1.0, "seed": 0, "max_tokens": 64, **options})
    result = audit_sampling(engine, prompts, params, num_tokens=num_tokens, batch_size=16)
    print(f"{result.num_tokens} tokens, evidence 10^{result.evidence:.1f}, {result.reason}, {result.total_s:.0f} s")
    return result


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        (faults.ResidualIsTarget, {}),
        (faults.NoTemperature, {"temperature": 0.7}),
        (faults.FiltersOnBonusOnly, {"top_k": 20}),
        (faults.PositionOffByOne, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("kind", ["ngram", "draft_model"])
def test_wrong_verifiers_are_convicted(
    llm: LLM, noised: TargetModel, prompts: list[list[int]], kind: str, fault: type, options: dict[str, Any]
) -> None:
    drafter = kind if kind == "ngram" else DraftModelDrafter(noised, llm.engine.target.vocab_size)
    engine = engine_with(llm, drafter, "rejection")
    engine.verifier = fault(engine.config)
    result = audit(engine, prompts, **options)
    assert result.convicted
    assert 0 < result.num_accepted_tokens < result.num_draft_tokens


@pytest.mark.parametrize("kind", ["ngram", "draft_model"])
def test_typical_acceptance_is_convicted(llm: LLM, noised: TargetModel, prompts: list[list[int]], kind: str) -> None:
    drafter = kind if kind == "ngram" else DraftModelDrafter(noised, llm.engine.target.vocab_size)
    assert audit(engine_with(llm, drafter, "typical"), prompts).convicted


def test_soft_ratio_for_a_greedy_draft_is_convicted(llm: LLM, noised: TargetModel, prompts: list[list[int]]) -> None:
    drafter = faults.SoftGreedyDrafter(noised, llm.engine.target.vocab_size)
    assert audit(engine_with(llm, drafter, "rejection"), prompts).convicted


@pytest.mark.parametrize(
    ("drafter", "fault"),
    [(DraftModelDrafter, faults.SharedStream), (faults.GumbelDrafter, faults.SharedNoise)],
    ids=["number", "noise"],
)
def test_shared_randomness_is_convicted(
    llm: LLM, noised: TargetModel, prompts: list[list[int]], drafter: type, fault: type
) -> None:
    engine = engine_with(llm, drafter(noised, llm.engine.target.vocab_size), "rejection")
    engine.verifier = fault(engine.config)
    assert audit(engine, prompts).convicted


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.3, "top_k": 40}], ids=str
)
@pytest.mark.parametrize("rule", ["rejection", "block", "coupled", "match"])
@pytest.mark.parametrize("kind", ["none", "ngram", "draft_model"])
def test_exact_rules_are_acquitted(
    llm: LLM, noised: TargetModel, prompts: list[list[int]], kind: str, rule: str, options: dict[str, Any]
) -> None:
    """2,000 tokens of each drafter under each rule."""
    drafter = DraftModelDrafter(noised, llm.engine.target.vocab_size) if kind == "draft_model" else kind
    result = audit(engine_with(llm, drafter, rule), prompts, num_tokens=2_000, **options)
    assert not result.convicted
    assert result.num_tokens >= 2_000
