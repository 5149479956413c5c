"""A byte-level tokenizer with a few merges, small enough for the tiny models."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

MERGES = [("a", "b"), ("ab", "c"), ("Ġ", "a"), ("E", "N"), ("Ã", "©")]
EOS = "<eos>"


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are bytes in the order of the alphabet, then the merges, then ``<eos>``."""
    tokens = [*sorted(ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS)
