"""A target cut in two at a layer, so that its pass goes on from what a draft of its first layers left.

    draft     layers 0 .. E-1 | norm, head        last, d1, d2      states behind layer E-1 are kept
    target    layers 0 .. E-1                                 d3    only what the draft did not feed
              layers E .. L-1 | norm, head        last, d1, d2, d3  from the kept states

The keys and values of the first layers lie in the target's slots, past the committed length, where the draft wrote
them. LayerSkip (Elhoushi et al., 2404.16710), section 4.3, the "exit query cache". Where a row's bits do not depend
on its pass, the tokens are the very same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foredraft.errors import InvalidOptionError, UnsupportedModelError
from foredraft.target.layout import PassRow, is_chain
from foredraft.target.lowering import TOLERANCE

if TYPE_CHECKING:
    from foredraft.target.forward import TargetModel

PROBE_ID = -3
PROBE_TOKENS = 6


class _Layer(nn.Module):
    """A decoder layer that shows or takes the hidden states ``[T, hidden]`` at its edge."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer
        self.states: Tensor | None = None
        self.attention_type = getattr(layer, "attention_type", None)


class _Exit(_Layer):
    """Keeps what the layer gives."""

    def forward(self, *args: Any, **options: Any) -> Any:
        out = self.layer(*args, **options)
        self.states = (out[0] if isinstance(out, tuple) else out)[0]
        return out


class _Entry(_Layer):
    """Puts kept states in the place of what comes in; the filling of a short pass gets the last one."""

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        if self.states is not None:
            filling = hidden_states.shape[1] - len(self.states)
            hidden_states = torch.cat([self.states, self.states[-1:].expand(filling, -1)])[None]
        return self.layer(hidden_states, *args, **options)


@dataclass(slots=True)
class _Kept:
    """States behind the last of the first layers, of tokens from ``start`` on."""

    start: int
    token_ids: list[int]
    states: Tensor


class EarlyExit:
    """The first layers of a target as a draft model, and their states kept for the target's own pass.

    Args:
        num_layers: how many layers draft.

    Raises:
        InvalidOptionError: that many are not fewer than the target has.
        UnsupportedModelError: the target cannot be cut there.
    """

    def __init__(self, target: TargetModel, num_layers: int):
        layers = target.layers
        if not 1 <= num_layers < len(layers):
            raise InvalidOptionError(
                f"exit_layer={num_layers} is outside [1, {len(layers) - 1}]: {type(target.model).__name__} has "
                f"{len(layers)} layers, and fewer must draft"
            )
        self._exit, self._entry = _Exit(layers[num_layers - 1]), _Entry(layers[num_layers])
        self.first = target.with_layers([*layers[: num_layers - 1], self._exit])
        self.rest = target.with_layers([self._entry, *layers[num_layers + 1 :]])
        self.slots = target.slots
        self._kept: dict[int, _Kept] = {}
        self._check(target)

    def draft(self, rows: Sequence[PassRow]) -> Tensor:
        """One pass of the first layers; logits as of :meth:`TargetModel.forward`. Keeps the states."""
        starts = {row.sequence_id: self.slots.length(row.sequence_id) for row in rows}
        logits = self.first.forward(rows)
        for row, states in self._split(rows):
            kept = self._kept.get(row.sequence_id)
            if kept is not None and kept.start + len(kept.token_ids) == starts[row.sequence_id]:
                kept.token_ids = kept.token_ids + row.token_ids
                kept.states = torch.cat([kept.states, states])
            else:
                self._kept[row.sequence_id] = _Kept(starts[row.sequence_id], row.token_ids, states)
        return logits

    def take(self, rows: Sequence[PassRow]) -> dict[int, Tensor]:
        """States ``[n, hidden]`` of the first n tokens of those rows of a pass that have any; each is given once."""
        found = {}
        for row in rows:
            kept = self._kept.pop(row.sequence_id, None)
            if kept is None or kept.start != self.slots.length(row.sequence_id) or not is_chain(row.parents):
                continue
            if self.slots.scratch_of.get(row.sequence_id) is not self.first:  # another model has overwritten the keys
                continue
            pairs = zip(row.token_ids, kept.token_ids, strict=False)
            same = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(kept.token_ids))
            if same:
                found[row.sequence_id] = kept.states[: min(same, len(row.token_ids))]
        return found

    def resume(self, rows: Sequence[PassRow], kept: dict[int, Tensor]) -> Tensor:
        """The pass of the whole target over ``rows``, from the states that :meth:`take` gave."""
        states = {row.sequence_id: [kept[row.sequence_id]] for row in rows if row.sequence_id in kept}
        missing = []
        for row in rows:
            count = len(kept.get(row.sequence_id, ()))
            if count < len(row.token_ids):
                missing.append(PassRow(row.sequence_id, row.token_ids[count:], 0, () if count else row.parents))
        for sequence_id, known in kept.items():
            self.slots.commit(sequence_id, len(known))
        if missing:
            self.first.forward(missing)
            for row, new in self._split(missing):
                states.setdefault(row.sequence_id, []).append(new)
        for sequence_id, known in kept.items():
            self.slots.truncate(sequence_id, self.slots.length(sequence_id) - len(known))
        in_order = sorted(rows, key=lambda row: self.slots.slot(row.sequence_id))
        self._entry.states = torch.cat([part for row in in_order for part in states[row.sequence_id]])
        logits = self.rest.forward(rows)
        self._entry.states = None
        return logits

    def _split(self, rows: Sequence[PassRow]) -> Iterator[tuple[PassRow, Tensor]]:
        """The states of the last pass by row; rows lie in it in the order of their slots."""
        assert self._exit.states is not None
        at = 0
        for row in sorted(rows, key=lambda row: self.slots.slot(row.sequence_id)):
            yield row, self._exit.states[at : at + len(row.token_ids)]
            at += len(row.token_ids)
        self._exit.states = None

    def _check(self, target: TargetModel) -> None:
        """Whether the states are all that goes from the first layers to the rest."""
        tokens = [7 * (i + 1) % target.vocab_size for i in range(PROBE_TOKENS)]
        whole = PassRow(PROBE_ID, tokens, PROBE_TOKENS)
        self.slots.open(PROBE_ID)
        expected = target.forward([whole]).float()
        self.draft([PassRow(PROBE_ID, tokens[:-1], 1)])
        resumed = self.resume([whole], self.take([whole])).float()
        self.slots.close(PROBE_ID)
        if not (resumed - expected).norm() <= 10.0 * TOLERANCE[target.dtype] * expected.norm():
            raise UnsupportedModelError(
                f"{type(target.model).__name__} hands more from layer to layer than hidden states, so its pass cannot "
                "go on from an early exit; use method 'layer_skip' or another one"
            )
