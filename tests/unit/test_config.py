"""Configuration: checked when it is made; an option without effect, or unknown, is an error with a remedy."""

from __future__ import annotations

import dataclasses

import pytest

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.errors import InvalidOptionError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "ngrams"}, "method='ngrams' is not one of none, ngram, suffix.*; did you mean 'ngram'"),
        ({"acceptance_rule": "blocks"}, "acceptance_rule='blocks' is not one of auto.*did you mean 'block'"),
        ({"num_speculative_tokens": 65}, r"num_speculative_tokens=65 is outside \[0, 64\]; 0 is plain decoding"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1 is outside"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min=0 must be at least 1 and at most prompt_lookup_max=4"),
        ({"prompt_lookup_min": 3, "prompt_lookup_max": 2}, "prompt_lookup_min=3 .* at most prompt_lookup_max=2"),
        ({"method": "draft_model"}, "method 'draft_model' needs model=: a folder, hub id or short name"),
        ({"method": "ngram", "model": "x"}, "model='x' has no effect with method 'ngram'; leave it out"),
        ({"use_heterogeneous_vocab": True}, "use_heterogeneous_vocab has no effect with method 'none'; leave it out"),
        (
            {"method": "draft_model", "model": "x", "heterogeneous_vocab_method": "slem"},
            "heterogeneous_vocab_method='slem' has no effect without use_heterogeneous_vocab=True; add it",
        ),
        (
            {"method": "draft_model", "model": "x", "use_heterogeneous_vocab": True, "tree_width": 2},
            "tree_width=2 has no effect with use_heterogeneous_vocab, which drafts chains; leave one of them out",
        ),
        ({"heterogeneous_vocab_method": "slim"}, "'slim' is not one of tli, slem; did you mean 'slem'"),
        ({"method": "ngram+draft_model"}, r"method 'ngram\+draft_model' needs model=: a folder, hub id or short name"),
        ({"method": "ngram+sufix"}, "method='sufix' is not one of .*did you mean 'suffix'"),
        ({"method": "ngram+ngram"}, r"method='ngram\+ngram' must join different methods that draft"),
        ({"method": "none+ngram"}, r"method='none\+ngram' must join different methods that draft"),
        ({"method": "ngram+"}, "method='' is not one of"),
        (
            {"method": "ngram+prediction", "tree_width": 2},
            r"tree_width=2 has no effect with method 'ngram\+prediction'",
        ),
        (
            {"method": "eagle3", "model": "x", "tree_width": 2, "tree_beam": 3},
            r"tree_beam=3 is outside \[1, tree_width=2\]",
        ),
        ({"method": "eagle3", "model": "x", "tree_beam": 1}, r"tree_beam=1 is outside .* a tree_width above 1"),
        (
            {"method": "suffix", "tree_width": 2, "tree_beam": 1},
            "tree_beam=1 has no effect with method 'suffix'; it goes with draft_model, eagle3, eagle, mtp",
        ),
        ({"suffix_decoding_max_tree_depth": 0}, "suffix_decoding_max_tree_depth=0 is below 1; use a positive"),
        (
            {"suffix_decoding_max_cached_requests": -1},
            "suffix_decoding_max_cached_requests=-1 is below 0; 0 keeps none",
        ),
        ({"suffix_decoding_max_spec_factor": 0.0}, "suffix_decoding_max_spec_factor=0.0 must be above 0; 1 drafts"),
        ({"suffix_decoding_min_token_prob": 1.5}, r"suffix_decoding_min_token_prob=1.5 is outside \[0, 1\]; 0 leaves"),
        (
            {"suffix_decoding_store": "x"},
            "suffix_decoding_store='x' has no effect with .*max_cached_requests=0; say how",
        ),
        ({"method": "ngram", "exit_layer": 2}, "exit_layer=2 has no effect with method 'ngram'; leave it out"),
        ({"method": "early_exit", "skip_layers": [1]}, r"skip_layers=\[1\] has no effect with method 'early_exit'"),
        ({"method": "sparse_kv", "sparse_kv_selection": "windows"}, "not one of window, snapkv; did you mean 'window'"),
        ({"method": "sparse_kv", "sparse_kv_budget": 3}, "sparse_kv_budget=3 must be at least 4"),
        ({"method": "sparse_kv", "sparse_kv_budget": 9, "sparse_kv_sinks": 5}, "sparse_kv_sinks=5 between 0 and half"),
        ({"policy": "confidnce", "method": "ngram"}, "'confidnce' is not one of .*did you mean 'confidence'"),
        ({"policy": "confidence", "method": "ngram"}, "'confidence' has no effect with method 'ngram'.* draft_model"),
        (
            {"policy": "confidence", "method": "draft_model", "model": "x", "tree_width": 2},
            "'confidence' has no effect with .*tree_width=2.* chains of draft_model",
        ),
        ({"assistant_confidence_threshold": 1.5}, r"assistant_confidence_threshold=1.5 is outside \[0, 1\]; 0 never"),
        ({"acceptance_rule": "typical"}, "changes the output's distribution; pass allow_lossy=True"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(options, message):
    """Value, limit, what to do instead."""
    with pytest.raises(InvalidOptionError, match=message):
        SpeculativeConfig(**options)


@pytest.mark.parametrize(("method", "default"), [("none", 0), ("ngram", 7), ("suffix", 16), ("draft_model", 4)])
def test_each_method_has_its_own_default_length(method, default):
    """0 is a length too, and not taken for a missing one."""
    options = {"method": method} | ({"model": "x"} if method == "draft_model" else {})
    assert SpeculativeConfig(**options).max_draft_tokens == default
    assert SpeculativeConfig(**options, num_speculative_tokens=0).max_draft_tokens == 0
    assert SpeculativeConfig(**options, num_speculative_tokens=64).max_draft_tokens == 64


def test_a_combination_has_the_methods_and_their_lengths():
    """The longest counts for the step, each method keeps its own; a given length is for all."""
    config = SpeculativeConfig(method="ngram+suffix+draft_model", model="x", tree_width=2)
    assert config.methods == ("ngram", "suffix", "draft_model")
    assert config.max_draft_tokens == 16
    assert [config.draft_limit(method) for method in config.methods] == [7, 16, 4]
    config = SpeculativeConfig(method="ngram+suffix", num_speculative_tokens=5)
    assert [config.max_draft_tokens, *map(config.draft_limit, config.methods)] == [5, 5, 5]


def test_from_options_takes_a_mapping_an_object_or_nothing():
    """An unknown name gets the nearest."""
    config = SpeculativeConfig(method="ngram")
    assert SpeculativeConfig.from_options({"method": "ngram"}) == config
    assert SpeculativeConfig.from_options(config) is config
    assert SpeculativeConfig.from_options(None) == SpeculativeConfig()
    with pytest.raises(InvalidOptionError, match="did you mean 'num_speculative_tokens'"):
        SpeculativeConfig.from_options({"num_speculative_token": 3})


def test_only_typical_is_lossy():
    """It needs to be allowed by name."""
    assert SpeculativeConfig(acceptance_rule="typical", allow_lossy=True).is_lossy
    assert not SpeculativeConfig(allow_lossy=True).is_lossy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"numerics": "fats"}, "numerics='fats' is not one of invariant, fast; did you mean 'fast'"),
        ({"max_model_len": 0}, "max_model_len=0 is below 1; use a positive number"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 is below 1"),
        ({"max_num_batched_tokens": -5}, "max_num_batched_tokens=-5 is below 1"),
        ({"num_threads": 0}, "num_threads=0 is below 1"),
        ({"kv_cache_gb": 0}, "kv_cache_gb=0 must be above 0; None takes what is free"),
        ({"gpu_memory_utilization": 1.1}, r"gpu_memory_utilization=1.1 is outside \(0, 1\]"),
    ],
)
def test_engine_options_are_checked(options, message):
    """Before anything is loaded."""
    with pytest.raises(InvalidOptionError, match=message):
        EngineConfig(model="x", **options)


def test_an_unknown_engine_option_names_the_nearest():
    """As passed to LLM."""
    with pytest.raises(InvalidOptionError, match="LLM has no option 'max_model_length'; did you mean 'max_model_len'"):
        EngineConfig.from_options({"model": "x", "max_model_length": 5})


def test_configurations_are_frozen():
    """Nothing changes after the check."""
    for config in (SpeculativeConfig(), EngineConfig(model="x")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.model = "y"  # type: ignore[misc]
