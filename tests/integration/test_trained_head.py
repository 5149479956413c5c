"""The head that comes with the package: found by its name, small, and worth its passes on the model it was made for."""

from __future__ import annotations

import pytest

from foredraft import LLM, SamplingParams, SpeculativeConfig
from foredraft.target.zoo import TRAINED_HEADS, resolve_model
from foredraft.types import Request

MODEL, HEAD = "smollm2-135m-instruct", "smollm2-135m-instruct-eagle3"
PROMPTS = (
    "What is a lighthouse for?",
    "Write a Python function that adds up the even numbers of a list.",
    "Give me three tips for a good night's sleep.",
)


def test_heads_have_a_card_and_are_small() -> None:
    assert resolve_model(HEAD.upper()) == TRAINED_HEADS[HEAD]
    for folder in TRAINED_HEADS.values():
        assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) <= 16_000_000
        card = (folder / "README.md").read_text(encoding="utf-8")
        assert all(word in card for word in ("license: ", "base_model: ", "| command |", "| data |", "| position |"))


@pytest.mark.parametrize("tree_width", [1, 4])
def test_it_drafts_what_the_model_says_and_changes_nothing(tree_width: int) -> None:
    llm = LLM(MODEL, dtype="bfloat16")
    config = SpeculativeConfig(
        method="eagle3", model=HEAD, num_speculative_tokens=4 * tree_width, tree_width=tree_width, policy="fixed"
    )
    engine, plain = llm.new_engine(config), llm.new_engine(SpeculativeConfig())
    texts = []
    for each in (plain, engine):
        sequences = [
            each.add_request(
                Request(
                    str(number),
                    llm.chat_token_ids([{"role": "user", "content": prompt}]),
                    SamplingParams(temperature=0.0, max_tokens=40),
                )
            )
            for number, prompt in enumerate(PROMPTS)
        ]
        while each.has_unfinished_requests:
            each.step()
        texts.append([sequence.output_token_ids for sequence in sequences])
    if engine.contract == "token-identical":
        assert texts[0] == texts[1]
    emitted = sum(sequence.metrics.num_emitted_tokens for sequence in sequences)
    passes = sum(sequence.metrics.num_target_passes for sequence in sequences)
    assert emitted / passes > (1.5 if tree_width == 1 else 1.7), "a random head has 1.0"
