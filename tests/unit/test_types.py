"""Sampling parameters and metrics: every refusal names the value, the limit and what to do."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from foredraft.errors import ForedraftError, InvalidOptionError
from foredraft.types import Draft, FinishReason, RequestMetrics, SamplingParams, Verdict


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature=-0.1 is outside \[0, inf\]; use 0 for greedy decoding"),
        ({"temperature": float("nan")}, "temperature=nan is outside"),
        ({"top_k": -2}, r"top_k=-2 is outside \[-1, inf\]; use 0 to keep all"),
        ({"top_p": 0.0}, r"top_p=0.0 is outside \(0, 1\]; use 1 to keep all"),
        ({"top_p": 1.1}, r"top_p=1.1 is outside \(0, 1\]; use 1 to keep all"),
        ({"min_p": 1.5}, r"min_p=1.5 is outside \[0, 1\]; use 0 to keep all"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be above 0; 1 means none"),
        ({"presence_penalty": 2.5}, r"presence_penalty=2.5 is outside \[-2, 2\]; 0 means none"),
        ({"frequency_penalty": -3}, r"frequency_penalty=-3 is outside \[-2, 2\]; 0 means none"),
        ({"max_tokens": 0}, r"max_tokens=0 is outside \[1, inf\]; ask for at least one"),
        ({"min_tokens": -1}, r"min_tokens=-1 is outside \[0, 16\]"),
        ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens=9 is outside \[0, 8\]; it cannot exceed max_tokens"),
        ({"logprobs": 101}, r"logprobs=101 is outside \[0, 100\]; 0 returns"),
        ({"logprobs": -1}, r"logprobs=-1 is outside \[0, 100\]"),
        ({"seed": -1}, "seed=-1 is outside .*use a non-negative 63-bit integer"),
        ({"seed": 2**63}, "seed=9223372036854775808 is outside"),
        ({"allowed_token_ids": ()}, "allowed_token_ids is empty.*use None to allow all"),
        ({"stop": ("a", "")}, "stop contains an empty string.*leave it out"),
        ({"stop": ""}, "stop contains an empty string"),
    ],
)
def test_a_value_out_of_range_is_refused(options, message):
    """Also the quiet ones: NaN, 0 where it must be above, an empty list."""
    with pytest.raises(InvalidOptionError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": -1},
        {"top_k": 0},
        {"top_p": 1.0},
        {"min_p": 1.0},
        {"logprobs": 0},
        {"seed": 0},
        {"seed": 2**63 - 1},
        {"max_tokens": None, "min_tokens": 10_000},
        {"min_tokens": 8, "max_tokens": 8},
        {"temperature": 0},
    ],
)
def test_the_ends_of_the_ranges_are_allowed(options):
    """0 and None are values, not missing ones."""
    SamplingParams(**options)


def test_an_unknown_option_names_the_nearest():
    """A typing error must not be dropped in silence."""
    with pytest.raises(
        InvalidOptionError, match="SamplingParams has no option 'temprature'; did you mean 'temperature'"
    ):
        SamplingParams.from_options({"temprature": 1})
    with pytest.raises(InvalidOptionError, match="no option 'zzz'; known options: temperature, top_k"):
        SamplingParams.from_options({"zzz": 1})
    assert SamplingParams.from_options({"top_k": 3}) == SamplingParams(top_k=3)


def test_one_stop_string_is_not_taken_for_its_letters():
    """stop="ab" is one string, and lists become tuples that cannot change afterwards."""
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    ids = [1, 2]
    params = SamplingParams(stop_token_ids=ids, allowed_token_ids=ids, banned_token_ids=ids)
    ids.append(3)
    assert params.stop_token_ids == params.allowed_token_ids == params.banned_token_ids == (1, 2)


def test_params_are_frozen():
    """One object may serve many requests."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-6).is_greedy


def test_errors_can_be_caught_as_ours_or_as_value_errors():
    """Both families are documented."""
    assert issubclass(InvalidOptionError, ForedraftError)
    assert issubclass(InvalidOptionError, ValueError)


def test_metrics_divide_by_nothing():
    """A request without drafts, or without a pass, has rates of 0."""
    metrics = RequestMetrics()
    assert (metrics.tokens_per_target_pass, metrics.acceptance_rate, metrics.acceptance_per_position) == (0, 0, [])
    metrics = RequestMetrics(
        num_emitted_tokens=6,
        num_target_passes=2,
        num_draft_tokens=8,
        num_accepted_tokens=4,
        accepted_per_position=[2, 2, 0, 0],
        drafted_per_position=[2, 2, 2, 2],
    )
    assert (metrics.tokens_per_target_pass, metrics.acceptance_rate) == (3, 0.5)
    assert metrics.acceptance_per_position == [1, 1, 0, 0]
    assert RequestMetrics().accepted_per_position is not RequestMetrics().accepted_per_position


def test_small_nouns():
    """Values as in the OpenAI API; accepted tokens are the path."""
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort"]
    assert Verdict([4, 5, 6], [0, 1], True).num_accepted_tokens == 2


def test_the_first_tokens_of_a_draft():
    """Rows of 3, 1 and 0 tokens, cut to 2, 1 and 0; a tree's nodes come after their parents, so what is left is one."""
    tokens = torch.tensor([[4, 5, 6], [7, 0, 0], [0, 0, 0]])
    parents = torch.tensor([[-1, 0, 0], [-1, 0, 0], [0, 0, 0]])
    draft = Draft(tokens, parents, [3, 1, 0], torch.rand(3, 3, 8), [[0.9, 0.5, 0.4], [0.7], []])
    cut = draft.first([2, 1, 0])
    assert cut.token_ids.tolist() == [[4, 5], [7, 0], [0, 0]]
    assert cut.parents.tolist() == [[-1, 0], [-1, 0], [0, 0]]
    assert cut.num_draft_tokens == [2, 1, 0]
    assert cut.path_probs == [[0.9, 0.5], [0.7], []]
    assert cut.probs.equal(draft.probs[:, :2])
    assert draft.first([0, 0, 0]).token_ids.shape == (3, 0)
