"""Text from tokens: characters split over tokens, stop strings across tokens, what is held back and for how long."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from foredraft.engine.detokenize import WINDOW, Detokenizer

HYPOTHESIS = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def bytes_of(tokenizer, text: str) -> list[int]:
    """One token per byte, never a merge."""
    return [i for char in text for byte in char.encode() for i in _byte(tokenizer, byte)]


def _byte(tokenizer, byte: int) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(bytes_to_unicode()[byte])]


def streamed(tokenizer, ids, stop=(), keep_stop=False, blocks=None):
    """Append until a stop, taking text after every block; returns the pieces, the stop and the number of tokens."""
    detokenizer = Detokenizer(tokenizer, tuple(stop), keep_stop, True)
    pieces, found, used = [], None, 0
    sizes = iter(blocks or [])
    while used < len(ids) and found is None:
        for token in ids[used : used + next(sizes, 1)]:
            used += 1
            found = detokenizer.append(token)
            if found is not None:
                break
        finished = found is not None or used == len(ids)
        if finished:
            detokenizer.finish()
        pieces.append(detokenizer.take(finished))
    assert "".join(pieces) == detokenizer.text
    return pieces, found, used


@pytest.mark.parametrize("text", ["é", "naïve café", "日本語", "🙂👩‍👩‍👧", " a b ", "abcab", "\n\n"])
def test_characters_split_over_tokens_come_out_whole(byte_tokenizer, text):
    """Byte by byte: no replacement character is ever delivered and then taken back."""
    pieces, _, _ = streamed(byte_tokenizer, bytes_of(byte_tokenizer, text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@HYPOTHESIS
@given(text=st.text(max_size=20), blocks=st.lists(st.integers(1, 5), max_size=20), merged=st.booleans())
def test_blocks_and_single_tokens_give_the_same_text(byte_tokenizer, text, blocks, merged):
    """Speculation delivers blocks; the text is that of plain decoding."""
    ids = byte_tokenizer(text)["input_ids"] if merged else bytes_of(byte_tokenizer, text)
    single, _, _ = streamed(byte_tokenizer, ids)
    block, _, _ = streamed(byte_tokenizer, ids, blocks=blocks)
    assert "".join(single) == "".join(block) == text


@HYPOTHESIS
@given(
    text=st.text(alphabet="abcE é", max_size=25),
    stop=st.lists(st.text(alphabet="abcé ", min_size=1, max_size=4), min_size=1, max_size=3),
    blocks=st.lists(st.integers(1, 5), max_size=25),
    keep=st.booleans(),
)
@example(text="aabaab", stop=["aab"], blocks=[6], keep=False)
@example(text="xabc", stop=["abcd", "bc"], blocks=[4], keep=False)
def test_stop_strings_are_found_at_the_token_that_completes_them(byte_tokenizer, text, stop, blocks, keep):
    """Across tokens and across blocks; what is delivered is cut before (or after) the first that is complete."""
    ids = bytes_of(byte_tokenizer, text)
    single = streamed(byte_tokenizer, ids, stop, keep)
    block = streamed(byte_tokenizer, ids, stop, keep, blocks)
    assert ("".join(single[0]), *single[1:]) == ("".join(block[0]), *block[1:])
    ends = {s: text.find(s) + len(s) for s in stop if s in text}
    if not ends:
        assert single[1] is None
        assert "".join(single[0]) == text
        return
    end = min(ends.values())
    assert ends[single[1]] == end
    assert "".join(single[0]) == text[: end if keep else end - len(single[1])]
    assert single[2] == len(text[:end].encode())


def test_a_possible_stop_is_held_back_and_given_when_it_is_none(byte_tokenizer):
    """After ``a EN``: E and N wait; the X that follows frees them."""
    detokenizer = Detokenizer(byte_tokenizer, ("END",), False, True)
    given_out = []
    for token in bytes_of(byte_tokenizer, "aENXEN"):
        assert detokenizer.append(token) is None
        given_out.append(detokenizer.take(False))
    assert given_out == ["a", "", "", "ENX", "", ""]
    assert detokenizer.take(True) == "EN"


def test_with_the_stop_kept_nothing_is_held_back(byte_tokenizer):
    """It would be delivered in any case."""
    detokenizer = Detokenizer(byte_tokenizer, ("END",), True, True)
    given_out = []
    for token in bytes_of(byte_tokenizer, "aEND"):
        detokenizer.append(token)
        given_out.append(detokenizer.take(False))
    assert given_out == ["a", "E", "N", "D"]


def test_an_unfinished_character_is_given_at_the_end(byte_tokenizer):
    """The output ended by length in the middle of a character: the replacement sign, as the tokenizer decodes it."""
    ids = bytes_of(byte_tokenizer, "a🙂")[:-1]
    pieces, _, _ = streamed(byte_tokenizer, ids)
    assert "".join(pieces) == byte_tokenizer.decode(ids) == "a\ufffd"


def test_bytes_that_are_no_text_are_not_held_back_for_ever(byte_tokenizer):
    """A model that emits broken bytes still streams."""
    ids = _byte(byte_tokenizer, 0xFF) * (3 * WINDOW)
    pieces, _, _ = streamed(byte_tokenizer, ids)
    assert "".join(pieces) == "\ufffd" * len(ids)
    assert any(pieces[:-1])


def test_special_tokens_are_left_out_or_shown(byte_tokenizer):
    """As the request says."""
    ids = [*bytes_of(byte_tokenizer, "a"), byte_tokenizer.eos_token_id]
    for skip, text in ((True, "a"), (False, "a<eos>")):
        detokenizer = Detokenizer(byte_tokenizer, (), False, skip)
        for token in ids:
            detokenizer.append(token)
        assert detokenizer.take(True) == text


def test_without_a_tokenizer_there_is_no_text():
    """Token ids alone work."""
    detokenizer = Detokenizer(None, (), False, True)
    assert detokenizer.append(5) is None
    detokenizer.finish()
    assert detokenizer.take(True) == detokenizer.text == ""
