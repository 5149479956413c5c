"""Texts of the user's own, in the forms that are about."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from foredraft.errors import InvalidOptionError
from foredraft.train.files import PIECE, WINDOW, FromFiles, messages_of
from foredraft.train.writer import AS_IT_STANDS, Ask

QUESTION, ANSWER = "the quick brown fox?", "the lazy dog."
OPENAI = {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]}
SHAREGPT = {"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]}
IN_PARTS = {"messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]}


def asks(source: FromFiles) -> list[Ask]:
    return [next(task) for piece in range(source.num_pieces) for task in source.tasks(piece, set())]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "chats.jsonl"


def write(file: Path, *records: Any) -> Path:
    file.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return file


@pytest.mark.parametrize("record", [OPENAI, SHAREGPT, IN_PARTS, {"prompt": QUESTION}, {"turns": [QUESTION, "more"]}])
def test_all_forms_ask_the_same(file: Path, chat_tokenizer: Any, record: dict[str, Any]) -> None:
    (ask,) = asks(FromFiles([write(file, {**record, "category": "foxes"})], chat_tokenizer, 512, max_tokens=20))
    assert chat_tokenizer.decode(ask.token_ids) == f"[user]{QUESTION}<|end|>[assistant]"
    assert (ask.route, ask.num_prompt_tokens, ask.params.max_tokens) == ("foxes", None, 20)


def test_given_answers_are_read(file: Path, chat_tokenizer: Any) -> None:
    (ask,) = asks(FromFiles([write(file, OPENAI)], chat_tokenizer, 512, answers="given"))
    prompt, answer = ask.token_ids[: ask.num_prompt_tokens], ask.token_ids[ask.num_prompt_tokens :]
    assert chat_tokenizer.decode(prompt) == f"[user]{QUESTION}<|end|>[assistant]"
    assert chat_tokenizer.decode(answer) == f"{ANSWER}<|end|>"
    assert (ask.params, ask.route) == (AS_IT_STANDS, "chat")
    with pytest.raises(InvalidOptionError, match="line 2 ends with a request"):
        FromFiles([write(file, OPENAI, {"prompt": QUESTION})], chat_tokenizer, 512, answers="given")
    with pytest.raises(InvalidOptionError, match="answers='new'"):
        FromFiles([file], chat_tokenizer, 512, answers="new")


def test_texts_are_read_in_windows(tmp_path: Path, file: Path, chat_tokenizer: Any) -> None:
    page = " ".join(str(number) for number in range(1000))
    plain = tmp_path / "page.txt"
    plain.write_text(page, encoding="utf-8")
    whole = chat_tokenizer(page)["input_ids"]
    assert len(whole) > 2 * WINDOW
    from_text = asks(FromFiles([plain], chat_tokenizer, 1024))
    from_line = asks(FromFiles([write(file, {"text": page})], chat_tokenizer, 1024))
    assert [ask.token_ids for ask in from_text] == [ask.token_ids for ask in from_line]
    assert [token for ask in from_text for token in ask.token_ids] == whole
    assert {ask.num_prompt_tokens for ask in from_text} == {1}


def test_pieces_hold_each_prompt_once(file: Path, chat_tokenizer: Any) -> None:
    prompts = [{"prompt": f"number {i % (PIECE + 5)}"} for i in range(2 * PIECE)]
    source = FromFiles([write(file, *prompts)], chat_tokenizer, 512)
    assert source.num_pieces == 2
    assert [len(source.tasks(piece, set())) for piece in range(2)] == [PIECE, 5]
    assert source.recipe == FromFiles([file], chat_tokenizer, 512).recipe
    assert source.recipe != FromFiles([file], chat_tokenizer, 512, seed=1).recipe
    assert source.recipe != FromFiles([write(file, *prompts[:9])], chat_tokenizer, 512).recipe


def test_long_prompts_are_left_out_and_counted(
    file: Path, chat_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    records = {"prompt": "short"}, {"prompt": "long " * 200}
    with caplog.at_level(logging.WARNING):
        source = FromFiles([write(file, *records)], chat_tokenizer, 256, max_tokens=128)
    assert len(asks(source)) == 1
    assert "1 of 2 texts are left out" in caplog.text
    with pytest.raises(InvalidOptionError, match="no text to train on"):
        FromFiles([write(file, records[1])], chat_tokenizer, 256, max_tokens=128)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"title": "x"}, "it has 'title'"),
        ({"messages": [{"role": "user"}]}, "has a message that is none"),
        ({"messages": [{"role": "assistant", "content": "yes"}]}, "no message of the role 'user'"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(
    file: Path, chat_tokenizer: Any, record: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidOptionError, match="line 1") as caught:
        FromFiles([write(file, record)], chat_tokenizer, 512)
    assert message in str(caught.value)


def test_roles_of_sharegpt_are_translated() -> None:
    turns = [{"from": "system", "value": "Be kind."}, *SHAREGPT["conversations"]]
    assert [message["role"] for message in messages_of({"conversations": turns}, "here")] == [
        "system",
        "user",
        "assistant",
    ]
