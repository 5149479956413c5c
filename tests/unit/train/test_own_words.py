"""Requests that the target writes itself: their openings, what is dropped, what follows an answer."""

from __future__ import annotations

import random
from typing import Any

import pytest

from foredraft.train import openings
from foredraft.train.dataset import origin_of
from foredraft.train.own_words import PIECE, OwnWords, follow_up, whole_question
from foredraft.train.writer import Ask, Task, Written


def drive(task: Task, answers: list[Written]) -> list[Ask]:
    """What a task asks for when it is told these answers."""
    asks = [next(task)]
    for answer in answers:
        try:
            asks.append(task.send(answer))
        except StopIteration:
            break
    return asks


def asked(tokenizer: Any, ask: Ask) -> str:
    return str(tokenizer.decode(ask.token_ids))


def test_a_request_grows_from_the_bare_template(chat_tokenizer: Any) -> None:
    source = OwnWords(chat_tokenizer, 512)
    tasks = source.tasks(0, set())
    assert len(tasks) == sum(PIECE.values())
    beginnings = [asked(chat_tokenizer, next(task)) for task in tasks]
    assert all(text.startswith("[user]") and "[assistant]" not in text for text in beginnings)
    assert len(set(beginnings)) > 40
    again = [asked(chat_tokenizer, next(task)) for task in source.tasks(0, set())]
    assert again == beginnings
    other = [asked(chat_tokenizer, next(task)) for task in source.tasks(1, set())]
    assert len(set(other) & set(beginnings)) < 10


def test_a_summary_is_asked_for_behind_the_passage(chat_tokenizer: Any) -> None:
    task = OwnWords(chat_tokenizer, 512).tasks(0, set())[0]
    first = next(task)
    opening = asked(chat_tokenizer, first).removeprefix("[user]")
    passage = task.send(Written(" and all that belongs to it", False))
    summary = task.send(Written("Bees live in hives.", False))
    prompt = asked(chat_tokenizer, passage)
    assert prompt == f"[user]{opening} and all that belongs to it<|end|>[assistant]"
    assert asked(chat_tokenizer, summary).endswith("\n\nBees live in hives.<|end|>[assistant]")
    assert (first.route, passage.route, summary.route) == (None, "general", "summary")
    assert passage.origin == summary.origin == origin_of(passage.token_ids)
    with pytest.raises(StopIteration):
        task.send(Written("Bees.", False))


def test_code_is_edited_without_the_words_around_it() -> None:
    answer = "Here it is:\n\n```python\ndef f(x):\n    return x\n```\nIt returns x."
    request = follow_up("code", answer, random.Random(0))
    instruction, _, code = request.partition("\n\n")
    assert instruction in openings.EDITS
    assert code == "def f(x):\n    return x\n"
    cut = follow_up("code", "```python\ndef g(", random.Random(0))
    assert cut.endswith("\n\ndef g(\n")


def test_no_request_is_answered_twice(chat_tokenizer: Any) -> None:
    seen: set[int] = set()
    source = OwnWords(chat_tokenizer, 512)
    written = [Written(" is it that we see here?", False), Written("Yes.", False)]
    chat = -1
    assert len(drive(source.tasks(0, seen)[chat], written)) == 2
    assert len(drive(source.tasks(0, seen)[chat], written)) == 1


def test_what_leaves_no_room_for_an_answer_is_dropped(chat_tokenizer: Any) -> None:
    written = [Written(" is it that we see here?", False), Written("Yes.", False)]
    assert len(drive(OwnWords(chat_tokenizer, 100, max_tokens=95).tasks(0, set())[-1], written)) == 1


def test_half_of_the_answers_are_greedy(chat_tokenizer: Any) -> None:
    tasks = [task for piece in range(4) for task in OwnWords(chat_tokenizer, 512).tasks(piece, set())]
    params = []
    for number, task in enumerate(tasks):
        next(task)
        params.append(task.send(Written(f" is number {number} of them?", False)).params)
    greedy = sum(each.is_greedy for each in params)
    assert 60 <= greedy <= 132  # of 192; beyond this once in 10 million
    assert {each.temperature for each in params} == {0.0, 0.8}
    assert len({each.seed for each in params}) == len(params)


def test_a_model_without_a_chat_template_goes_on_from_its_own_text(tokenizer: Any) -> None:
    source = OwnWords(tokenizer, 512)
    first, second = drive(source.tasks(0, set())[0], [Written(" and so on", False)])
    assert asked(tokenizer, second) == asked(tokenizer, first) + " and so on"
    assert second.route == "general"


@pytest.mark.parametrize(
    ("text", "is_cut", "kept"),
    [
        ("How do I\nbake  bread?", False, "How do I bake bread?"),
        ("How do I bake bread? I tried it and", True, "How do I bake bread?"),
        ("How do I bake bread and then", True, None),
        ("Summarize the following text", False, None),
        ("Translate these words to French:", False, None),
        ("What?", False, None),
    ],
)
def test_requests_are_whole(text: str, is_cut: bool, kept: str | None) -> None:
    assert whole_question(text, is_cut) == kept


def test_lists_of_openings_hold_nothing_twice() -> None:
    lists = {name: value for name, value in vars(openings).items() if isinstance(value, tuple)}
    assert len(lists) == 9
    for name, values in lists.items():
        assert len(set(values)) == len(values), name
    assert all(openings.SUBJECTS)
