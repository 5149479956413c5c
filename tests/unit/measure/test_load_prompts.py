"""The stream of requests: routes in turn, the same for the same index, and hardly any twice."""

import json

import pytest

from foredraft.errors import InvalidOptionError
from foredraft.measure.load_prompts import ROUTES, built_in_stream, dataset_stream
from foredraft.measure.workloads import dataset_workloads


def stream(tokenizer, routes=ROUTES, **changes):
    return built_in_stream(routes, tokenizer, **{"max_tokens": 20, "seed": 0, "max_model_len": 1024} | changes)


def test_routes_come_in_turn_and_an_index_is_always_the_same_request(tokenizer):
    requests = [stream(tokenizer)[index] for index in range(7)]
    assert [request.route for request in requests] == ["code", "summary", "story"] * 2 + ["code"]
    assert [stream(tokenizer)[index] for index in range(7)] == requests
    assert stream(tokenizer, seed=1)[0].prompt_token_ids != requests[0].prompt_token_ids
    text = tokenizer.decode(requests[0].prompt_token_ids)
    assert "Return the full function." in text
    assert "def " in text
    assert "{" not in text.replace("{}", "").replace('{"', "")  # every placeholder was filled


def test_hardly_any_two_prompts_are_the_same(tokenizer):
    for route in ROUTES:
        own = stream(tokenizer, (route,))
        prompts = {own[index].prompt_token_ids for index in range(60)}
        assert len(prompts) >= 50, route


def test_output_lengths_spread_around_the_mean(tokenizer):
    lengths = [stream(tokenizer)[index].max_tokens for index in range(200)]
    assert min(lengths) >= 10
    assert max(lengths) <= 30
    assert 18 < sum(lengths) / len(lengths) < 22  # the standard error is 0.43
    assert len(set(lengths)) > 15


def test_a_file_s_categories_are_routes_and_its_prompts_begin_again(tmp_path, tokenizer):
    file = tmp_path / "mine.jsonl"
    lines = [{"prompt": "a", "category": "x"}, {"prompt": "b", "category": "y"}, {"prompt": "c", "category": "x"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    own = dataset_stream(dataset_workloads(file, tokenizer, None, 500), max_tokens=8, seed=0, max_model_len=1024)
    assert own.routes == ("x", "y")
    asked = [tokenizer.decode(own[index].prompt_token_ids).split("user\n")[1][0] for index in range(6)]
    assert asked == ["a", "b", "c", "b", "a", "b"]


def test_a_request_that_leaves_no_room_is_refused(tokenizer):
    with pytest.raises(InvalidOptionError, match="the model has room for 100; lower max_tokens"):
        stream(tokenizer, max_model_len=100)[0]
