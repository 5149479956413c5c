"""VOC: a draft model that speaks of other tokens is refused when the engine is built."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from foredraft import LLM, SamplingParams
from foredraft.errors import IncompatibleDrafterError
from foredraft.testing import noisy_copy, reference, tiny_model

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


def build(folder: Path, target: Any, draft: Any, target_tokenizer: Any, draft_tokenizer: Any) -> LLM:
    return LLM(
        saved(folder / "target", target, target_tokenizer),
        speculative_config={"method": "draft_model", "model": saved(folder / "draft", draft, draft_tokenizer)},
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
