"""A tiny target that chats, with a writer on it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from foredraft.testing import engine_for, random_model, tiny_config
from foredraft.train.writer import Recorder, Writer

LAYERS = (0, 1, 2, -1)
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="session")
def model() -> Any:
    return random_model(LlamaForCausalLM, tiny_config(vocab_size=320, max_position_embeddings=512), seed=0)


@pytest.fixture(scope="session")
def chat_tokenizer(tokenizer: Any) -> Any:
    chatty = copy.deepcopy(tokenizer)
    chatty.chat_template = TEMPLATE
    return chatty


@pytest.fixture
def new_writer(model: Any, chat_tokenizer: Any) -> Callable[..., Writer]:
    def make(**options: Any) -> Writer:
        settings = {"tokenizer": chat_tokenizer, "eos_token_ids": (chat_tokenizer.eos_token_id,), "max_num_seqs": 8}
        engine = engine_for(model, Recorder(LAYERS), num_speculative_tokens=0, **{**settings, **options})
        return Writer(engine, chat_tokenizer)

    return make
