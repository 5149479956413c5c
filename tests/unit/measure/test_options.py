"""Settings of a benchmark are checked before anything is loaded, with value, limit and remedy."""

from pathlib import Path

import pytest

from foredraft.errors import InvalidOptionError
from foredraft.measure.options import BenchOptions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peer": "vllm"}, "peer: 'vllm' is not one of transformers"),
        ({"prompts": ("cod",)}, "no prompt 'cod'; known: code, story, long; did you mean 'code'"),
        ({"prompts": ()}, "need at least one entry"),
        ({"methods": ("n-gram",)}, "method='n-gram' is not one of .*did you mean 'ngram'"),
        ({"temperatures": (-1.0,)}, "must be 0 \\(greedy\\) or above"),
        ({"temperatures": (float("nan"),)}, "must be 0"),
        ({"temperatures": ()}, "need at least one entry"),
        ({"max_tokens": 1}, "max_tokens=1 is below 2"),
        ({"repeats": 0}, "repeats=0 is below 1"),
        ({"time_limit_s": -1.0}, "time_limit_s=-1.0 is below 0; 0 is no limit"),
        ({"num_prompt_tokens": 0}, "num_prompt_tokens=0 is below 1"),
        ({"batch_sizes": (1, 0)}, "batch_sizes=0 is below 1"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0 is below 1; plain decoding is always run"),
        ({"per_category": 3}, "per_category=3 has no effect without a dataset"),
        ({"per_category": 0, "dataset": Path("x")}, "per_category=0 is below 1"),
        ({"draft_model": "x", "methods": ("ngram",)}, "draft_model='x' has no effect"),
        ({"speculative_config": {"tree_width": 3}, "methods": ("ngram",)}, "speculative_config=.* has no effect"),
        ({"speculative_config": {"tree_widht": 3}}, "did you mean 'tree_width'"),
        ({"speculative_config": {"tree_beam": 3}}, r"tree_beam=3 is outside \[1, tree_width=1\]"),
        ({"dtype": "bf16"}, "dtype: 'bf16' is not one of .*bfloat16"),
        ({"numerics": "exact"}, "numerics: 'exact' is not one of invariant, fast"),
        ({"seed": -1}, "seed=-1 is below 0"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(InvalidOptionError, match=message):
        BenchOptions(model="some-model", **changes)


def test_plain_always_comes_first_and_once():
    assert BenchOptions(model="m", methods=("ngram", "none", "ngram")).all_methods == ("none", "ngram")
    assert BenchOptions(model="m", methods=("ngram",)).all_methods == ("none", "ngram")


def test_the_draft_model_is_the_target_unless_another_is_named():
    assert BenchOptions(model="m").drafts_with_itself
    assert BenchOptions(model="m", draft_model="m").drafts_with_itself
    assert not BenchOptions(model="m", draft_model="small").drafts_with_itself


def test_more_options_are_those_of_the_methods_with_a_draft_model():
    more = {"num_speculative_tokens": 7, "tree_width": 3, "tree_beam": 1}
    arms = BenchOptions(model="m", draft_model="head", methods=("ngram", "ngram+eagle3"), speculative_config=more).arms
    assert list(arms) == ["none", "ngram", "ngram+eagle3"]
    assert [arm.tree_beam for arm in arms.values()] == [None, None, 1]
    assert [arm.model for arm in arms.values()] == [None, None, "head"]
    assert {arm.policy for arm in arms.values()} == {"fixed"}


def test_an_option_of_its_own_goes_before_those_written_as_json():
    more = {"num_speculative_tokens": 7, "method": "ngram", "tree_width": 3}
    options = BenchOptions(
        model="m", draft_model="head", methods=("eagle3",), num_speculative_tokens=5, speculative_config=more
    )
    arm = options.arms["eagle3"]
    assert (arm.method, arm.num_speculative_tokens, arm.tree_width) == ("eagle3", 5, 3)
