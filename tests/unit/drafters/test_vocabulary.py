"""Two models speak of the same tokens: compared by content; the first id that differs is named."""

from __future__ import annotations

import pytest

from foredraft.drafters.vocabulary import check_same_vocabulary
from foredraft.errors import IncompatibleDrafterError


class Words:
    def __init__(self, *tokens, eos=0):
        self._tokens, self.eos_token_id = tokens, eos

    def get_vocab(self):
        return {token: i for i, token in enumerate(self._tokens) if token is not None}


TARGET = Words("<eos>", "a", "b", "c")


def test_the_same_words_are_accepted_whatever_the_padding():
    """Embeddings padded to 64 or to 128 rows are no difference."""
    check_same_vocabulary(TARGET, Words("<eos>", "a", "b", "c"), 128, 64, "tiny")
    check_same_vocabulary(TARGET, Words("<eos>", "a", "b", "c"), 64, 128, "tiny")


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Words("<eos>", "a", "x", "y"), "draft model tiny .* token id 2 is 'x' there and 'b' in the target"),
        (Words("<eos>", "b", "a", "c"), "token id 1 is 'b' there and 'a' in the target"),
        (Words("<eos>", "a", "b"), "token id 3 is None there and 'c' in the target"),
        (Words("<eos>", "a", "b", "c", "d"), "token id 4 is 'd' there and None in the target"),
        (Words("<eos>", None, "b", "c"), "token id 1 is None there and 'a'"),
    ],
)
def test_the_first_id_that_differs_is_named_with_both_strings(draft, message):
    """Also where the sizes are equal, and where one has more words."""
    with pytest.raises(IncompatibleDrafterError, match=message):
        check_same_vocabulary(TARGET, draft, 4, 4, "tiny")


def test_another_end_of_text_is_refused():
    """The draft would end texts elsewhere."""
    with pytest.raises(IncompatibleDrafterError, match="ends texts with token id 3, the target with 0"):
        check_same_vocabulary(TARGET, Words("<eos>", "a", "b", "c", eos=3), 4, 4, "tiny")


@pytest.mark.parametrize(("target", "draft"), [(None, TARGET), (TARGET, None), (None, None)])
def test_without_a_tokenizer_only_sizes_are_compared(target, draft):
    """Equal sizes warn, others are refused with the remedy."""
    with pytest.warns(UserWarning, match="no tokenizer to compare draft model tiny by"):
        check_same_vocabulary(target, draft, 64, 64, "tiny")
    with pytest.raises(IncompatibleDrafterError, match="has 60 tokens and the target 64.*give both models a tokenizer"):
        check_same_vocabulary(target, draft, 64, 60, "tiny")
