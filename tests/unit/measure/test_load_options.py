"""Settings of a benchmark under load are checked before anything is loaded."""

from pathlib import Path

import pytest

from foredraft.errors import InvalidOptionError
from foredraft.measure.load_options import LoadOptions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"concurrency": ()}, "arrivals='closed' needs concurrency, as in concurrency=1,4"),
        ({"concurrency": (4, 0)}, "concurrency=0 is below 1"),
        ({"rates": (1.0,)}, "rates=\\(1.0,\\) has no effect with arrivals='closed'"),
        ({"arrivals": "poisson", "rates": (1.0,)}, "concurrency=\\(1,\\) has no effect with arrivals='poisson'"),
        ({"arrivals": "poisson", "concurrency": ()}, "needs rates"),
        ({"arrivals": "poisson", "concurrency": (), "rates": (0.0,)}, "rates=0.0 must be above 0"),
        ({"arrivals": "poison"}, "did you mean 'poisson'"),
        ({"method": "none"}, "name a method that drafts"),
        ({"method": "n-gram"}, "did you mean 'ngram'"),
        ({"routes": ("stroy",)}, "routes: 'stroy' is not one of .*did you mean 'story'"),
        ({"draft_lens": ()}, "need at least one entry each"),
        ({"draft_lens": (1, 0)}, "draft_lens=0 is below 1; plain decoding is always run"),
        ({"max_tokens": 3}, "max_tokens=3 is below 4"),
        ({"num_requests": 0}, "num_requests=0 is below 1"),
        ({"draft_model": "x"}, "draft_model='x' has no effect on the method ngram"),
        ({"speculative_config": {"tree_widht": 3}}, "did you mean 'tree_width'"),
        ({"per_category": 2}, "per_category=2 has no effect without a dataset"),
        ({"temperature": -1.0}, "temperature=-1.0 must be 0"),
    ],
)
def test_a_wrong_setting_is_named_with_its_remedy(changes, message):
    with pytest.raises(InvalidOptionError, match=message):
        LoadOptions(**{"model": "m", "concurrency": (1,)} | changes)


def test_the_arms_are_plain_the_fixed_lengths_and_auto():
    arms = LoadOptions(model="m", concurrency=(1,), draft_lens=(1, 5)).arms
    described = {name: (each.method, each.max_draft_tokens, each.policy) for name, each in arms.items()}
    assert described == {
        "plain": ("none", 0, "fixed"),
        "k=1": ("ngram", 1, "fixed"),
        "k=5": ("ngram", 5, "fixed"),
        "auto": ("ngram", 7, "goodput"),
    }
    itself = LoadOptions(model="m", concurrency=(1,), method="draft_model").arms
    assert itself["auto"].model == "m"
    more = {"tree_width": 3, "tree_beam": 1}
    trees = LoadOptions(model="m", concurrency=(1,), draft_lens=(1,), method="eagle3", speculative_config=more).arms
    assert [arm.tree_width for arm in trees.values()] == [1, 1, 3], "the fixed lengths stay those of chains"


def test_a_round_has_a_request_for_each_client_and_each_route():
    options = LoadOptions(model="m", concurrency=(1, 32), dataset=Path("x"), num_requests=None)
    assert [options.requests_at(level, num_routes=3) for level in options.levels] == [3, 32]
    more = LoadOptions(model="m", concurrency=(1, 32), num_requests=8)
    assert [more.requests_at(level, num_routes=3) for level in more.levels] == [8, 32]
