"""DFlash checkpoints: read and written as z-lab publishes them (vLLM and SGLang read that), and as speculators does.

    z-lab         a Qwen3 config with block_size and dflash_config: {mask_token_id, target_layer_ids}; id n is what
                  comes out of layer n, so n + 1 here; neither embeddings nor lm_head
    speculators   transformer_layer_config, block_size, mask_token_id, aux_hidden_state_layer_ids as counted here;
                  lm_head, d2t and t2d where the draft vocabulary is smaller

Full attention looks ahead within a block. Sliding attention does not, unless ``is_causal``, ``dflash_config.causal``
or ``sliding_window_non_causal`` says otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config

from foredraft.errors import IncompatibleDrafterError, ModelLoadError
from foredraft.heads.checkpoint import HeadFiles, fill, layer_config_json, with_vocabulary, write_speculators
from foredraft.heads.dflash import DFlashConfig, DFlashHead

NOT_READ = ("verifier_norm.weight", "verifier_lm_head.weight", "d2t", "t2d")
SLIDING = "sliding_attention"
VARIANTS: dict[str, tuple[Any, ...]] = {
    "projector_type": (None, "dflash"),
    "attention_mode": (None, "gqa", "mha"),
    "sample_from_anchor": (None, False),
    "shift_label": (None, False),
    "is_neox_style": (None, True),
}
"""Options that change what a head computes, and the values under which it is the one that is known here."""


def default_target_layers(num_layers: int, num_draft_layers: int) -> list[int]:
    """Those of the reference code, in its counting: evenly spread, without the first and the last ones."""
    if num_draft_layers == 1:
        return [num_layers // 2]
    return [round(1 + i * (num_layers - 4) / (num_draft_layers - 1)) for i in range(num_draft_layers)]


def read_dflash(files: HeadFiles, hidden_size: int, vocab_size: int, num_layers: int) -> DFlashHead:
    """The head of a folder for a target of these sizes.

    Raises:
        ModelLoadError: the files are no DFlash head, or a variant that is not known, or do not belong together.
        IncompatibleDrafterError: it was made for another target.
    """
    tensors = {name.removeprefix("model."): tensor for name, tensor in files.tensors.items()}
    if "fc.weight" not in tensors or "hidden_norm.weight" not in tensors:
        raise ModelLoadError(
            f"{files.path} is no DFlash head: it lacks fc.weight or hidden_norm.weight "
            f"(model kind {files.config.get('speculators_model_type') or files.config.get('model_type')!r})"
        )
    if (files.path / "mask_embedding.pt").exists():
        raise ModelLoadError(f"the head in {files.path} has an embedding of its own for masks, which is not read here")
    config = _config(files, tensors, hidden_size, vocab_size, num_layers)
    _check_target(files.path, config, tensors)
    with torch.device("meta"):
        head = DFlashHead(config)
    if config.draft_vocab_size is not None:
        tensors = with_vocabulary(files.path, config.draft_vocab_size, vocab_size, tensors)
    fill(head, tensors, files.path, NOT_READ)
    return head.eval()


def save_dflash(head: DFlashHead, path: Path, verifier: Mapping[str, Any]) -> None:
    """Write a head in the speculators format.

    Args:
        verifier: ``name_or_path`` and ``architectures`` of the target.

    Raises:
        ValueError: the format has no place for something that the head has.
    """
    config = head.config
    if (config.embedding_scale, config.logit_scale, config.logit_cap) != (1.0, 1.0, 0.0):
        raise ValueError("the speculators format has no place for factors of embeddings or logits; use save_zlab")
    sliding = [causal for causal, window in zip(config.is_causal, config.windows, strict=True) if window is not None]
    full = [causal for causal, window in zip(config.is_causal, config.windows, strict=True) if window is None]
    if any(full) or len(set(sliding)) > 1:
        raise ValueError(f"the speculators format has no place for layers with is_causal={config.is_causal}")
    options = {
        "transformer_layer_config": _layer_json(config),
        "draft_vocab_size": config.draft_vocab_size or config.target_vocab_size,
        "block_size": config.block_size,
        "target_hidden_size": config.target_hidden_size,
        "aux_hidden_state_layer_ids": list(config.feature_layers),
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": not any(sliding),
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "torch_dtype": _dtype(head),
    }
    tensors = head.state_dict()
    write_speculators(path, "dflash", "DFlashSpeculator", options, tensors, verifier, config.block_size - 1)


def save_zlab(head: DFlashHead, path: Path, num_target_layers: int) -> None:
    """Write a head as z-lab does.

    Raises:
        ValueError: the format has no place for something that the head has.
    """
    config = head.config
    if config.draft_vocab_size is not None or config.has_embeddings:
        raise ValueError("z-lab's format has no place for embeddings or a vocabulary of the head; use save_dflash")
    default = tuple(window is not None for window in config.windows)
    if len(set(config.is_causal)) > 1 and config.is_causal != default:
        raise ValueError(f"z-lab's format has no place for layers with is_causal={config.is_causal}")
    same = len(set(config.is_causal)) == 1
    content = {
        **_layer_json(config),
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block_size,
        "num_target_layers": num_target_layers,
        **({"is_causal": config.is_causal[0]} if same else {}),
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": [layer - 1 for layer in config.feature_layers],
            "input_embedding_scale": config.embedding_scale,
            "output_multiplier": config.logit_scale,
            "final_logit_softcapping": config.logit_cap or None,
            **({"causal": config.is_causal[0]} if same else {}),
        },
        "dtype": _dtype(head),
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    save_file({name: t.detach().contiguous() for name, t in head.state_dict().items()}, path / "model.safetensors")


def _layer_json(config: DFlashConfig) -> dict[str, Any]:
    return {**layer_config_json(config.layer), "vocab_size": config.target_vocab_size}


def _dtype(head: DFlashHead) -> str:
    return str(head.fc.weight.dtype).removeprefix("torch.")


def _config(
    files: HeadFiles, tensors: Mapping[str, Tensor], hidden_size: int, vocab_size: int, num_layers: int
) -> DFlashConfig:
    raw = files.config
    own = raw.get("dflash_config") or {}

    def value(name: str, default: Any = None) -> Any:
        return own.get(name, raw.get(name, default))

    for name, known in VARIANTS.items():
        if value(name) not in known:
            raise ModelLoadError(f"the head in {files.path} has {name}={value(name)!r}, a variant that is not known")
    mask = value("mask_token_id")
    if not isinstance(mask, int) or not 0 <= mask < vocab_size:
        raise ModelLoadError(
            f"mask_token_id in the config.json of {files.path} is {mask!r}; it must be a token of the target's "
            f"{vocab_size}"
        )
    nested = raw.get("transformer_layer_config")
    layer = _layer_config(nested or raw)
    count = layer.num_hidden_layers
    if nested is None:
        layer_ids = value("target_layer_ids") or default_target_layers(num_layers, count)
        feature_layers = tuple(layer_id + 1 for layer_id in layer_ids)
    elif raw.get("aux_hidden_state_layer_ids"):
        feature_layers = tuple(raw["aux_hidden_state_layer_ids"])
    else:
        raise ModelLoadError(f"config.json of {files.path} has no aux_hidden_state_layer_ids, the layers that it reads")
    windows = _windows(files.path, nested or raw, own, layer)
    causal = next((c for c in (raw.get("is_causal"), own.get("causal")) if c is not None), None)
    if causal is None and nested is not None and raw.get("sliding_window_non_causal"):
        causal = False
    has_head = "lm_head.weight" in tensors
    return DFlashConfig(
        layer=layer,
        block_size=int(value("block_size", 16 if nested is None else 8)),
        mask_token_id=mask,
        target_vocab_size=vocab_size,
        target_hidden_size=hidden_size,
        feature_layers=feature_layers,
        is_causal=tuple(window is not None if causal is None else bool(causal) for window in windows),
        windows=windows,
        draft_vocab_size=raw.get("draft_vocab_size") or layer.vocab_size if has_head else None,
        has_embeddings="embed_tokens.weight" in tensors,
        embedding_scale=float(value("input_embedding_scale", 1.0)),
        logit_scale=float(value("output_multiplier", 1.0)),
        logit_cap=float(value("final_logit_softcapping") or 0.0),
    )


def _layer_config(raw: Mapping[str, Any]) -> Any:
    """Layers are those of Qwen3 whatever kind the configuration names."""
    options = {key: value for key, value in raw.items() if key not in ("model_type", "architectures", "auto_map")}
    if raw.get("model_type") != "qwen3":
        options.setdefault("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    return Qwen3Config(**options)


def _windows(path: Path, raw: Mapping[str, Any], own: Mapping[str, Any], layer: Any) -> tuple[int | None, ...]:
    kinds = list(layer.layer_types)
    if own.get("use_swa") and SLIDING not in kinds:
        kinds = [SLIDING] * len(kinds)
    window = own.get("swa_window_size") or raw.get("sliding_window")
    if SLIDING in kinds and not window:
        raise ModelLoadError(f"config.json of {path} names layers of sliding attention, and no sliding_window")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _check_target(path: Path, config: DFlashConfig, tensors: Mapping[str, Tensor]) -> None:
    shape, num_features, size = list(tensors["fc.weight"].shape), len(config.feature_layers), config.target_hidden_size
    if shape[1] != num_features * size:
        raise IncompatibleDrafterError(
            f"the head in {path} reads states of {shape[1]} numbers and the target has {num_features} x {size}: "
            f"fc.weight has shape {shape} and needs {[shape[0], num_features * size]}; use a head that was trained "
            "for this target"
        )
    needs_target = not config.has_embeddings or config.draft_vocab_size is None
    if needs_target and config.layer.hidden_size != size:
        raise IncompatibleDrafterError(
            f"the head in {path} has a hidden size of {config.layer.hidden_size}, the target one of {size}, and there "
            "is no embed_tokens.weight and lm_head.weight; use a head that was trained for this target"
        )
    known = len(tensors["embed_tokens.weight"]) if config.has_embeddings else config.layer.vocab_size
    if known != config.target_vocab_size:
        raise IncompatibleDrafterError(
            f"the head in {path} was made for a vocabulary of {known} tokens and the target has "
            f"{config.target_vocab_size}; use a head that was trained for this target"
        )
