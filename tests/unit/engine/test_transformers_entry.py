"""model.generate(custom_generate=...): the same ids as without it, refusals by name, nothing of the caller changed."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from foredraft import transformers_generate
from foredraft.errors import InvalidOptionError, RequestError
from foredraft.testing import tiny_mamba, tiny_model

PAD = 0
ROWS = [[5, 6, 7, 5, 6, 7, 5], [9], [20, 21, 22, 23]]


@pytest.fixture
def model():
    """Small steps from one token to the next, so that copying drafts are sometimes right."""
    return tiny_model(2, context=0.02, max_position_embeddings=96, pad_token_id=PAD)


@pytest.fixture(scope="module")
def batch():
    """Left-padded rows of several lengths."""
    width = max(map(len, ROWS))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in ROWS])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ROWS])
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, batch, **options):
    """Through transformers, with foredraft doing the work."""
    return model.generate(**batch, custom_generate=transformers_generate, pad_token_id=PAD, **options)


@pytest.mark.parametrize("speculative", [None, {"method": "none"}, {"method": "ngram", "num_speculative_tokens": 3}])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 6, "eos_token_id": [11, 12]},
        {"suppress_tokens": [3, 4, 5, 6, 7]},
        {"eos_token_id": list(range(30, 50))},
    ],
    ids=str,
)
def test_a_ragged_batch_is_that_of_transformers(model, batch, speculative, options):
    """Left padding, rows that end early, processors: equal to model.generate in float32."""
    options = {"max_new_tokens": 20, "do_sample": False, **options}
    expected = model.generate(**batch, pad_token_id=PAD, **options)
    extra = {} if speculative is None else {"speculative_config": speculative}
    assert torch.equal(generate(model, batch, **options, **extra), expected)


def test_without_a_mask_and_with_an_output_object(model):
    """One prompt; return_dict_in_generate gives transformers' own class."""
    ids = torch.tensor([ROWS[0]])
    expected = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=PAD)
    out = generate(model, {"input_ids": ids}, max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor"),
        ({"num_beams": 2}, "num_beams=2"),
        ({"max_time": 5.0}, "MaxTimeCriteria"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores=True"),
        ({"output_logits": True, "return_dict_in_generate": True}, "output_logits=True"),
        ({"bad_words_ids": [[3]]}, "NoBadWords|SequenceBias"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(model, batch, options, name):
    """Never dropped in silence."""
    with pytest.raises(InvalidOptionError, match=name):
        generate(model, batch, max_new_tokens=4, do_sample=False, **options)


def test_a_filled_cache_is_refused(model):
    """foredraft would feed the whole prompt again, whatever the cache holds."""
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([ROWS[0]])
    with torch.no_grad():
        model(ids[:, :-1], cache=cache)
    with pytest.raises(InvalidOptionError, match="filled"):
        generate(model, {"input_ids": ids, "cache": cache}, max_new_tokens=4, do_sample=False)


def test_a_prompt_of_padding_alone_is_refused(model, batch):
    """There is nothing to continue."""
    mask = batch["attention_mask"].clone()
    mask[1] = 0
    with pytest.raises(RequestError, match="a prompt is empty"):
        generate(model, {**batch, "attention_mask": mask}, max_new_tokens=4, do_sample=False)


def test_the_caller_model_and_configs_are_unchanged(model, batch):
    """Attention implementation, weights, configurations and modules."""
    config, generation = copy.deepcopy(model.config), copy.deepcopy(model.generation_config)
    kinds = [type(module) for module in model.modules()]
    weights = {name: p.clone() for name, p in model.named_parameters()}
    expected = model.generate(**batch, max_new_tokens=6, do_sample=False, pad_token_id=PAD)
    generate(model, batch, max_new_tokens=6, do_sample=False)
    assert model.config.to_dict() == config.to_dict()
    assert model.config._attn_implementation == config._attn_implementation
    assert model.generation_config.to_dict() == generation.to_dict()
    assert [type(module) for module in model.modules()] == kinds
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    again = model.generate(**batch, max_new_tokens=6, do_sample=False, pad_token_id=PAD)
    assert torch.equal(again, expected)


def test_weights_changed_in_place_are_noticed(model, batch):
    """A training step between two calls: the second call uses the new weights."""
    options = {"max_new_tokens": 10, "do_sample": False}
    before = generate(model, batch, **options)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))
    after = generate(model, batch, **options)
    assert not torch.equal(before, after)
    assert torch.equal(after, model.generate(**batch, pad_token_id=PAD, **options))


def test_an_unchanged_model_is_packed_once(model, batch, monkeypatch):
    """The second call starts at once."""
    generate(model, batch, max_new_tokens=2, do_sample=False)
    monkeypatch.setattr("foredraft.engine.transformers_entry.TargetModel", None)
    generate(model, batch, max_new_tokens=2, do_sample=False)


def test_a_seed_gives_the_same_sample_with_and_without_drafts(model, batch):
    """Reproducible, and the drafts cannot be seen in it; another seed gives another sample."""
    options = {"max_new_tokens": 16, "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}
    plain = generate(model, batch, seed=7, speculative_config={"method": "none"}, **options)
    drafted = generate(model, batch, seed=7, speculative_config={"method": "ngram"}, **options)
    assert torch.equal(plain, drafted)
    assert torch.equal(drafted, generate(model, batch, seed=7, **options))
    assert not torch.equal(drafted, generate(model, batch, seed=8, **options))


def test_a_recurrent_model(batch):
    """Left padding that transformers masks; a filled cache, which counts no tokens, is refused all the same."""
    model = tiny_mamba(pad_token_id=PAD)
    options = {"max_new_tokens": 20, "do_sample": False}
    alone = [model.generate(torch.tensor([row]), pad_token_id=PAD, **options)[0, len(row) :] for row in ROWS]
    out = generate(model, batch, **options)
    assert torch.equal(out[:, -20:], torch.stack(alone))
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.tensor([[5, 6]]), cache=cache, use_cache=True)
    with pytest.raises(InvalidOptionError, match="cannot continue from a filled one"):
        generate(model, {"input_ids": torch.tensor([[5, 6, 7]])}, **options, cache=cache)
