"""Tokens as bytes, for the kinds of tokenizer that language models use."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from foredraft.drafters.token_text import TokenText, shared_tokens
from foredraft.errors import IncompatibleDrafterError

KINDS = ("tokenizer", "gemma_tokenizer", "llama_tokenizer")
TEXTS = (
    "alpha beta, gamma",
    " the quick brown fox",
    "lo and the rest of it",
    "  two  spaces\n\n\tand a tab ",
    "Grüße, 你好 🙂",
    "\n",
    "<|end|> and <s> are <unk> words here <0x41>",
)


@pytest.fixture(params=KINDS)
def hugging_face(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture
def token_text(hugging_face: Any) -> TokenText:
    return TokenText(hugging_face, len(hugging_face) + 8, "tiny")


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_joined_are_the_text(token_text: TokenText, hugging_face: Any, text: str):
    """At the start of a text with the space that the tokenizer adds, elsewhere without; as it decodes them itself."""
    first = token_text.encode_start(text)
    assert token_text.spell(first) == (b" " if token_text.adds_space else b"") + text.encode()
    assert hugging_face.decode(first, clean_up_tokenization_spaces=False) == text
    later = token_text.encode(text)
    assert token_text.spell(later) == text.encode()
    assert None not in [token_text.pieces[index] for index in first + later]


def test_what_stands_before_a_text(tokenizer: Any, gemma_tokenizer: Any, llama_tokenizer: Any):
    """The begin token, if there is one; Llama's also adds a space."""
    texts = [TokenText(t, len(t), "tiny") for t in (tokenizer, gemma_tokenizer, llama_tokenizer)]
    assert [text.adds_space for text in texts] == [False, False, True]
    assert [text.start for text in texts] == [[], [1], [1]]


def test_special_tokens_have_no_text_and_the_callers_tokenizer_still_knows_them(
    token_text: TokenText, hugging_face: Any
):
    end = hugging_face.convert_tokens_to_ids("<|end|>")
    assert token_text.pieces[end] is None
    assert token_text.special["<|end|>"] == end
    assert end not in token_text.encode("<|end|>")
    assert end in hugging_face("<|end|>")["input_ids"]


def test_ids_without_a_token_have_no_text(token_text: TokenText, hugging_face: Any):
    """Padding of the embedding, and ids that no model has."""
    assert token_text.piece(len(hugging_face)) is None
    assert token_text.piece(len(hugging_face) + 1000) is None
    assert token_text.spell([5, len(hugging_face), 5]) == token_text.pieces[5]


def test_added_tokens_that_are_not_special_are_text(tokenizer: Any):
    """Gemma's line breaks are of this kind."""
    added = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()))
    added.add_special_tokens({"additional_special_tokens": ["<|pad|>"]})
    added.add_tokens(["~~~~"])
    text = TokenText(added, len(added), "tiny")
    index = added.convert_tokens_to_ids("~~~~")
    assert index == len(added) - 1
    assert text.encode("a~~~~b")[1] == index
    assert text.pieces[index] == b"~~~~"
    assert text.pieces[added.convert_tokens_to_ids("<|pad|>")] is None


def test_shared_tokens_spell_the_same_one_for_one(tokenizer: Any, gemma_tokenizer: Any):
    """Words, single bytes (of which Gemma's alphabet has some twice), and the special token that both have."""
    target, draft = (TokenText(t, len(t), "tiny") for t in (gemma_tokenizer, tokenizer))
    shared = shared_tokens(target, draft)
    assert len(set(shared.values())) == len(shared) > 256
    special = {target.special["<|end|>"]: draft.special["<|end|>"]}
    assert special.items() <= shared.items()
    assert all(target.pieces[i] == draft.pieces[j] for i, j in shared.items())
    assert shared[gemma_tokenizer.convert_tokens_to_ids("▁alpha")] == tokenizer.convert_tokens_to_ids("Ġalpha")
    letter, byte = (gemma_tokenizer.convert_tokens_to_ids(t) for t in ("a", "<0x61>"))
    assert target.pieces[letter] == target.pieces[byte] == b"a"
    assert letter in shared
    assert byte not in shared
    assert gemma_tokenizer.convert_tokens_to_ids("<0xF0>") in shared
    assert {j: i for i, j in shared.items()} == shared_tokens(draft, target)


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        (decoders.WordPiece(), "decodes by WordPiece"),
        (decoders.Sequence([decoders.Replace(Regex("_+"), " "), decoders.Fuse()]), "decodes by regular expression"),
        (None, "decodes by no decoder"),
    ],
)
def test_tokens_whose_text_depends_on_their_neighbours_are_refused(decoder: Any, reason: str):
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    if decoder is not None:
        words.decoder = decoder
    with pytest.raises(IncompatibleDrafterError, match=f"tokens of tiny .*{reason}.*byte-level or sentencepiece"):
        TokenText(PreTrainedTokenizerFast(tokenizer_object=words), 2, "tiny")


def test_a_model_without_tokenizer_is_refused():
    with pytest.raises(IncompatibleDrafterError, match="tiny has no tokenizer"):
        TokenText(None, 64, "tiny")
