"""EAGLE-3 checkpoints: read as SafeAILab, NVIDIA and speculators publish them, written as speculators does.

    SafeAILab     Llama config with draft_vocab_size; midlayer.*, fc, norm, lm_head, d2t, t2d
    NVIDIA        the same with eagle_config: {eagle_aux_hidden_state_layer_ids: [...]}
    speculators   transformer_layer_config, flags of the norms; layers.0.*

``d2t`` is an offset: id i of the draft vocabulary is token i + d2t[i]. Embeddings that are left out are the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import IncompatibleDrafterError, ModelLoadError
from foredraft.heads.checkpoint import (
    HeadFiles,
    fill,
    layer_config,
    layer_config_json,
    with_vocabulary,
    write_speculators,
)
from foredraft.heads.eagle3 import Eagle3Config, Eagle3Head

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
NOT_READ = ("verifier_norm.weight", "verifier_lm_head.weight", "layers.0.self_attn.rotary_emb.inv_freq")


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Those of the reference code: near the start, in the middle, near the end."""
    return 2, num_layers // 2, num_layers - 3


def read_eagle3(files: HeadFiles, hidden_size: int, vocab_size: int, num_layers: int) -> Eagle3Head:
    """The head of a folder for a target of these sizes.

    Raises:
        ModelLoadError: the files are no EAGLE-3 head, or do not belong together.
        IncompatibleDrafterError: it was made for another target.
    """
    tensors = {_renamed(name): tensor for name, tensor in files.tensors.items()}
    if "fc.weight" not in tensors or "layers.0.hidden_norm.weight" not in tensors:
        raise ModelLoadError(
            f"{files.path} is no EAGLE-3 head: it lacks fc.weight or midlayer.hidden_norm.weight "
            f"(model kind {files.config.get('speculators_model_type') or files.config.get('model_type')!r})"
        )
    config = _config(files.config, tensors, vocab_size, num_layers)
    _check_target(files.path, config, tensors, hidden_size, vocab_size)
    tensors = with_vocabulary(files.path, config.draft_vocab_size, vocab_size, tensors)
    with torch.device("meta"):
        head = Eagle3Head(config)
    fill(head, tensors, files.path, NOT_READ)
    return head.eval()


def save_eagle3(head: Eagle3Head, path: Path, verifier: Mapping[str, Any], num_tokens: int = 3) -> None:
    """Write a head; every flag of a norm is written out, since readers differ in what they take for granted.

    A head that drafts the whole vocabulary is written without ``d2t`` and ``t2d``: vLLM refuses them there.

    Args:
        verifier: ``name_or_path`` and ``architectures`` of the target.
        num_tokens: draft tokens a step that readers take by default.
    """
    config = head.config
    options = {
        "transformer_layer_config": {**layer_config_json(config.layer), "vocab_size": config.target_vocab_size},
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(head.fc.weight.dtype).removeprefix("torch."),
        **{flag: getattr(config, flag) for flag in FLAGS},
    }
    tensors = head.state_dict()
    if config.draft_vocab_size == config.target_vocab_size:
        del tensors["d2t"], tensors["t2d"]
    write_speculators(path, "eagle3", "Eagle3Speculator", options, tensors, verifier, num_tokens)


def _renamed(name: str) -> str:
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def _config(raw: dict[str, Any], tensors: Mapping[str, Tensor], vocab_size: int, num_layers: int) -> Eagle3Config:
    eagle = raw.get("eagle_config") or {}
    layer = layer_config(raw.get("transformer_layer_config") or raw)
    layer_ids = raw.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    feature_layers = tuple(layer_ids or default_feature_layers(num_layers))
    flags: dict[str, bool] = {flag: bool(raw.get(flag, eagle.get(flag, False))) for flag in FLAGS}
    return Eagle3Config(
        layer=layer,
        draft_vocab_size=raw.get("draft_vocab_size") or layer.vocab_size,
        target_vocab_size=vocab_size,
        target_hidden_size=raw.get("target_hidden_size") or layer.hidden_size,
        feature_layers=feature_layers,
        has_embeddings="embed_tokens.weight" in tensors,
        **flags,
    )


def _check_target(
    path: Path, config: Eagle3Config, tensors: Mapping[str, Tensor], hidden_size: int, vocab_size: int
) -> None:
    shape, num_features = list(tensors["fc.weight"].shape), len(config.feature_layers)
    if shape[1] != num_features * hidden_size:
        raise IncompatibleDrafterError(
            f"the head in {path} reads states of {shape[1]} numbers and the target has {num_features} x {hidden_size}: "
            f"fc.weight has shape {shape} and needs {[shape[0], num_features * hidden_size]}; use a head that was "
            "trained for this target"
        )
    known = tensors["t2d"].numel() if "t2d" in tensors else config.layer.vocab_size
    if "embed_tokens.weight" in tensors:
        known = len(tensors["embed_tokens.weight"])
    elif config.layer.hidden_size != hidden_size:
        raise IncompatibleDrafterError(
            f"the head in {path} has a hidden size of {config.layer.hidden_size}, the target one of {hidden_size}, and "
            "there is no embed_tokens.weight to read tokens with; use a head that was trained for this target"
        )
    if known != vocab_size:
        raise IncompatibleDrafterError(
            f"the head in {path} was made for a vocabulary of {known} tokens (t2d [{known}]) and the target has "
            f"{vocab_size} (t2d [{vocab_size}]); use a head that was trained for this target"
        )
