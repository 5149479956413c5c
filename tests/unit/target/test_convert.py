from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from foredraft.errors import ModelLoadError
from foredraft.target.convert import convert_gguf
from foredraft.target.loader import load_model


def test_the_folder_is_the_same_model_rounded_to_bf16(tiny_gguf: Path, tiny_model: LlamaForCausalLM, tmp_path: Path):
    """Also shows that the rows of the query and key weights come back in transformers' order."""
    folder = tmp_path / "tiny"
    convert_gguf(tiny_gguf, folder, provenance={"name": "tiny"})
    loaded = load_model(folder)
    assert loaded.dtype == torch.bfloat16
    assert (loaded.max_model_len, loaded.eos_token_ids) == (96, (2,))
    expected = tiny_model.state_dict()
    assert loaded.model.state_dict().keys() == expected.keys()
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, expected[name].bfloat16()), name
    provenance = json.loads((folder / "provenance.json").read_text())
    assert (provenance["name"], provenance["gguf"]) == ("tiny", "tiny.gguf")
    assert [file.name for file in tmp_path.iterdir()] == ["tiny"]


def test_the_tokenizer_splits_digits_and_keeps_its_chat_template(tiny_gguf: Path, tmp_path: Path):
    """Without the split into digits first, the two blanks would fall apart: one goes to the number."""
    convert_gguf(tiny_gguf, tmp_path / "tiny")
    tokenizer = load_model(tmp_path / "tiny").tokenizer
    assert tokenizer is not None
    assert tokenizer.tokenize("x  12") == ["x", "ĠĠ", "1", "2"]
    assert tokenizer.model_max_length == 96
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert chat == "<|im_start|>a<|im_end|>"


def test_a_file_that_is_no_gguf_leaves_nothing_behind(tmp_path: Path):
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF and then nothing of use")
    with pytest.raises(ModelLoadError, match=r"broken\.gguf cannot be converted"):
        convert_gguf(file, tmp_path / "goal")
    assert [entry.name for entry in tmp_path.iterdir()] == ["broken.gguf"]


def test_an_existing_folder_is_not_written_into(tiny_gguf: Path, tmp_path: Path):
    with pytest.raises(ModelLoadError, match="exists already"):
        convert_gguf(tiny_gguf, tmp_path)
