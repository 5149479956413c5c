"""A growing text in another tokenizer's tokens: the same whatever the steps, and never wrong for long."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from foredraft.drafters.token_text import TokenText
from foredraft.drafters.translation import CHUNK, Translation

KINDS = ("tokenizer", "gemma_tokenizer", "llama_tokenizer")
PAIRS = list(itertools.permutations(KINDS, 2))
LONG = "the quick brown fox, gamma 12 delta\n  and the lazy dog; " * 14 + "ten sleeps"
assert len(LONG) > 5 * CHUNK


@pytest.fixture
def texts(request: pytest.FixtureRequest) -> dict[str, TokenText]:
    tokenizers = {kind: request.getfixturevalue(kind) for kind in KINDS}
    return {kind: TokenText(tokenizer, len(tokenizer), kind) for kind, tokenizer in tokenizers.items()}


@pytest.mark.parametrize(("source", "destination"), PAIRS)
@pytest.mark.parametrize("text", [LONG, "x" * 5 * CHUNK, "你好🙂" * CHUNK], ids=["words", "one word", "bytes"])
def test_the_steps_do_not_matter(texts: dict[str, TokenText], source: str, destination: str, text: str):
    """One token at a time gives what all at once gives; what is settled stays; and it spells the text."""
    tokens = [*texts[source].start, *texts[source].encode_start(text)]
    growing, at_once = (Translation(texts[source], texts[destination]) for _ in range(2))
    settled: list[int] = []
    for length in range(1, len(tokens) + 1):
        now = growing.extend(tokens[:length])
        assert now[: len(settled)] == settled
        settled = now[: growing.num_settled]
    assert growing.token_ids == at_once.extend(tokens)
    assert growing.num_settled == at_once.num_settled > 5
    assert not growing.ends_in_character
    start = texts[destination].start
    assert growing.token_ids[: len(start)] == start
    spelled = texts[destination].spell(growing.token_ids[len(start) :])
    assert spelled == (b" " if texts[destination].adds_space else b"") + text.encode()


@pytest.mark.parametrize(("source", "destination"), PAIRS)
def test_cuts_fall_where_the_tokenizer_cuts(texts: dict[str, TokenText], source: str, destination: str):
    """The tokens of the text as a whole, though it is cut in six: the cuts are before spaces."""
    target, draft = texts[source], texts[destination]
    translated = Translation(target, draft).extend(target.encode_start(LONG))
    assert translated == [*draft.start, *draft.encode_start(LONG)]


def test_a_word_is_read_anew_when_it_goes_on(texts: dict[str, TokenText]):
    """The pieces "alp" and "ha" are one token for the other tokenizer, once both are there."""
    source, destination = texts["tokenizer"], texts["gemma_tokenizer"]
    beginning, rest = source.encode("the alp"), source.encode("ha")
    translation = Translation(source, destination)
    before = list(translation.extend(beginning))
    after = translation.extend(beginning + rest)
    assert after == [*destination.start, *destination.encode("the alpha")]
    assert after[: len(before)] != before
    assert len(after) <= len(before)


def test_an_incomplete_character_is_held_back(texts: dict[str, TokenText]):
    source, destination = texts["tokenizer"], texts["gemma_tokenizer"]
    tokens = source.encode("a🙂")
    translation = Translation(source, destination)
    seen = [(len(translation.extend(tokens[:n])), translation.ends_in_character) for n in range(1, len(tokens) + 1)]
    assert seen == [(2, False), (2, True), (2, True), (2, True), (6, False)]


def test_bytes_that_are_no_text_do_not_stop_it(texts: dict[str, TokenText]):
    """A character broken off by a letter, by a special token, and a byte that begins nothing."""
    source, destination = texts["tokenizer"], texts["gemma_tokenizer"]
    first, *_ = source.encode("🙂")
    (alone,) = source.encode("é")[1:]
    end = source.special["<|end|>"]
    tokens = [first, *source.encode("a"), first, end, alone, *source.encode("b")]
    translated = Translation(source, destination).extend(tokens)
    spelled = [destination.spell([token]) for token in translated[1:]]
    assert b"".join(spelled).decode() == "�a��b"
    assert translated.count(destination.special["<|end|>"]) == 1


def test_special_tokens_go_by_content(texts: dict[str, TokenText]):
    """Known to both: itself. Begin token where one stands already, or unknown there: nothing."""
    gemma, llama, byte_level = texts["gemma_tokenizer"], texts["llama_tokenizer"], texts["tokenizer"]
    word = gemma.encode("alpha")
    tokens = [*gemma.start, *word, gemma.special["<|end|>"], *gemma.start, *word]
    end = llama.special["<|end|>"]
    assert Translation(gemma, llama).extend(tokens) == [
        *llama.start, *llama.encode_start("alpha"), end, *llama.start, *llama.encode("alpha")
    ]  # fmt: skip
    end = byte_level.special["<|end|>"]
    word = byte_level.encode("alpha")
    assert Translation(gemma, byte_level).extend(tokens) == [*word, end, *word]
    assert Translation(byte_level, gemma).extend([end]) == [*gemma.start, gemma.special["<|end|>"]]


def test_characters_that_the_other_cannot_say_are_left_out(
    texts: dict[str, TokenText], character_tokenizer: Callable[[str], Any]
):
    letters = TokenText(character_tokenizer("abc "), 4, "letters")
    source = texts["tokenizer"]
    assert Translation(source, letters).extend(source.encode("ab🙂 xc")) == [0, 1, 3, 2]
    assert Translation(source, letters).extend(source.encode("🙂")) == []
