"""MTP modules: read out of the target's own checkpoint or a folder of their own, written as vLLM reads them.

    DeepSeek, GLM     model.layers.{n}.*, n the number of the target's layers: enorm, hnorm, eh_proj, shared_head.norm
    Qwen3-Next, 3.5   mtp.*: pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm; the layer is layers.0
    MiMo              model.mtp_layers.0.*: token_layernorm, hidden_layernorm, input_proj, final_layernorm; states first
    speculators       mtp_layers.0.*, names as MiMo's, embeddings first

Copies of the target's embeddings and lm_head are not read: the target's are used. Experts are one by one in files and
side by side in the module (``gate_up_proj [E, 2 I, H]``, ``down_proj [E, H, I]``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foredraft.errors import IncompatibleDrafterError, ModelLoadError
from foredraft.heads.checkpoint import HeadFiles, fill, layer_config_json, read_head, state_layer
from foredraft.heads.kinds import PREFIXES
from foredraft.heads.mtp import MtpConfig, MtpHead, one_layer
from foredraft.target.checkpoint import mtp_module
from foredraft.target.features import AFTER_NORM

KINDS = {"deepseek_mtp": "deepseek_v3", "mimo": "qwen2", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""``model_type`` of files to that of the decoder layer, where they differ."""
FUSED_EXPERTS = ("qwen3_5_moe_text",)
"""Kinds whose files have their experts side by side, too."""
SHARED = ("embed_tokens.weight", "shared_head.head.weight", "lm_head.weight")
_EXPERT = re.compile(r"(.*mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_OWN_PARTS = ("enorm.", "hnorm.", "eh_proj.", "norm.")


@dataclass(frozen=True, slots=True)
class Layout:
    """How files name the tensors of a module: ``enorm``, ``hnorm``, ``eh_proj``, ``norm`` and the layer's."""

    enorm: str
    hnorm: str
    eh_proj: str
    norm: str
    layer: str = ""

    def written(self, name: str) -> str:
        """The name in files of a tensor of :class:`MtpHead`."""
        part, _, rest = name.partition(".")
        if part == "block":
            return self.layer + rest.removeprefix("inner.")
        return f"{getattr(self, part)}.{rest}"

    def read(self, name: str) -> str:
        """The name in the module of a tensor in files."""
        for part in ("enorm", "hnorm", "eh_proj", "norm"):
            if name.startswith(getattr(self, part) + "."):
                return part + name.removeprefix(getattr(self, part))
        return "block.inner." + name.removeprefix(self.layer)


DEEPSEEK = Layout("enorm", "hnorm", "eh_proj", "shared_head.norm")
QWEN = Layout("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0.")
MIMO = Layout("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")


def read_mtp_files(name: str, cache_dir: str | None = None) -> HeadFiles:
    """The tensors of the MTP modules of a folder or hub id, without those of the target around them."""
    files = read_head(name, cache_dir, lambda tensor, config: mtp_module(tensor, _text(config)) is not None)
    if not files.tensors:
        raise ModelLoadError(
            f"{files.path} holds no MTP module: none of its tensors is called mtp.*, mtp_layers.* or model.layers.n.* "
            f"with n from num_hidden_layers={_text(files.config).get('num_hidden_layers')} on; name a folder that does "
            "with model="
        )
    return files


def read_mtp(files: HeadFiles, hidden_size: int, vocab_size: int, num_layers: int) -> MtpHead:
    """The module of a folder for a target of these sizes.

    Raises:
        ModelLoadError: the files hold no module, several, or do not belong together.
        IncompatibleDrafterError: it was made for another target.
        UnsupportedModelError: its decoder layer is of a kind that is not known.
    """
    prefix = _prefix(files)
    layout = _layout(prefix)
    held = {name.removeprefix(prefix): tensor for name, tensor in files.tensors.items() if name.startswith(prefix)}
    known = {n: t for n, t in held.items() if not n.endswith((*SHARED, "rotary_emb.inv_freq"))}
    _check_target(files, prefix, layout, held, hidden_size, vocab_size)
    tensors = side_by_side({layout.read(name): tensor for name, tensor in known.items()}, files.path)
    with torch.device("meta"):
        head = MtpHead(_config(files, prefix, tensors, num_layers))
    fill(head, tensors, files.path, written=lambda name: prefix + layout.written(name))
    return head.eval()


def save_mtp(head: MtpHead, path: Path, num_layers: int) -> None:
    """Write a module in the layout of its kind, Qwen's or else DeepSeek's, every flag written out.

    Args:
        num_layers: of the target.
    """
    config, kind = head.config, head.config.layer.model_type
    prefix = "mtp." if kind.startswith(("qwen3_next", "qwen3_5")) else f"model.layers.{num_layers}."
    layout = _layout(prefix)
    content = {
        **layer_config_json(config.layer),
        "model_type": kind,
        "architectures": ["MtpModel"],
        "num_hidden_layers": num_layers,
        "num_nextn_predict_layers": 1,
        "mtp_num_hidden_layers": 1,
        "mtp_hidden_states_first": config.states_first,
        "norm_output": config.norm_output,
        "state_before_norm": config.feature_layers != (AFTER_NORM,),
        "torch_dtype": str(head.eh_proj.weight.dtype).removeprefix("torch."),
    }
    tensors = dict(head.state_dict())
    if kind not in FUSED_EXPERTS:
        tensors = one_by_one(tensors)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    written = {prefix + layout.written(name): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(written, path / "model.safetensors")


def side_by_side(tensors: Mapping[str, Tensor], where: Path) -> dict[str, Tensor]:
    """Join the matrices of experts that come one by one; others are left as they are."""
    joined: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in tensors.items():
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
        else:
            joined[name] = tensor
    for name, parts in experts.items():
        count = 1 + max(index for index, _ in parts)
        lacking = [(i, p) for i in range(count) for p in ("gate_proj", "up_proj", "down_proj") if (i, p) not in parts]
        if lacking:
            index, part = lacking[0]
            raise ModelLoadError(
                f"the head in {where} lacks the tensor {name.removeprefix('block.inner.')}.{index}.{part}.weight, and "
                f"has other experts up to {count - 1}"
            )
        both = [torch.cat([parts[i, "gate_proj"], parts[i, "up_proj"]]) for i in range(count)]
        joined[f"{name}.gate_up_proj"] = torch.stack(both)
        joined[f"{name}.down_proj"] = torch.stack([parts[i, "down_proj"] for i in range(count)])
    return joined


def one_by_one(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of :func:`side_by_side`."""
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        owner, _, part = name.rpartition(".")
        if not owner.endswith("mlp.experts"):
            split[name] = tensor
        elif part == "down_proj":
            split |= {f"{owner}.{i}.down_proj.weight": matrix for i, matrix in enumerate(tensor)}
        else:
            for i, matrix in enumerate(tensor):
                gate, up = matrix.chunk(2)
                split |= {f"{owner}.{i}.gate_proj.weight": gate, f"{owner}.{i}.up_proj.weight": up}
    return split


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the decoder layer."""
    text: Mapping[str, Any] = config.get("transformer_layer_config") or config.get("text_config") or config
    return text


def _prefix(files: HeadFiles) -> str:
    """What the names of the one module begin with."""
    found = {module for name in files.tensors if (module := mtp_module(name, _text(files.config)))}
    if len(found) != 1:
        raise ModelLoadError(
            f"{files.path} holds {len(found)} MTP modules ({', '.join(sorted(found))}) and drafting runs one, again "
            "and again; only heads of one module are supported"
        )
    return found.pop()


def _layout(prefix: str) -> Layout:
    if prefix == "mtp.":
        return QWEN
    return MIMO if "mtp_layers" in prefix else DEEPSEEK


def _config(files: HeadFiles, prefix: str, tensors: Mapping[str, Tensor], num_layers: int) -> MtpConfig:
    raw, text = files.config, _text(files.config)
    kind = KINDS.get(text.get("model_type", ""), text.get("model_type", ""))
    if kind not in PREFIXES:
        raise ModelLoadError(
            f"the MTP module in {files.path} has a decoder layer of the kind {kind!r}; known are {', '.join(PREFIXES)}"
        )
    unwanted = ("model_type", "architectures", "auto_map", "quantization_config")
    options = {key: value for key, value in text.items() if key not in unwanted}
    is_mimo = prefix.startswith("model.mtp_layers")
    return MtpConfig(
        layer=one_layer(kind, options, has_experts=any("mlp.experts." in name for name in tensors)),
        feature_layers=state_layer(raw, num_layers),
        states_first=bool(raw.get("mtp_hidden_states_first", is_mimo)),
        norm_output=bool(raw.get("norm_output", True)),
    )


def _check_target(
    files: HeadFiles, prefix: str, layout: Layout, held: Mapping[str, Tensor], hidden_size: int, vocab_size: int
) -> None:
    name = f"{layout.eh_proj}.weight"
    wanted = {name: [hidden_size, 2 * hidden_size], **{shared: [vocab_size, hidden_size] for shared in SHARED}}
    if name not in held:
        raise ModelLoadError(f"the MTP module in {files.path} lacks the tensor {prefix}{name} of shape {wanted[name]}")
    for tensor, shape in wanted.items():
        if tensor in held and list(held[tensor].shape) != shape:
            raise IncompatibleDrafterError(
                f"the MTP module in {files.path} was made for another target: {prefix}{tensor} has shape "
                f"{list(held[tensor].shape)} and needs {shape}"
            )
    known = _text(files.config).get("vocab_size", vocab_size)
    if known != vocab_size:
        raise IncompatibleDrafterError(
            f"the MTP module in {files.path} was made for a vocabulary of {known} tokens (lm_head.weight "
            f"{[known, hidden_size]}) and the target has {vocab_size} ({[vocab_size, hidden_size]})"
        )
