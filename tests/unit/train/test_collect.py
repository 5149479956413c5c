"""Collecting texts: enough of them, none twice, and the same ones after a kill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foredraft.errors import InvalidOptionError
from foredraft.train import own_words
from foredraft.train.collect import collect
from foredraft.train.dataset import StoreMeta, TextStore
from foredraft.train.own_words import OwnWords
from foredraft.train.writer import Task, Writer

from .conftest import LAYERS
from .test_dataset import same

META = StoreMeta(target="tiny", fingerprint="0", layers=LAYERS, hidden_size=64, vocab_size=320)


@pytest.fixture
def source(chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> OwnWords:
    """Pieces of a few short texts."""
    monkeypatch.setattr(own_words, "PIECE", {"summary": 3, "code": 2, "chat": 5})
    monkeypatch.setattr(own_words, "QUESTION_TOKENS", 30)
    return OwnWords(chat_tokenizer, 512, max_tokens=6)


class Killed(BaseException):
    """Ends a run anywhere, as a signal would."""


def test_a_killed_run_goes_on_as_if_it_had_not_been(
    tmp_path: Path, source: OwnWords, new_writer: Callable[..., Writer]
) -> None:
    whole = collect(TextStore(tmp_path / "whole", META), source, new_writer(), num_pieces=2)

    killed = collect(TextStore(tmp_path / "killed", META), source, new_writer(), num_pieces=1)
    writer = new_writer()
    step, passes = writer.engine.step, []

    def step_or_die() -> Any:
        passes.append(1)
        if len(passes) > 40:
            raise Killed
        return step()

    writer.engine.step = step_or_die  # type: ignore[method-assign]
    with pytest.raises(Killed):
        collect(killed, source, writer, num_pieces=2)
    assert TextStore(tmp_path / "killed").num_pieces == 1

    again = collect(TextStore(tmp_path / "killed", META), source, new_writer(), num_pieces=2)
    assert again.num_pieces == whole.num_pieces == 2
    assert len(again) == len(whole) > 8
    assert all(same(one, other) for one, other in zip(again, whole, strict=True))


def test_collecting_ends_when_there_are_enough(
    tmp_path: Path, source: OwnWords, new_writer: Callable[..., Writer]
) -> None:
    store, writer = TextStore(tmp_path, META), new_writer()
    collect(store, source, writer, num_pieces=1)
    assert store.tokens_per_second > 0
    tokens = store.num_tokens
    collect(store, source, writer, num_tokens=tokens)
    assert store.num_pieces == 1
    collect(store, source, writer, num_tokens=tokens + 1)
    assert store.num_pieces == 2
    prompts = {tuple(text.token_ids[: text.num_prompt_tokens].tolist()) for text in store}
    assert len(prompts) == len(store)


def test_a_source_that_brings_nothing_is_named(tmp_path: Path, new_writer: Callable[..., Writer]) -> None:
    class Silent:
        recipe, num_pieces = "nothing", None

        def tasks(self, piece: int, seen: set[int]) -> list[Task]:
            return []

    with pytest.raises(InvalidOptionError, match="piece 0 brought no text"):
        collect(TextStore(tmp_path, META), Silent(), new_writer(), num_pieces=1)
    with pytest.raises(InvalidOptionError, match="give one of the two"):
        collect(TextStore(tmp_path, META), Silent(), new_writer())
