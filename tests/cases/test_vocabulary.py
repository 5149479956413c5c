"""VOC: a draft model that speaks of other tokens is refused when the engine is built, or reads the text in its own."""

from __future__ import annotations

import copy
import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, PreTrainedTokenizerFast

from foredraft import LLM, SamplingParams
from foredraft.config import HETEROGENEOUS_VOCAB_METHODS
from foredraft.errors import IncompatibleDrafterError
from foredraft.testing import last_logits, noisy_copy, random_model, reference, tiny_config, tiny_model

PROMPT = [5, 6, 7]


def changed(tokenizer: PreTrainedTokenizerFast, *, swap: bool = False, eos: str = "<|end|>") -> Any:
    """A copy with ids 10 and 11 swapped, or with another end token."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    if swap:
        vocab = content["model"]["vocab"]
        names = {index: token for token, index in vocab.items()}
        vocab[names[10]], vocab[names[11]] = 11, 10
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)), eos_token=eos)


@pytest.fixture(scope="module")
def target(tokenizer: Any) -> Any:
    return tiny_model(0, vocab_size=len(tokenizer))


def saved(folder: Path, model: Any, tokenizer: Any) -> str:
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


def build(
    folder: Path, target: Any, draft: Any, target_tokenizer: Any, draft_tokenizer: Any, **speculative: Any
) -> LLM:
    model = saved(folder / "draft", draft, draft_tokenizer)
    return LLM(
        saved(folder / "target", target, target_tokenizer),
        speculative_config={"method": "draft_model", "model": model, "policy": "fixed", **speculative},
        dtype="float32",
        numerics="fast",
    )


def test_o25_swapped_ids_are_named(tmp_path: Path, target: Any, tokenizer: Any):
    names = {index: token for token, index in tokenizer.get_vocab().items()}
    with pytest.raises(IncompatibleDrafterError) as raised:
        build(tmp_path, target, target, tokenizer, changed(tokenizer, swap=True))
    message = str(raised.value)
    assert "token id 10 " in message
    assert repr(names[10]) in message
    assert repr(names[11]) in message
    assert "same family" in message
    assert "use_heterogeneous_vocab=True" in message


def test_o25_another_end_token_is_refused(tmp_path: Path, target: Any, tokenizer: Any):
    other = tokenizer.convert_ids_to_tokens(11)
    with pytest.raises(IncompatibleDrafterError, match="ends texts with token id 11, the target with 0"):
        build(tmp_path, target, target, tokenizer, changed(tokenizer, eos=other))


def test_o25_equal_tokenizers_load_and_draft(tmp_path: Path, target: Any, tokenizer: Any):
    llm = build(tmp_path, target, noisy_copy(target), tokenizer, copy.deepcopy(tokenizer))
    (out,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=16))
    assert out.outputs[0].token_ids == reference(target, PROMPT, SamplingParams(temperature=0, max_tokens=16)).token_ids
    assert out.metrics.num_accepted_tokens > 0


def test_o25_without_tokenizers_equal_sizes_load_with_a_warning(tmp_path: Path, target: Any):
    with pytest.warns(UserWarning, match="only the vocabulary size was checked"):
        build(tmp_path, target, noisy_copy(target), None, None)


def test_o25_without_tokenizers_other_sizes_are_refused(tmp_path: Path, target: Any):
    other = tiny_model(0, vocab_size=64)
    with pytest.raises(IncompatibleDrafterError, match="has 64 tokens and the target 320"):
        build(tmp_path, target, other, None, None)


def test_o25_a_padded_vocabulary_is_accepted(tmp_path: Path, target: Any, tokenizer: Any):
    """Embeddings of 384 rows for the same 320 tokens; drafts never leave the target's vocabulary."""
    padded = tiny_model(0, vocab_size=384)
    llm = build(tmp_path, target, padded, tokenizer, copy.deepcopy(tokenizer))
    (out,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=16))
    assert out.outputs[0].token_ids == reference(target, PROMPT, SamplingParams(temperature=0, max_tokens=16)).token_ids
    assert out.metrics.num_draft_tokens > 0


TEN_LINES = [f"Numbers: {n}, {n + 1}, {n + 2}, and {n + 3}; count, count on" for n in range(10)]
CHARACTERS = string.ascii_letters + string.digits + " ,.:;"


def pairs() -> Any:
    """Byte pairs learned from ten lines; the single bytes are in the vocabulary too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        TEN_LINES, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def watch(llm: LLM, draft: Any) -> list[tuple[int, int]]:
    """Check each pass of the draft model against one without a cache, over its own text and what it drafted.

    Returns:
        as the engine runs, per pass the tokens that the draft model has read and those of its text among them.
    """
    drafter: Any = llm.engine.drafter
    model, passes = drafter._inner.model, []
    forward = model.forward

    def watched(rows: Any) -> torch.Tensor:
        logits = forward(rows)
        for row in rows:
            if row.num_logits:
                text = drafter._translations[row.sequence_id].token_ids
                read = [*drafter._inner._fed[row.sequence_id], *row.token_ids]
                assert len(read) == model.slots.length(row.sequence_id) + len(row.token_ids)
                assert read[: len(text)] == text
                assert torch.allclose(logits[0], last_logits(draft, read), atol=1e-4)
                passes.append((len(read), len(text)))
        return logits

    model.forward = watched
    return passes


@pytest.mark.parametrize("method", HETEROGENEOUS_VOCAB_METHODS)
@pytest.mark.parametrize("target_has", ["characters", "pairs"])
def test_o26_the_draft_model_counts_its_own_tokens(
    tmp_path: Path, character_tokenizer: Callable[[str], Any], target_has: str, method: str
):
    """A draft model with absolute positions, 64 of them, for a text that has more and fewer tokens in its own."""
    prompt, params = "Numbers: 1, 2, 3,", SamplingParams(temperature=0, max_tokens=20)
    tokenizers = [character_tokenizer(CHARACTERS), pairs()]
    target_tokenizer, draft_tokenizer = tokenizers if target_has == "characters" else tokenizers[::-1]
    target = random_model(LlamaForCausalLM, tiny_config(vocab_size=len(target_tokenizer)), 0)
    config = GPT2Config(
        vocab_size=len(draft_tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=2, initializer_range=0.4,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    draft = random_model(GPT2LMHeadModel, config, 1)
    llm = build(
        tmp_path, target, draft, target_tokenizer, draft_tokenizer, num_speculative_tokens=4,
        use_heterogeneous_vocab=True, heterogeneous_vocab_method=method,
    )  # fmt: skip
    passes = watch(llm, draft)
    (out,) = llm.generate(prompt, params)
    assert out.outputs[0].token_ids == reference(target, out.prompt_token_ids, params).token_ids
    assert out.metrics.num_draft_tokens > out.metrics.num_accepted_tokens
    assert len(out.metrics.drafted_per_position) > 1
    lengths = [read - text for read, text in passes]
    assert set(lengths) == {0, 1, 2, 3}
    shorter = len(draft_tokenizer(prompt)["input_ids"]) < len(out.prompt_token_ids)
    assert shorter == (target_has == "characters")
