"""From texts to padded batches, in an order that follows from a seed and the number of the update alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.train.dataset import TextStore

SORTED_TOGETHER = 64
"""So many windows of an epoch are put in order of length before they are cut into batches, which saves padding."""


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens ``start`` to ``end`` of a text; those from ``first_label`` on have labels here."""

    text: int
    start: int
    end: int
    first_label: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def num_labels(self) -> int:
        return self.end - self.first_label


def windows_of(text: int, num_prompt_tokens: int, num_tokens: int, size: int) -> list[Window]:
    """A text whole if it fits, or in windows with half a window of context; each label is in one of them."""
    if num_tokens <= size:
        return [Window(text, 0, num_tokens, num_prompt_tokens)] if num_prompt_tokens < num_tokens else []
    windows = []
    first = num_prompt_tokens
    while first < num_tokens:
        start = max(0, first - size // 2)
        end = min(start + size, num_tokens)
        windows.append(Window(text, start, end, first))
        first = end
    return windows


class BatchOrder:
    """Which windows each update reads: epoch after epoch, each in an order of its own.

    Args:
        num_rows: most rows of a batch, padding included; a longer window is a batch by itself.
    """

    def __init__(self, windows: Sequence[Window], num_rows: int, seed: int):
        assert windows
        self._windows, self._num_rows, self._seed = windows, num_rows, seed
        self._batches: list[list[Window]] = []
        self._num_epochs = 0

    def __call__(self, update: int) -> list[Window]:
        while update >= len(self._batches):
            self._batches += self._epoch(self._num_epochs)
            self._num_epochs += 1
        return self._batches[update]

    def _epoch(self, epoch: int) -> list[list[Window]]:
        draw = random.Random(f"{self._seed} {epoch}")
        shuffled = draw.sample(self._windows, len(self._windows))
        batches: list[list[Window]] = []
        for first in range(0, len(shuffled), SORTED_TOGETHER):
            batches += self._cut(sorted(shuffled[first : first + SORTED_TOGETHER], key=lambda w: w.num_tokens))
        draw.shuffle(batches)
        return batches

    def _cut(self, windows: Sequence[Window]) -> list[list[Window]]:
        batches: list[list[Window]] = []
        for window in windows:
            if not batches or (len(batches[-1]) + 1) * window.num_tokens > self._num_rows:
                batches.append([])
            batches[-1].append(window)
        return batches


@dataclass(frozen=True, slots=True)
class Batch:
    """Windows side by side, padded on the right.

    Attributes:
        token_ids: ``[B, S]``.
        is_label: ``[B, S]``, the tokens that are to be predicted.
        features: ``[B, S, L, H]``, states of the tokens; 0 where there is none, the last token's among them.
        layers: whose states these are, in their order.
    """

    token_ids: Tensor
    is_label: Tensor
    features: Tensor
    layers: tuple[int, ...]

    @property
    def labels(self) -> Tensor:
        """The tokens that are to be predicted, ``[B, S]``; -100 elsewhere."""
        return self.token_ids.masked_fill(~self.is_label, -100)

    def states(self, *layers: int) -> Tensor:
        """``[B, S, len(layers) * H]``."""
        return self.features[:, :, [self.layers.index(layer) for layer in layers]].flatten(2)

    def places(self, first: int = 1) -> tuple[Tensor, Tensor]:
        """Rows and places of the labels that have at least ``first`` tokens before them in their window.

        All of a loss is taken from these: a token at place t is the label, the law that it came from was said at
        t - 1, and what guesses it stands ``first`` places before it. So nothing can be shifted without the others.
        """
        rows, places = self.is_label.nonzero(as_tuple=True)
        far_enough = places >= first
        return rows[far_enough], places[far_enough]

    def to(self, device: torch.device) -> Batch:
        token_ids, is_label, features = (t.to(device) for t in (self.token_ids, self.is_label, self.features))
        return replace(self, token_ids=token_ids, is_label=is_label, features=features)


def collate(store: TextStore, windows: Sequence[Window]) -> Batch:
    """Read the windows of a batch from disk."""
    length = max(window.num_tokens for window in windows)
    layers = store.meta.layers
    tokens, labels, features = [], [], []
    for window in windows:
        text = store[window.text]
        filling = length - window.num_tokens
        places = torch.arange(window.start, window.start + length)
        states = text.features[window.start : window.end - 1].unflatten(1, (len(layers), -1))
        tokens.append(F.pad(text.token_ids[window.start : window.end], (0, filling)))
        labels.append((places >= window.first_label) & (places < window.end))
        features.append(F.pad(states, (0, 0, 0, 0, 0, filling + 1)))
    return Batch(torch.stack(tokens), torch.stack(labels), torch.stack(features), layers)
