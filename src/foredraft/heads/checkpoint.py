"""Reading the files of a draft head, and filling a module with them; what does not fit is named with both shapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, LlamaConfig

from foredraft.errors import ModelLoadError
from foredraft.target.checkpoint import check_weight_files, read_config
from foredraft.target.features import AFTER_NORM
from foredraft.target.zoo import resolve_model

SPECULATORS_VERSION = "0.8.0"


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """What a head's folder holds: ``config.json`` as it stands, and all tensors."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]


def read_head(
    name: str, cache_dir: str | None = None, wanted: Callable[[str, dict[str, Any]], bool] = lambda *_: True
) -> HeadFiles:
    """Read a head from a folder or a hub id; weights as safetensors or as a pickle of tensors.

    Args:
        wanted: whether a tensor is to be read, by its name and config.json.

    Raises:
        ModelLoadError: it cannot be found or read.
    """
    path = resolve_model(name, cache_dir)
    config = read_config(path)
    pickles = sorted(path.glob("*.bin")) + sorted(path.glob("*.pt"))
    tensors: dict[str, Tensor] = {}
    if pickles and not list(path.glob("*.safetensors")):
        for file in pickles:
            try:
                held = torch.load(file, map_location="cpu", weights_only=True)
            except Exception as error:  # damaged pickles raise many kinds
                raise ModelLoadError(f"{file} cannot be read as a dictionary of tensors: {error}") from error
            tensors.update({key: tensor for key, tensor in held.items() if wanted(key, config)})
    else:
        for file in check_weight_files(path):
            with safe_open(file, framework="pt") as opened:
                tensors.update({key: opened.get_tensor(key) for key in opened.keys() if wanted(key, config)})  # noqa: SIM118
    return HeadFiles(path, config, tensors)


def layer_config(raw: Mapping[str, Any]) -> Any:
    """The configuration of decoder layers from its JSON; kinds that transformers does not know are read as Llama's."""
    options = {key: value for key, value in raw.items() if key not in ("model_type", "architectures", "auto_map")}
    if raw.get("model_type") in ("qwen3",):
        return AutoConfig.for_model(raw["model_type"], **options)
    return LlamaConfig(**options)


def state_layer(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layer whose state a head reads, as ``feature_layers``: what the target's lm_head reads, unless its
    config.json says ``state_before_norm``."""
    return (num_layers,) if raw.get("state_before_norm") else (AFTER_NORM,)


def layer_config_json(config: Any) -> dict[str, Any]:
    """JSON of a layer configuration, with the rotary base where older readers look for it, too."""
    content: dict[str, Any] = config.to_dict()
    rope = dict(content.get("rope_parameters") or {})
    if rope:
        content["rope_theta"] = rope.pop("rope_theta")
        content["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    unwanted = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
    return {key: value for key, value in content.items() if key not in unwanted}


def fill(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    where: Path,
    ignored: Collection[str] = (),
    written: Callable[[str], str] = str,
) -> None:
    """Put tensors into a module that was made on the meta device.

    Args:
        ignored: names that may be there and are not read.
        written: the name in the files, for messages, of a tensor of the module.

    Raises:
        ModelLoadError: one is missing, has no place, or another shape than the configuration says.
    """
    expected = module.state_dict()
    for name, wanted in expected.items():
        if name not in tensors:
            raise ModelLoadError(
                f"the head in {where} lacks the tensor {written(name)}, which its config.json says has shape "
                f"{_shape(wanted)}; it has {_some(map(written, tensors))}"
            )
        if tensors[name].shape != wanted.shape:
            raise ModelLoadError(
                f"tensor {written(name)} of the head in {where} has shape {_shape(tensors[name])}, and by its "
                f"config.json it should have {_shape(wanted)}; the files do not belong together"
            )
    for name, tensor in tensors.items():
        if name not in expected and name not in ignored:
            raise ModelLoadError(
                f"the head in {where} has a tensor {written(name)} of shape {_shape(tensor)}, for which its "
                "config.json has no place; it is a variant that is not known, or the files do not belong together"
            )
    module.load_state_dict({name: tensors[name] for name in expected}, assign=True)


def with_vocabulary(path: Path, size: int, vocab_size: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with ``d2t`` and ``t2d``, which may be left out where the draft vocabulary is the target's.

    Raises:
        ModelLoadError: ``d2t`` is missing, or gives no ``size`` different tokens of the target.
    """
    d2t = tensors.get("d2t")
    if d2t is None:
        if size != vocab_size:
            raise ModelLoadError(
                f"the head in {path} lacks the tensor d2t of shape [{size}], without which its {size} ids cannot be "
                f"told from the {vocab_size} of the target"
            )
        d2t = torch.zeros(size, dtype=torch.int64)
    token_ids = d2t.to(torch.int64) + torch.arange(len(d2t))
    if len(token_ids.unique()) != len(token_ids) or not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise ModelLoadError(
            f"tensor d2t of the head in {path} does not give {len(token_ids)} different tokens of the target's "
            f"{vocab_size}; it must hold offsets: id i is token i + d2t[i]"
        )
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[token_ids] = True
    return {**tensors, "d2t": d2t.to(torch.int64), "t2d": t2d}


def write_speculators(
    path: Path,
    kind: str,
    architecture: str,
    options: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    verifier: Mapping[str, Any],
    num_tokens: int,
) -> None:
    """Write ``config.json`` and ``model.safetensors`` in the speculators format.

    Args:
        options: of this kind of head.
        verifier: ``name_or_path`` and ``architectures`` of the target.
        num_tokens: draft tokens a step that readers take by default.
    """
    from safetensors.torch import save_file

    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config = {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": dict(verifier),
        },
        **options,
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


def _some(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
