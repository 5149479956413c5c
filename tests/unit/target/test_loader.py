from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from foredraft.errors import ModelLoadError, UnsupportedModelError
from foredraft.target.loader import load_model, load_tokenizer


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_checkpoint_is_loaded_as_it_is(
    tiny_folder: Path, tiny_model: LlamaForCausalLM, capfd: pytest.CaptureFixture[str]
):
    loaded = load_model(tiny_folder)
    assert loaded.dtype == torch.float32
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, tiny_model.state_dict()[name]), name
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.tokenizer is None
    assert (loaded.name, loaded.path, loaded.max_model_len) == (str(tiny_folder), tiny_folder, 96)
    assert loaded.load_s > 0
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_auto_keeps_the_dtype_of_the_checkpoint_and_a_name_changes_it(
    tiny_model: LlamaForCausalLM, tmp_path: Path, dtype: str
):
    smaller = LlamaForCausalLM(tiny_model.config).to(getattr(torch, dtype))
    smaller.save_pretrained(tmp_path)
    assert load_model(tmp_path).dtype == getattr(torch, dtype)
    assert load_model(tmp_path, dtype="float32").dtype == torch.float32


def test_end_tokens_come_from_both_files(tiny_folder: Path):
    file = tiny_folder / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert load_model(tiny_folder).eos_token_ids == (2, 5, 7)


def test_a_model_in_several_files_needs_all_of_them(tiny_model: LlamaForCausalLM, tmp_path: Path):
    tiny_model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    load_model(tmp_path)
    last = sorted(tmp_path.glob("*.safetensors"))[-1]
    last.unlink()
    with pytest.raises(ModelLoadError, match=f"lacks the weight files {last.name}"):
        load_model(tmp_path)


def test_the_fingerprint_follows_the_weights_and_not_the_place(tiny_folder: Path, tmp_path: Path):
    first = load_model(tiny_folder).fingerprint
    moved = tmp_path / "moved"
    shutil.copytree(tiny_folder, moved)
    assert load_model(moved).fingerprint == first
    change_weights(moved, lambda tensors: tensors["lm_head.weight"].mul_(1.01))
    assert load_model(moved).fingerprint != first
    change_config(tiny_folder, rms_norm_eps=1e-4)
    assert load_model(tiny_folder).fingerprint != first


def test_transformers_settings_stay_as_they_were(tiny_folder: Path):
    before = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    load_model(tiny_folder)
    assert (transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), r"lack model\.norm\.weight;"),
        (lambda tensors: tensors.update(surplus=torch.ones(1)), "have more than the model uses: surplus;"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(8)}),
            r"have other shapes than config.json says for model\.norm\.weight;",
        ),
        (lambda tensors: [tensors.pop(name) for name in list(tensors)[:7]], "and 2 more;"),
    ],
)
def test_weights_of_another_model_are_named(
    tiny_folder: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
):
    change_weights(tiny_folder, change)
    with pytest.raises(ModelLoadError, match=message):
        load_model(tiny_folder)


def test_a_cut_off_weight_file_is_named(tiny_folder: Path):
    file = tiny_folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    with pytest.raises(ModelLoadError, match=rf"model.safetensors has {len(content) - 100} bytes, .* {len(content)}"):
        load_model(tiny_folder)
    for start in (content[:5], content[:50], b"version https://git-lfs.github.com/spec/v1"):
        file.write_bytes(start)
        with pytest.raises(ModelLoadError, match=r"model\.safetensors .* is not a safetensors file"):
            load_model(tiny_folder)


def test_weights_in_another_format_get_the_remedy(tiny_folder: Path):
    (tiny_folder / "model.safetensors").rename(tiny_folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"has pytorch_model\.bin, so save the model again as safetensors"):
        load_model(tiny_folder)


def test_a_folder_that_is_no_model_says_what_it_may_be(tiny_folder: Path, tmp_path: Path):
    with pytest.raises(ModelLoadError, match=f"has no config.json.*did you mean {tiny_folder}"):
        load_model(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="adapter"):
        load_model(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"convert model\.gguf once with"):
        load_model(tmp_path)


def test_a_broken_configuration_is_named(tiny_folder: Path):
    (tiny_folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json is not valid JSON"):
        load_model(tiny_folder)
    (tiny_folder / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="a JSON list"):
        load_model(tiny_folder)
    (tiny_folder / "config.json").write_text('{"model_type": "new_thing"}')
    with pytest.raises(ModelLoadError, match=r"not understood by transformers [\d.]+, model_type 'new_thing'"):
        load_model(tiny_folder)


def test_models_that_are_not_causal_are_refused_by_name(tiny_folder: Path, tmp_path: Path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    encoder = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=32, **sizes))
    encoder.save_pretrained(tmp_path / "encoder")
    with pytest.raises(ModelLoadError, match="BertForMaskedLM, which is not a causal language model"):
        load_model(tmp_path / "encoder")
    both = transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    transformers.T5ForConditionalGeneration(both).save_pretrained(tmp_path / "both")
    with pytest.raises(ModelLoadError, match="T5ForConditionalGeneration, which is not"):
        load_model(tmp_path / "both")
    change_config(tiny_folder, architectures=["LlamaForSequenceClassification"])
    with pytest.raises(ModelLoadError, match="for llama that would be LlamaForCausalLM"):
        load_model(tiny_folder)


def test_code_in_the_folder_is_not_run_unasked(tiny_folder: Path):
    change_config(tiny_folder, model_type="own", auto_map={"AutoModelForCausalLM": "own.OwnModel"})
    with pytest.raises(ModelLoadError, match="AutoModelForCausalLM.*trust_remote_code=True"):
        load_model(tiny_folder)


def test_quantised_weights_are_refused_by_name(tiny_folder: Path):
    change_config(tiny_folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UnsupportedModelError, match="quantised .gptq."):
        load_model(tiny_folder)


def test_options_that_cannot_be_had_name_the_possible_ones(tiny_folder: Path):
    with pytest.raises(ModelLoadError, match="dtype='bf16' is not known; use 'auto' or one of bfloat16"):
        load_model(tiny_folder, dtype="bf16")
    with pytest.raises(ModelLoadError, match="device='cuda:99' is not available .*'cpu'"):
        load_model(tiny_folder, device="cuda:99")
    with pytest.raises(ModelLoadError, match="device='gpu' is not available"):
        load_model(tiny_folder, device="gpu")
    with pytest.raises(ModelLoadError, match="absent_attention"):
        load_model(tiny_folder, attn_implementation="absent_attention")


def test_a_broken_tokenizer_is_named_and_none_is_none(tmp_path: Path):
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=f"the tokenizer in {tmp_path} cannot be read"):
        load_tokenizer(tmp_path)
