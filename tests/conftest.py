"""What tests of several folders share: the tiny target with its draft model, and a tokenizer made on the spot."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from foredraft.testing import noisy_copy, tiny_model

CORPUS = [
    "the quick brown fox jumps over the lazy dog and the dog sleeps on",
    "alpha beta gamma delta epsilon zeta eta theta, alpha beta gamma delta",
    "a b c d e f g h, one two three four five six seven eight nine ten",
]


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
