"""Medusa heads (Cai et al., 2401.10774): head i guesses the token i + 2 places behind a state, all from the same state.

    x = state behind the final norm;  x = x + SiLU(linear(x)), ``num_layers`` times;  logits = lm_head(x)

Read are the original layout (``{i}.0.linear.weight``, ``{i}.1.weight``, with or without ``medusa_head.`` before it)
and vLLM's (``blocks.{i}.layers.{j}``, ``lm_heads.{i}`` or one ``lm_head`` for all, ``token_map`` of a draft
vocabulary), which is the one written, since vLLM reads no other. Numbers of heads and layers follow from the tensors:
published configurations state other ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from foredraft.errors import IncompatibleDrafterError, ModelLoadError
from foredraft.heads.checkpoint import HeadFiles, fill

_ORIGINAL = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)")


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """Shapes of the heads.

    Attributes:
        hidden_size: of the target.
        draft_vocab_size: ids that they can draft; ``has_token_map`` if these are not the target's.
        choices: nodes of a tree, best first and parents before children: the rank taken of each head down to it.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    draft_vocab_size: int
    has_bias: bool = True
    has_token_map: bool = False
    choices: tuple[tuple[int, ...], ...] = ()


class MedusaBlock(nn.Module):
    """The residual layers of one head."""

    def __init__(self, config: MedusaConfig):
        super().__init__()
        size = config.hidden_size
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=config.has_bias) for _ in range(config.num_layers))
        for layer in self.layers:
            nn.init.zeros_(layer.get_parameter("weight"))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHeads(nn.Module):
    """The module; names of its tensors are vLLM's."""

    def __init__(self, config: MedusaConfig):
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(MedusaBlock(config) for _ in range(config.num_heads))
        heads = (nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) for _ in range(config.num_heads))
        self.lm_heads = nn.ModuleList(heads)
        self.token_map: Tensor | None
        tokens = torch.arange(config.draft_vocab_size) if config.has_token_map else None
        self.register_buffer("token_map", tokens)

    def forward(self, states: Tensor, head: int) -> Tensor:
        """Logits ``[..., draft vocabulary]`` of one head behind states ``[..., hidden]``."""
        logits: Tensor = self.lm_heads[head](self.blocks[head](states))
        return logits


def read_medusa(files: HeadFiles, hidden_size: int, vocab_size: int) -> MedusaHeads:
    """The heads of a folder for a target of these sizes.

    Raises:
        ModelLoadError: the files hold no Medusa heads, or do not belong together.
        IncompatibleDrafterError: they were made for another target.
    """
    tensors = _renamed(files.tensors)
    first, last = tensors.get("blocks.0.layers.0.weight"), tensors.get("lm_heads.0.weight")
    if first is None or last is None:
        raise ModelLoadError(
            f"{files.path} holds no Medusa heads: it lacks 0.0.linear.weight or blocks.0.layers.0.weight"
        )
    if list(first.shape) != [hidden_size, hidden_size]:
        raise IncompatibleDrafterError(
            f"the heads in {files.path} were made for another hidden size than the target's: blocks.0.layers.0.weight "
            f"has shape {list(first.shape)} and needs {[hidden_size, hidden_size]}"
        )
    token_map = tensors.get("token_map")
    if token_map is None and len(last) != vocab_size:
        raise IncompatibleDrafterError(
            f"the heads in {files.path} were made for another vocabulary than the target's: lm_heads.0.weight has "
            f"shape {list(last.shape)} and needs {[vocab_size, hidden_size]}"
        )
    if token_map is not None and not 0 <= int(token_map.min()) <= int(token_map.max()) < vocab_size:
        raise IncompatibleDrafterError(
            f"token_map of the heads in {files.path} names token {int(token_map.max())} and the target has {vocab_size}"
        )
    config = MedusaConfig(
        num_heads=len({name.split(".")[1] for name in tensors if name.startswith("blocks.")}),
        num_layers=len([name for name in tensors if re.fullmatch(r"blocks\.0\.layers\.\d+\.weight", name)]),
        hidden_size=hidden_size,
        draft_vocab_size=len(last),
        has_bias="blocks.0.layers.0.bias" in tensors,
        has_token_map=token_map is not None,
        choices=_choices(files),
    )
    with torch.device("meta"):
        heads = MedusaHeads(config)
    fill(heads, tensors, files.path)
    return heads.eval()


def save_medusa(heads: MedusaHeads, path: Path, vocab_size: int) -> None:
    """Write ``config.json`` and ``model.safetensors`` as vLLM reads them."""
    config = heads.config
    content = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "medusa_fc_bias": config.has_bias,
        "original_lm_head": False,
        "medusa_choices": [list(path) for path in config.choices],
        "torch_dtype": str(heads.lm_heads[0].weight.dtype).removeprefix("torch."),
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in heads.state_dict().items()}
    save_file(tensors, path / "model.safetensors")


def _choices(files: HeadFiles) -> tuple[tuple[int, ...], ...]:
    """The tree that was measured with the heads; none in published ones, whose trees are part of their code."""
    try:
        choices = [tuple(int(rank) for rank in path) for path in files.config.get("medusa_choices") or []]
    except (TypeError, ValueError) as error:
        raise ModelLoadError(f"medusa_choices of the heads in {files.path} are no lists of ranks: {error}") from error
    known: set[tuple[int, ...]] = {()}
    for path in choices:
        if not path or path[:-1] not in known or path in known or min(path) < 0:
            raise ModelLoadError(
                f"medusa_choices of the heads in {files.path} are no tree: {list(path)} continues no path before it"
            )
        known.add(path)
    return tuple(choices)


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By vLLM's names. In the original the last number of a head is its lm_head, the others are residual layers."""
    found = {name: match for name in tensors if (match := _ORIGINAL.fullmatch(name))}
    renamed = {}
    for name, tensor in tensors.items():
        if name in found:
            head, place, is_layer, part = found[name].groups()
            renamed[f"blocks.{head}.layers.{place}.{part}" if is_layer else f"lm_heads.{head}.{part}"] = tensor
        else:
            renamed[name] = tensor
    shared = renamed.pop("lm_head.weight", None)
    if shared is not None:
        num_heads = len({name.split(".")[1] for name in renamed if name.startswith("blocks.")})
        renamed.update({f"lm_heads.{i}.weight": shared for i in range(num_heads)})
    return renamed
