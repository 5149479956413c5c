"""From a transformers model to the :class:`TargetModel` of its kind."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from foredraft.errors import UnsupportedModelError
from foredraft.target.forward import TargetModel
from foredraft.target.kinds import describe, state_kinds
from foredraft.target.statecheck import check_states
from foredraft.target.stateful import StatefulModel


def wrap_model(
    model: nn.Module, max_model_len: int, *, packed: bool = True, compiled: bool = False, folder: Path | None = None
) -> TargetModel:
    """A model with its cache; arguments as for :class:`TargetModel`, and the model is changed in place.

    Raises:
        UnsupportedModelError: the model cannot be decoded exactly; it says why.
    """
    if not state_kinds(model):
        return TargetModel(model, max_model_len, packed=packed, compiled=compiled, folder=folder)
    if compiled:
        raise UnsupportedModelError(
            f"compile=True is not there for {describe(model)}, whose layers keep a state of another kind than keys "
            "and values; leave it out"
        )
    target = StatefulModel(model, max_model_len)
    check_states(target)
    return target
