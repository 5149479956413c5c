"""The front door on a tiny model in a folder: forms of prompts, streaming, interruption, errors."""

from __future__ import annotations

import pytest

from foredraft import LLM, SamplingParams
from foredraft.errors import InvalidOptionError, RequestError
from foredraft.testing import reference, tiny_mamba, tiny_model
from foredraft.types import FinishReason

GREEDY = SamplingParams(temperature=0, max_tokens=8)
TEXTS = ["abc", "a é b", "E"]


@pytest.fixture(scope="module")
def model(byte_tokenizer):
    return tiny_model(1, vocab_size=len(byte_tokenizer), max_position_embeddings=128)


@pytest.fixture(scope="module")
def folder(model, byte_tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(path)
    byte_tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), speculative_config={"method": "ngram"}, max_num_seqs=4)


@pytest.fixture(autouse=True)
def nothing_left(request):
    """No test leaves a request behind, however it ended."""
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm").engine
        assert not engine.has_unfinished_requests
        assert engine.target.slots.num_open == 0


def test_prompts_may_be_texts_or_ids_one_or_many(llm, model, byte_tokenizer):
    """All forms give the tokens of plain decoding, in the order of the prompts."""
    ids = [byte_tokenizer(text)["input_ids"] for text in TEXTS]
    expected = [reference(model, prompt, GREEDY).token_ids for prompt in ids]
    for prompts in (TEXTS, ids, [TEXTS[0], ids[1], tuple(ids[2])]):
        outputs = llm.generate(prompts, GREEDY)
        assert [out.outputs[0].token_ids for out in outputs] == expected
        assert [out.prompt_token_ids for out in outputs] == ids
    for prompt in (TEXTS[1], ids[1]):
        (out,) = llm.generate(prompt, GREEDY)
        assert out.outputs[0].token_ids == expected[1]
    assert out.outputs[0].text == byte_tokenizer.decode(expected[1], skip_special_tokens=True)
    assert out.finished
    assert out.outputs[0].finish_reason == FinishReason.LENGTH
    assert out.contract == llm.numerics.contract


def test_prompt_text_is_kept_and_ids_have_none(llm):
    """As in vLLM."""
    assert [out.prompt for out in llm.generate(["ab", [1, 2]], GREEDY)] == ["ab", None]


def test_each_prompt_may_have_its_own_params(llm):
    """One set for all, or one each; another number is refused before anything runs."""
    each = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 2, 5)]
    assert [len(out.outputs[0].token_ids) for out in llm.generate(TEXTS, each)] == [1, 2, 5]
    with pytest.raises(InvalidOptionError, match="2 sampling_params for 3 prompts; give one, or one each"):
        llm.generate(TEXTS, each[:2])


def test_an_empty_list_of_params_is_a_mismatch(llm):
    """A filter that left nothing must not mean the defaults."""
    with pytest.raises(InvalidOptionError, match="0 sampling_params for 3 prompts"):
        llm.generate(TEXTS, [])


def test_no_prompts_give_no_outputs(llm):
    """An empty batch is no error."""
    assert llm.generate([], GREEDY) == []


def test_one_bad_prompt_leaves_none_queued(llm):
    """Nothing has run when the error comes, so the call can be made again."""
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.generate([[1, 2], []], GREEDY)
    assert not llm.engine.sequences
    assert len(llm.generate([[1, 2]], GREEDY)) == 1


def test_chat_without_a_template_is_refused_by_name(llm, folder):
    """The remedy is a plain prompt."""
    with pytest.raises(RequestError, match=r"tiny has no chat template; use generate\(\)"):
        llm.chat([{"role": "user", "content": "a"}], GREEDY)


def test_chat_puts_messages_through_the_template(llm, byte_tokenizer, monkeypatch):
    """One conversation or many, with the prompt for the answer."""
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    one = [{"role": "user", "content": "ab"}]
    assert llm.chat_token_ids(one) == byte_tokenizer("[ab]>")["input_ids"]
    assert llm.chat(one, GREEDY)[0].outputs == llm.generate("[ab]>", GREEDY)[0].outputs
    assert len(llm.chat([one, one], GREEDY)) == 2


def test_stream_gives_what_generate_gives(llm):
    """Pieces of text and tokens add up; the last says how it ended."""
    (whole,) = llm.generate(TEXTS[0], GREEDY)
    steps = list(llm.stream(TEXTS[0], GREEDY))
    assert [t for step in steps for t in step.token_ids] == whole.outputs[0].token_ids
    assert "".join(step.text for step in steps) == whole.outputs[0].text
    assert [step.finish_reason for step in steps][-1] == FinishReason.LENGTH
    assert not any(step.finish_reason for step in steps[:-1])
    from_ids = llm.stream(whole.prompt_token_ids, GREEDY)
    assert [t for step in from_ids for t in step.token_ids] == whole.outputs[0].token_ids


def test_leaving_a_stream_early_aborts_it(llm):
    """The slot is free at once, for the next request."""
    stream = llm.stream(TEXTS[0], SamplingParams(temperature=0, max_tokens=50))
    next(stream)
    assert llm.engine.has_unfinished_requests
    stream.close()
    assert not llm.engine.has_unfinished_requests


def test_ctrl_c_returns_what_there_is(llm, monkeypatch):
    """At the third step: partial outputs that are not finished, and an engine that goes on."""
    whole = llm.generate(TEXTS, GREEDY)
    step, calls = llm.engine.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    outputs = llm.generate(TEXTS, GREEDY)
    monkeypatch.undo()
    assert [out.finished for out in outputs] == [False] * 3
    for out, full in zip(outputs, whole, strict=True):
        part = out.outputs[0]
        assert part.finish_reason == FinishReason.ABORT
        assert 0 < len(part.token_ids) < 8
        assert part.token_ids == full.outputs[0].token_ids[: len(part.token_ids)]
    assert [o.outputs for o in llm.generate(TEXTS, GREEDY)] == [o.outputs for o in whole]


def test_an_error_in_a_step_leaves_nothing_running(folder):
    """Out of memory, say: the next call must not go on with the requests of this one."""
    llm = LLM(str(folder))
    step, calls = llm.engine.step, []

    def failing():
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError
        return step()

    llm.engine.step = failing
    with pytest.raises(MemoryError):
        llm.generate(TEXTS, GREEDY)
    assert not llm.engine.has_unfinished_requests
    assert llm.engine.target.slots.num_open == 0


def test_a_progress_bar_changes_nothing(llm):
    """It is silent unless asked for."""
    shown = llm.generate(TEXTS, GREEDY, use_tqdm=True)
    assert [o.outputs for o in shown] == [o.outputs for o in llm.generate(TEXTS, GREEDY)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_lens": 5}, "LLM has no option 'max_model_lens'; did you mean 'max_model_len'?"),
        ({"speculative_config": {"metod": "ngram"}}, "speculative_config has no option 'metod'; did you mean 'method'"),
        ({"max_model_len": 129}, "max_model_len=129 is above the 128 positions"),
    ],
)
def test_options_that_cannot_be_are_refused(folder, options, message):
    """The nearest known option, or the limit, is named."""
    with pytest.raises(InvalidOptionError, match=message):
        LLM(str(folder), **options)


def test_a_draft_model_of_the_same_folder_accepts_all(folder, llm):
    """By name, through the registry; the tokens are the same."""
    drafted = LLM(str(folder), speculative_config={"method": "draft_model", "model": str(folder)})
    outputs = drafted.generate(TEXTS, GREEDY)
    assert [o.outputs for o in outputs] == [o.outputs for o in llm.generate(TEXTS, GREEDY)]
    assert all(o.metrics.acceptance_rate == 1.0 for o in outputs)


def test_a_recurrent_model_in_a_folder(tmp_path):
    """It states no length limit, so any may be given; its kernels' bits change with the width of a pass."""
    model = tiny_mamba(3, context=0.2)
    del model.config.max_position_embeddings
    model.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=5000, speculative_config={"method": "ngram"})
    assert llm.engine.target.max_model_len == 5000
    prompts = [[7, 8, 9, 10, 7, 8, 9], [3]]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))
    params = SamplingParams(temperature=0, max_tokens=24)
    expected = [reference(model, prompt, params, max_model_len=100).token_ids for prompt in prompts]
    assert [out.outputs[0].token_ids for out in outputs] == expected
    assert outputs[0].contract == "near-tie"
    assert LLM(str(tmp_path), dtype="float32").engine.target.max_model_len == 2048


@pytest.fixture(scope="module")
def predicting(folder):
    return LLM(str(folder), speculative_config={"method": "prediction+ngram", "policy": "fixed"})


def test_a_prediction_saves_passes_and_changes_nothing(predicting, model, byte_tokenizer):
    """As text or ids, for all prompts or one each; without one, or with a wrong one, the output is the same."""
    params = SamplingParams(temperature=0, max_tokens=24)
    ids = byte_tokenizer(TEXTS[0])["input_ids"]
    expected = reference(model, ids, params).token_ids
    wrong = [*expected[:9], 3, *expected[10:]]
    passes = []
    for prediction in (None, expected, wrong, "something else"):
        (out,) = predicting.generate(TEXTS[0], params, prediction=prediction)
        assert out.outputs[0].token_ids == expected
        passes.append(out.metrics.num_target_passes)
    assert passes[1] == 2
    assert passes[1] < passes[2] < passes[0]
    each = predicting.generate([ids, ids, ids], params, prediction=[None, expected, "abc"])
    assert [out.outputs[0].token_ids for out in each] == [expected] * 3
    assert each[1].metrics.num_target_passes == 2
    assert predicting.prediction_token_ids("abc") == tuple(byte_tokenizer("abc", add_special_tokens=False)["input_ids"])


def test_a_prediction_that_cannot_be_used_is_refused(predicting, llm, model):
    """Another method, another number of them, tokens that the model does not have."""
    with pytest.raises(InvalidOptionError, match="a prediction has no effect with method 'ngram'; use 'prediction'"):
        llm.generate("abc", GREEDY, prediction="abc")
    with pytest.raises(InvalidOptionError, match="2 predictions for 1 prompts; give one, or one each"):
        predicting.generate("abc", GREEDY, prediction=["a", "b"])
    with pytest.raises(RequestError, match=r"prediction token id 9999 is outside the vocabulary \[0, "):
        predicting.generate("abc", GREEDY, prediction=[1, 9999])


def test_responses_are_kept_in_a_file_over_runs(folder, model, tmp_path):
    """Written when the model is closed; the next one answers the same prompt in fewer passes. Another model's is
    refused."""
    file = tmp_path / "responses.npz"
    options = {"method": "suffix", "suffix_decoding_max_cached_requests": 10, "suffix_decoding_store": str(file)}
    params = SamplingParams(temperature=0, max_tokens=24)
    results = []
    for _ in range(2):
        with LLM(str(folder), speculative_config=options) as first:
            assert file.exists() == bool(results)
            results.append(first.generate("abc", params)[0])
    assert results[0].outputs[0].token_ids == results[1].outputs[0].token_ids
    assert results[1].metrics.num_target_passes < results[0].metrics.num_target_passes
    other = tmp_path / "other"
    tiny_model(1, vocab_size=64).save_pretrained(other)
    with pytest.raises(InvalidOptionError, match="holds responses in another vocabulary"):
        LLM(str(other), speculative_config=options)


def test_lower_priorities_go_first(folder):
    """One at a time: the order in which they end is that of the priorities, then of the prompts."""
    llm = LLM(str(folder), max_num_seqs=1)
    ended = []
    llm.engine.watchers.append(lambda *step: ended.extend(out.request_id for out in step[-1] if out.finish_reason))
    llm.generate(["a", "b", "c", "d"], GREEDY, priority=[2, 1, 2, -1])
    assert ended == ["3", "1", "0", "2"]
    with pytest.raises(InvalidOptionError, match="2 priorities for 1 prompts; give one, or one each"):
        llm.generate(["a"], GREEDY, priority=[1, 2])


def test_prefixes_are_reused_where_the_bits_are_the_same(folder):
    """By default as the contract says; the option decides otherwise; a reset forgets all."""
    prompt = list(range(30))
    for option in (None, True, False):
        llm = LLM(str(folder), enable_prefix_caching=option)
        reused = option if option is not None else llm.engine.contract == "token-identical"
        outputs = [llm.generate(prompt, GREEDY)[0] for _ in range(2)]
        llm.reset_prefix_cache()
        outputs += llm.generate(prompt, GREEDY)
        assert [out.metrics.num_cached_tokens for out in outputs] == [0, 29 if reused else 0, 0]
        assert len({tuple(out.outputs[0].token_ids) for out in outputs}) == 1


def test_the_cache_is_limited_by_the_option(folder):
    """As many bytes as were given; too few for one request are refused before anything runs."""
    llm = LLM(str(folder), kv_cache_gb=0.001)
    slots = llm.engine.target.slots
    llm.generate([[i] * 60 for i in range(8)], GREEDY)
    assert slots.allocated_bytes <= slots.max_positions * slots.bytes_per_position <= 0.001 * 2**30
    with pytest.raises(InvalidOptionError, match="may take 0.000 GiB, and one sequence of max_model_len=128"):
        LLM(str(folder), kv_cache_gb=1e-6)
