"""Prompts: of exact length, from files of three kinds, and refusals that name the line."""

import json

import pytest

from foredraft.errors import InvalidOptionError
from foredraft.measure import workloads


@pytest.mark.parametrize("num_tokens", [120, 1024, 12_000])
def test_the_long_prompt_has_exactly_the_wanted_length(tokenizer, num_tokens):
    ids = workloads.long_prompt(tokenizer, num_tokens)
    text = tokenizer.decode(ids)
    assert len(ids) == num_tokens
    assert text.startswith("<|im_start|>user\nSummarise")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert ("told for the 2th time" in text) == (num_tokens > 6_000)


def test_a_long_prompt_that_is_too_short_for_its_request_is_refused(tokenizer):
    with pytest.raises(InvalidOptionError, match="prompt_tokens=20 is too short"):
        workloads.long_prompt(tokenizer, 20)


def test_built_in_prompts_go_through_the_chat_template(tokenizer):
    for name in workloads.PROMPT_NAMES:
        workload = workloads.built_in_workload(name, tokenizer, 500)
        assert workload.name == name
        assert tokenizer.decode(workload.prompts[0]).startswith("<|im_start|>user\n")
    code = tokenizer.decode(workloads.built_in_workload("code", tokenizer, 500).prompts[0])
    assert "Add type hints and a docstring to this function. Return the full function." in code
    assert 'orders.append({"id": order_id, "customer": customer, "amount": float(amount)})' in code


def test_without_a_chat_template_the_text_stands_alone(tokenizer):
    class Plain:
        chat_template = None
        bos_token = "<|im_start|>"

        def __call__(self, text, **options):
            return tokenizer(text, **options)

    assert tokenizer.decode(workloads.encode(Plain(), [{"role": "user", "content": "hello"}])) == "<|im_start|>hello"
    assert len(workloads.long_prompt(Plain(), 300)) == 300


def test_stories_for_batches_all_differ(tokenizer):
    prompts = workloads.story_prompts(tokenizer, 20)
    assert len({tuple(prompt) for prompt in prompts}) == 20


def test_a_dataset_may_hold_turns_prompts_and_messages(tokenizer, tmp_path):
    file = tmp_path / "mine.jsonl"
    records = [
        {"question_id": 81, "category": "writing", "turns": ["first turn", "second turn"]},
        {"category": "qa", "prompt": "one"},
        {"category": "qa", "prompt": "two"},
        {"category": "qa", "prompt": "three"},
        {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]},
    ]
    file.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    found = workloads.dataset_workloads(file, tokenizer, 2, 1000)
    texts = {w.name: [tokenizer.decode(prompt) for prompt in w.prompts] for w in found}
    assert list(texts) == ["writing", "qa", "mine"]
    assert "first turn" in texts["writing"][0]
    assert "second" not in texts["writing"][0]
    assert [("one" in t, "two" in t) for t in texts["qa"]] == [(True, False), (False, True)]
    assert "system\nbe kind" in texts["mine"][0]
    assert found[1].num_prompt_tokens == sum(map(len, found[1].prompts))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is not a JSON object"),
        ('{"text": "x"}', "line 2 has none of 'turns', 'prompt' and 'messages' with a text in it; it has 'text'"),
        ('{"turns": []}', "line 2 has none of"),
        ('{"prompt": "' + "x" * 300 + '"}', "line 2: the prompt has 3.. tokens and there is room for 200"),
    ],
)
def test_a_bad_line_is_named(tokenizer, tmp_path, line, message):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(InvalidOptionError, match=message):
        workloads.dataset_workloads(file, tokenizer, None, 200)


def test_a_dataset_that_is_missing_or_empty_is_refused(tokenizer, tmp_path):
    with pytest.raises(InvalidOptionError, match="cannot be read"):
        workloads.dataset_workloads(tmp_path / "none.jsonl", tokenizer, None, 200)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InvalidOptionError, match="holds no prompts"):
        workloads.dataset_workloads(tmp_path / "empty.jsonl", tokenizer, None, 200)
