"""Everything is cut at the same token, and counters are taken from what was delivered."""

from __future__ import annotations

import pytest

from foredraft.testing import OracleDrafter, engine_for, reference, run, scripted_model
from foredraft.types import SamplingParams

PROMPT = [1, 2, 3]
SCRIPT = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]


@pytest.fixture(scope="module")
def model():
    return scripted_model(SCRIPT, len(PROMPT))


def decoded(model, num_right, *, k=4, **options):
    engine_options = {name: options.pop(name) for name in ("eos_token_ids", "tokenizer") if name in options}
    drafter = None if num_right == "plain" else OracleDrafter([PROMPT + SCRIPT], 64, num_right)
    engine = engine_for(model, drafter, num_speculative_tokens=k, **engine_options)
    outputs = []
    params = SamplingParams(**{"temperature": 0, "max_tokens": 10, **options})
    (sequence,) = run(engine, [PROMPT], params, after_step=lambda _, out: outputs.extend(out))
    assert [t for out in outputs for t in out.token_ids] == sequence.output_token_ids
    assert "".join(out.text for out in outputs) == sequence.detokenizer.text
    return sequence, outputs


@pytest.mark.parametrize("num_right", ["plain", 0, 1, 3, None])
@pytest.mark.parametrize("place", range(8))
def test_a_stop_anywhere_in_a_block_cuts_there(model, num_right, place):
    """The stop token is the last that is delivered, wherever in the block it falls."""
    sequence, outputs = decoded(model, num_right, stop_token_ids=(SCRIPT[place],))
    assert sequence.output_token_ids == SCRIPT[: place + 1]
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", SCRIPT[place])
    assert outputs[-1].finish_reason == "stop"
    assert sequence.metrics.num_emitted_tokens == place + 1


@pytest.mark.parametrize("num_right", ["plain", None])
def test_an_end_token_has_no_stop_reason_and_may_be_ignored(model, num_right):
    """The model's own end is told apart from the request's; with ignore_eos it is a token like others."""
    sequence, _ = decoded(model, num_right, eos_token_ids=(SCRIPT[3],))
    assert (sequence.output_token_ids, sequence.finish_reason) == (SCRIPT[:4], "stop")
    assert sequence.stop_reason is None
    sequence, _ = decoded(model, num_right, eos_token_ids=(SCRIPT[3],), ignore_eos=True)
    assert (sequence.output_token_ids, sequence.finish_reason) == (SCRIPT[:10], "length")


@pytest.mark.parametrize("max_tokens", range(1, 9))
@pytest.mark.parametrize("k", [1, 4, 7])
def test_the_length_limit_is_exact(model, max_tokens, k):
    """A block never runs over max_tokens, and the draft is no longer than there is room."""
    sequence, _ = decoded(model, None, k=k, max_tokens=max_tokens)
    assert sequence.output_token_ids == SCRIPT[:max_tokens]
    metrics = sequence.metrics
    assert metrics.num_draft_tokens <= max_tokens - metrics.num_target_passes
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens


@pytest.mark.parametrize("num_right", [0, 2, None])
def test_counters_add_up(model, num_right):
    """Without a cut, emitted = accepted + passes; positions sum to the totals."""
    metrics = decoded(model, num_right)[0].metrics
    assert metrics.num_prompt_tokens == len(PROMPT)
    assert metrics.num_emitted_tokens == 10 == metrics.num_accepted_tokens + metrics.num_target_passes
    assert sum(metrics.drafted_per_position) == metrics.num_draft_tokens > 0
    assert sum(metrics.accepted_per_position) == metrics.num_accepted_tokens
    if num_right is not None:
        assert all(rate == (i < num_right) for i, rate in enumerate(metrics.acceptance_per_position))
        assert metrics.num_drafts > 1


def test_accepted_tokens_behind_a_stop_count_nowhere(model):
    """Four right drafts, a stop at the second: two are accepted."""
    metrics = decoded(model, None, stop_token_ids=(SCRIPT[1],))[0].metrics
    assert (metrics.num_draft_tokens, metrics.num_accepted_tokens, metrics.num_target_passes) == (4, 2, 1)
    assert metrics.accepted_per_position == [1, 1, 0, 0]
    assert metrics.num_emitted_tokens == 2


def test_logprobs_are_cut_with_the_tokens(model):
    """One entry a delivered token, in every output and in all."""
    sequence, outputs = decoded(model, None, stop_token_ids=(SCRIPT[6],), logprobs=2)
    assert all(len(out.logprobs) == len(out.token_ids) for out in outputs)
    assert len(sequence.logprobs) == 7
    assert all(next(iter(entry)) == token for entry, token in zip(sequence.logprobs, SCRIPT, strict=False))


def test_a_stop_before_min_tokens_is_banned_in_drafts_too(model):
    """min_tokens: the stop token is not emitted before, though the drafter proposes it."""
    params = SamplingParams(temperature=0, max_tokens=8, min_tokens=4, stop_token_ids=(SCRIPT[2],))
    expected = reference(model, PROMPT, params).token_ids
    options = {"max_tokens": 8, "min_tokens": 4, "stop_token_ids": (SCRIPT[2],)}
    sequence, _ = decoded(model, None, **options)
    assert sequence.output_token_ids == expected
    assert SCRIPT[2] not in sequence.output_token_ids[:4]


class LetterTokenizer:
    """Token 10 is ``a``, 11 is ``b``, and so on."""

    def decode(self, ids, **_):
        return "".join(chr(ord("a") + i - 10) for i in ids)


@pytest.mark.parametrize("num_right", ["plain", 1, None])
@pytest.mark.parametrize("keep", [False, True])
def test_a_stop_string_cuts_text_and_tokens(model, num_right, keep):
    """``def`` is complete at the sixth token; the text ends before it, the tokens with it."""
    sequence, _ = decoded(
        model, num_right, tokenizer=LetterTokenizer(), stop=("zzz", "def"), include_stop_str_in_output=keep
    )
    assert sequence.output_token_ids == SCRIPT[:6]
    assert sequence.detokenizer.text == ("abcdef" if keep else "abc")
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", "def")


@pytest.mark.parametrize("num_right", ["plain", None])
def test_a_stop_string_before_min_tokens_cuts_nothing(model, num_right):
    """The output goes on, and so does the text."""
    sequence, _ = decoded(model, num_right, tokenizer=LetterTokenizer(), stop="bc", min_tokens=5)
    assert sequence.output_token_ids == SCRIPT[:10]
    assert sequence.detokenizer.text == "abcdefghij"
