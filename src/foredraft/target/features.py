"""Hidden states that a drafter wants, taken from the target's own passes: no pass more, only rows that are computed.

Layers are counted as by ``output_hidden_states`` of transformers:

    0              the embeddings
    n              what comes out of the first n layers, before any norm that follows the last
    AFTER_NORM     what the head reads, behind the final norm

EAGLE-3 checkpoints and vLLM mean the same by an id; DFlash lists and SpecForge's start with the first layer's output
at 0, so that their n is n + 1 here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.errors import UnsupportedModelError
from foredraft.target.kinds import describe
from foredraft.target.layout import PassLayout, PassRow

AFTER_NORM = -1


@dataclass(slots=True)
class HiddenStates:
    """What a pass is asked for, and gets.

    Attributes:
        layer_ids: which states, in the order in which they are wanted.
        of_sequence: after the pass, ``[tokens fed, layers, hidden]`` of each of its rows.
        start_of: the place of the first of these tokens in the text.
    """

    layer_ids: tuple[int, ...]
    of_sequence: dict[int, Tensor] = field(default_factory=dict)
    start_of: dict[int, int] = field(default_factory=dict)

    def take(self, rows: Sequence[PassRow], layout: PassLayout) -> None:
        """Split what the taps left in the layout by rows; slots that keep states get them."""
        assert layout.hidden_states is not None
        states = torch.stack([layout.hidden_states[layer] for layer in self.layer_ids], 1)
        layout.slots.write_states(layout.write_index, states)
        by_slot = {layout.slots.slot(row.sequence_id): row for row in rows}
        for laid in layout.laid:
            row = by_slot[laid.slot]
            self.of_sequence[row.sequence_id] = states[laid.offset : laid.offset + len(row.token_ids)]
            self.start_of[row.sequence_id] = layout.slots.length(row.sequence_id)


def check_layer_ids(model: nn.Module, layers: Sequence[nn.Module], layer_ids: Sequence[int]) -> None:
    """Raises UnsupportedModelError if there is no layer of a number."""
    for layer in layer_ids:
        if not AFTER_NORM <= layer <= len(layers):
            raise UnsupportedModelError(
                f"hidden states of layer {layer} are wanted and {describe(model)} has {len(layers)} layers; ids go "
                f"from 0, the embeddings, to {len(layers)}, and {AFTER_NORM} is what the head reads"
            )


def tap(model: nn.Module, layers: Sequence[nn.Module], layer_ids: Sequence[int]) -> None:
    """Let passes whose layout asks for hidden states note those of some layers."""
    for layer in layer_ids:
        if layer == AFTER_NORM:
            any_model: Any = model
            any_model.base_model.register_forward_hook(_note(layer), with_kwargs=True)
        elif layer == 0:
            layers[0].register_forward_pre_hook(_note_input, with_kwargs=True)
        else:
            layers[layer - 1].register_forward_hook(_note(layer), with_kwargs=True)


def _note(layer: int) -> Any:
    def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        layout: PassLayout = kwargs["layout"]
        if layout.hidden_states is not None:
            states = output if isinstance(output, Tensor) else output[0]
            layout.hidden_states[layer] = states[0]

    return hook


def _note_input(_: nn.Module, args: Any, kwargs: Any) -> None:
    layout: PassLayout = kwargs["layout"]
    if layout.hidden_states is not None:
        states: Tensor = args[0] if args else kwargs["hidden_states"]
        layout.hidden_states[0] = states[0]
