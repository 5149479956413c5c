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


def test_a_number_of_draft_tokens_without_a_drafter_is_refused():
    with pytest.raises(InvalidOptionError, match="num_speculative_tokens=3 has no effect with method 'none'"):
        options.speculative_config("none", None, 3)


def test_more_options_come_as_json_behind_the_command_line_s_own():
    more = '{"method": "suffix", "suffix_decoding_max_cached_requests": 5, "num_speculative_tokens": 9}'
    config = options.speculative_config(None, None, None, more)
    assert (config.method, config.suffix_decoding_max_cached_requests, config.max_draft_tokens) == ("suffix", 5, 9)
    config = options.speculative_config("ngram+suffix", None, 3, more)
    assert (config.method, config.max_draft_tokens) == ("ngram+suffix", 3)
    assert options.speculative_config(None, None, None, '{"model": "small"}').method == "draft_model"
    for wrong, message in (("[1]", "is not an object"), ("{", "is not JSON"), ('{"x": 1}', "has no option 'x'")):
        with pytest.raises(InvalidOptionError, match=message):
            options.speculative_config(None, None, None, wrong)


def test_lists_are_separated_by_commas():
    assert options.words("code, story,,long") == ("code", "story", "long")
    assert options.numbers("t", "0,0.7") == (0.0, 0.7)
    assert options.whole_numbers("b", "1,8") == (1, 8)
    assert options.words("") == ()
