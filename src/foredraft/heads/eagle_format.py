"""EAGLE-1 checkpoints: read as SafeAILab, vLLM and speculators have them.

    SafeAILab     Llama config (``bias``, ``qkv_bias``); embed_tokens, fc, layers.0.*
    vLLM          the same under ``model`` in its config; reads ``fc`` without bias only
    speculators   transformer_layer_config, layernorms, fusion_bias; fusion_fc, transformer.*, two norms more

Written are speculators' layout and, for vLLM, which reads no other, SafeAILab's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foredraft.errors import IncompatibleDrafterError, InvalidOptionError, ModelLoadError
from foredraft.heads.checkpoint import HeadFiles, fill, layer_config, layer_config_json, state_layer, write_speculators
from foredraft.heads.eagle import EagleConfig, EagleHead
from foredraft.target.features import AFTER_NORM

NAMES = {
    "fusion_fc.": "fc.",
    "transformer.": "layers.0.",
    "embed_layernorm.": "embedding_layernorm.",
    "hidden_layernorm.": "layers.0.input_layernorm.",
    "lm_head_layernorm.": "pre_lm_head_layernorm.",
}
"""Beginnings of names: speculators', and those of the heads with norms that it was made from."""
NOT_READ = ("layers.0.self_attn.rotary_emb.inv_freq",)


def read_eagle(files: HeadFiles, hidden_size: int, vocab_size: int, num_layers: int) -> EagleHead:
    """The head of a folder for a target of these sizes.

    Raises:
        ModelLoadError: the files are no EAGLE-1 head, or do not belong together.
        IncompatibleDrafterError: it was made for another target.
    """
    tensors = {_renamed(name): tensor for name, tensor in files.tensors.items()}
    if "layers.0.hidden_norm.weight" in tensors or "midlayer.hidden_norm.weight" in tensors:
        raise ModelLoadError(f"{files.path} is an EAGLE-3 head; use method 'eagle3'")
    if "fc.weight" not in tensors or "layers.0.self_attn.q_proj.weight" not in tensors:
        raise ModelLoadError(
            f"{files.path} is no EAGLE head: it lacks fc.weight or layers.0.self_attn.q_proj.weight "
            f"(model kind {files.config.get('speculators_model_type') or files.config.get('model_type')!r})"
        )
    _check_target(files, tensors, hidden_size, vocab_size)
    with torch.device("meta"):
        head = EagleHead(_config(files.config, tensors, vocab_size, num_layers))
    fill(head, tensors, files.path, NOT_READ)
    return head.eval()


def save_eagle(head: EagleHead, path: Path, verifier: Mapping[str, Any], num_tokens: int = 3) -> None:
    """Write a head in the speculators format, every flag written out.

    Args:
        verifier: ``name_or_path`` and ``architectures`` of the target.
        num_tokens: draft tokens a step that readers take by default.
    """
    config = head.config
    if config.layer.num_hidden_layers != 1:
        raise InvalidOptionError(
            f"the speculators format has EAGLE heads of one layer and this one has {config.layer.num_hidden_layers}"
        )
    options = {
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": {**layer_config_json(config.layer), "vocab_size": config.vocab_size},
        "layernorms": config.layernorms,
        "fusion_bias": config.fc_bias,
        "norm_output": config.norm_output,
        "state_before_norm": config.feature_layers != (AFTER_NORM,),
        "torch_dtype": str(head.fc.weight.dtype).removeprefix("torch."),
    }
    theirs = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
    tensors = {_with_beginning(name, theirs): tensor for name, tensor in head.state_dict().items()}
    write_speculators(path, "eagle", "EagleSpeculator", options, tensors, verifier, num_tokens)


def save_eagle_for_vllm(head: EagleHead, path: Path) -> None:
    """Write a head in SafeAILab's layout, for its own code and for vLLM's and SGLang's method ``eagle``.

    Raises:
        InvalidOptionError: it is of a variant that vLLM does not have.
    """
    config = head.config
    before_norm = config.feature_layers != (AFTER_NORM,)
    if config.fc_bias or config.layernorms or before_norm:
        raise InvalidOptionError(
            f"vLLM has EAGLE heads on states behind the norm, without bias and norms; this one has "
            f"state_before_norm={before_norm}, fc_bias={config.fc_bias} and layernorms={config.layernorms}"
        )
    content = {
        **layer_config_json(config.layer),
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "bias": False,
        "torch_dtype": str(head.fc.weight.dtype).removeprefix("torch."),
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in head.state_dict().items()}, path / "model.safetensors")


def _renamed(name: str) -> str:
    return _with_beginning(name.removeprefix("model."), NAMES)


def _with_beginning(name: str, names: Mapping[str, str]) -> str:
    for theirs, ours in names.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _layer_options(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    options: Mapping[str, Any] = raw.get("transformer_layer_config") or raw.get("model") or raw
    return options


def _config(raw: dict[str, Any], tensors: Mapping[str, Tensor], vocab_size: int, num_layers: int) -> EagleConfig:
    return EagleConfig(
        layer=layer_config(_layer_options(raw)),
        vocab_size=vocab_size,
        feature_layers=state_layer(raw, num_layers),
        fc_bias=bool(raw.get("fusion_bias", raw.get("bias", "fc.bias" in tensors))),
        layernorms=bool(raw.get("layernorms", "pre_lm_head_layernorm.weight" in tensors)),
        norm_output=bool(raw.get("norm_output", False)),
        has_embeddings="embed_tokens.weight" in tensors,
    )


def _check_target(files: HeadFiles, tensors: Mapping[str, Tensor], hidden_size: int, vocab_size: int) -> None:
    shape = list(tensors["fc.weight"].shape)
    if shape != [hidden_size, 2 * hidden_size]:
        raise IncompatibleDrafterError(
            f"the head in {files.path} was made for another hidden size than the target's {hidden_size}: fc.weight has "
            f"shape {shape} and needs {[hidden_size, 2 * hidden_size]}; use a head that was trained for this target"
        )
    embeddings = tensors.get("embed_tokens.weight")
    known = len(embeddings) if embeddings is not None else _layer_options(files.config).get("vocab_size", vocab_size)
    if known != vocab_size:
        raise IncompatibleDrafterError(
            f"the head in {files.path} was made for a vocabulary of {known} tokens (embed_tokens.weight "
            f"{[known, hidden_size]}) and the target has {vocab_size} ({[vocab_size, hidden_size]}); use a head that "
            "was trained for this target"
        )
