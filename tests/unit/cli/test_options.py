"""Options that commands share."""

import pytest

from foredraft.cli import options
from foredraft.errors import InvalidOptionError


def test_the_method_follows_from_the_draft_model():
    assert options.speculative_config(None, None, None).method == "ngram"
    assert options.speculative_config(None, "small", None).method == "draft_model"
    assert options.speculative_config("none", None, None).max_draft_tokens == 0
    assert options.speculative_config("ngram", None, 3).max_draft_tokens == 3
    assert options.speculative_config("ngram", None, 0).max_draft_tokens == 0
    assert not options.speculative_config(None, "small", None).use_heterogeneous_vocab
    other = options.speculative_config(None, "small", None, "slem")
    assert (other.use_heterogeneous_vocab, other.heterogeneous_vocab_method) == (True, "slem")


def test_a_number_of_draft_tokens_without_a_drafter_is_refused():
    with pytest.raises(InvalidOptionError, match="num_speculative_tokens=3 has no effect with method 'none'"):
        options.speculative_config("none", None, 3)


def test_lists_are_separated_by_commas():
    assert options.words("code, story,,long") == ("code", "story", "long")
    assert options.numbers("t", "0,0.7") == (0.0, 0.7)
    assert options.whole_numbers("b", "1,8") == (1, 8)
    assert options.words("") == ()
