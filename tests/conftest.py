"""What tests of several folders share: the tiny target with its draft model, and a tokenizer made on the spot."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from foredraft.testing import noisy_copy, tiny_model

CORPUS = [
    "the quick brown fox jumps over the lazy dog and the dog sleeps on",
    "alpha beta gamma delta epsilon zeta eta theta, alpha beta gamma delta",
    "a b c d e f g h, one two three four five six seven eight nine ten",
]
NUM_THREADS = torch.get_num_threads()
ON_ALL_CORES = {"integration", "target"}
"""Folders of the real model and of the kernels, which split their work among threads."""


def pytest_collection_finish() -> None:
    """The garbage collection of every load, and Python's own, need not go through what was imported."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A pass of a tiny model takes half as long on one thread: two spend the time waiting for each other."""
    torch.set_num_threads(NUM_THREADS if ON_ALL_CORES & set(item.path.parts) else 1)


@pytest.fixture(scope="session")
def tiny() -> Any:
    """TINY-T, a transformers model; do not change it."""
    return tiny_model(0)


@pytest.fixture(scope="session")
def tiny_draft(tiny: Any) -> Any:
    """TINY-D: about half of its drafts are accepted by ``tiny``."""
    return noisy_copy(tiny)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE: any text goes in, rare words and other scripts come apart into bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


@pytest.fixture(scope="session")
def gemma_tokenizer() -> PreTrainedTokenizerFast:
    """Sentencepiece as in Gemma: a mark for each space, single bytes for what it does not know, a begin token."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _with_begin(_train_with_bytes(tokenizer))


@pytest.fixture(scope="session")
def llama_tokenizer() -> PreTrainedTokenizerFast:
    """Sentencepiece as in Llama 2: every text gets a space before it, which decoding takes off again."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return _with_begin(_train_with_bytes(tokenizer))


@pytest.fixture(scope="session")
def character_tokenizer() -> Callable[[Sequence[str]], PreTrainedTokenizerFast]:
    """Makes a tokenizer of single characters; the ids are their places."""

    def make(characters: Sequence[str]) -> PreTrainedTokenizerFast:
        tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(characters)}, []))
        tokenizer.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer)

    return make


def _train_with_bytes(tokenizer: Tokenizer) -> Tokenizer:
    single_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", "<s>", "<|end|>"]
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # so that no token learns two words
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=[*special, *single_bytes], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    content = json.loads(tokenizer.to_str())
    content["pre_tokenizer"] = None
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in special]
    return Tokenizer.from_str(json.dumps(content))


def _with_begin(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    begin = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|end|>", unk_token="<unk>")
