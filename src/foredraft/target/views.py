"""Some of a model's decoder layers as a model: shallow copies of the modules above them, and nothing else copied."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from foredraft.errors import UnsupportedModelError


def find_layers(model: nn.Module, num_layers: int) -> tuple[str, nn.ModuleList]:
    """The list of decoder layers, with its dotted name: entry i holds the attention of layer i.

    Raises:
        UnsupportedModelError: there is no such list.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) != num_layers:
            continue
        if all(layer_indices(layer) == {i} for i, layer in enumerate(module)):
            return name, module
    raise UnsupportedModelError(
        f"{type(model).__name__} has no list of {num_layers} decoder layers, one for each attention layer, "
        "so it cannot draft for itself; use another method"
    )


def layer_indices(layer: nn.Module) -> set[int]:
    """The indices of the attention layers in a module."""
    return {int(m.layer_idx) for m in layer.modules() if getattr(m, "layer_idx", None) is not None}  # type: ignore[arg-type]


def with_layers(model: nn.Module, name: str, layers: Sequence[nn.Module]) -> nn.Module:
    """A model that runs ``layers`` where ``model`` runs those of the list called ``name``."""
    *parents, last = name.split(".")
    view = inner = _shallow(model)
    for parent in parents:
        inner._modules[parent] = child = _shallow(inner.get_submodule(parent))
        inner = child
    inner._modules[last] = nn.ModuleList(layers)
    config: Any = getattr(inner, "config", None)
    if config is not None:  # models count their layers and find each one's kind by this, not by the list
        inner.config = config = copy.copy(config)
        config.num_hidden_layers = len(layers)
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[min(layer_indices(layer))] for layer in layers]
    return view


def _shallow(module: nn.Module) -> nn.Module:
    """A module of the same class with the same children, whose table of children is its own."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin
