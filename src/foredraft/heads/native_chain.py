"""Whole chains of an EAGLE-3 head in one native call: the best tokens of each place, and on from the first one.

A step of such a head takes 0.4 ms of a processor's work; the calls of some twenty small operations on top of it would
take half as long again.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.heads.eagle3 import Eagle3Head
from foredraft.target.layers import Arena, LayerEntry
from foredraft.target.layout import PassLayout
from foredraft.target.packed import NativeProduct, PackedRMSNorm
from foredraft.target.slots import KVSlots

Noises = Mapping[int, tuple[float, Tensor]]
"""By sequence: what its logits are multiplied by, and what is then added at each place, ``[num_steps, columns]``."""

_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class HeadEntry(ctypes.Structure):
    """``Head`` of ``native/chain.cpp``."""

    _fields_ = (
        ("layer", LayerEntry),
        *((name, _POINTER) for name in ("embeddings", "cos", "sin", "token_norm", "state_norm", "last_norm")),
        *((name, _POINTER) for name in ("lm_head", "lm_head_bias", "token_ids")),
        *((name, _SIZE) for name in ("draft_vocab", "norms_residual", "norms_output")),
        *((name, _FLOAT) for name in ("token_eps", "state_eps", "last_eps")),
    )


class GivenEntry(ctypes.Structure):
    """``Given`` of ``native/chain.cpp``."""

    _fields_ = (
        *((name, _POINTER) for name in ("tokens", "states", "rows", "positions", "write_index", "ends")),
        ("num_tokens", _SIZE),
    )


@dataclass(frozen=True, slots=True)
class GivenRows:
    """Rows of the text that a draft begins with.

    Attributes:
        layout: of these rows.
        states: beside their tokens, ``[T, hidden]`` contiguous.
        ends: the last token of each row, among all.
    """

    layout: PassLayout
    states: Tensor
    ends: Tensor

    @property
    def entry(self) -> GivenEntry:
        at = self.layout
        tensors = at.token_ids, self.states, at.rows, at.positions, at.write_index, self.ends
        return GivenEntry(*(tensor.data_ptr() for tensor in tensors), len(self.states))


@dataclass(frozen=True, slots=True)
class NativeChain:
    """The call and what it reads; ``kept`` are tensors that it points to."""

    native: ctypes.CDLL
    entry: HeadEntry
    arena: Arena
    kept: tuple[Tensor, ...]

    @classmethod
    def of(
        cls, head: Any, native: ctypes.CDLL | None, embeddings: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> NativeChain | None:
        """For a packed head of one layer whose parts have native kernels; None for all others."""
        if native is None or not isinstance(head, Eagle3Head) or len(head.layers) != 1:
            return None
        first: Any = head.layers[0]
        any_head: Any = head
        kernel, tables = any_head.lm_head.kernel, (embeddings, *rotary)
        norms = (first.input_layernorm, first.hidden_norm, head.norm)
        if first.packed is None or not isinstance(kernel, NativeProduct):
            return None
        if not all(isinstance(norm, PackedRMSNorm) and norm.native is not None for norm in norms):
            return None
        layer = first.packed.entry
        if any(t.dtype != torch.bfloat16 or not t.is_contiguous() for t in tables) or rotary[0].shape[1] != layer.dim:
            return None
        token_ids = head.token_ids.contiguous()
        entry = HeadEntry(
            layer, *(table.data_ptr() for table in tables), *(norm.weight_at for norm in norms),
            kernel.weight_at, kernel.bias_at, token_ids.data_ptr(),
            kernel.num_outputs, head.config.norm_before_residual, head.config.norm_output,
            *(norm.eps_value for norm in norms),
        )  # fmt: skip
        return cls(native, entry, first.packed.arena, (*tables, token_ids))

    def __call__(
        self, slots: KVSlots, given: GivenRows | None, places: Sequence[tuple[int, int]], token_ids: list[int],
        states: Tensor, num_steps: int, num_best: int, noises: Sequence[tuple[float, Tensor]] = (),
    ) -> list[list[list[tuple[int, float]]]]:  # fmt: skip
        """Draft on from the text, or from the last token of a draft.

        Args:
            given: what the first step reads; it is then the first token of each draft that is the last one, and
                ``token_ids`` is not looked at.
            places: of the last token of each row: its slot, and its place there, which is its position too.
            token_ids: these tokens.
            states: ``[B, hidden]``, the head's own behind the tokens before; changed to those behind the last but one
                token of the draft.
            num_best: tokens of a place, at most the draft vocabulary.
            noises: of each row, as in ``Noises``; none: the logits are looked at as they are.

        Returns:
            for each row and each of ``num_steps`` places its tokens, best first, and their probabilities; where there
            is one token, 0 in their place.
        """
        slots.reserve(max(place for _, place in places) + num_steps)
        count, layer = len(places), self.entry.layer
        width, vocab = layer.width, self.entry.draft_vocab
        last, drafted = torch.tensor(token_ids), torch.empty(num_steps, count, num_best, dtype=torch.int64)
        probs, scores = torch.zeros(num_steps, count, num_best), torch.empty(count, vocab)
        scales = torch.tensor([scale for scale, _ in noises])
        noise = torch.stack([added.float() for _, added in noises]) if noises else None
        rows = torch.tensor([[i, 1, slot, place, 0, -1] for i, (slot, place) in enumerate(places)])
        positions = torch.tensor([place for _, place in places])
        index = torch.tensor([slots.capacity * slot + place for slot, place in places])
        first = GivenEntry() if given is None else given.entry
        most = max(count, first.num_tokens)
        work = self.arena.at(most * (3 * width + 4 * layer.hidden + 2 * layer.dim) + count * (layer.hidden + vocab))
        self.native.foredraft_chain_bf16(
            ctypes.byref(self.entry), ctypes.byref(first), last.data_ptr(), drafted.data_ptr(), probs.data_ptr(),
            scales.data_ptr(), None if noise is None else noise.data_ptr(), scores.data_ptr(), states.data_ptr(),
            rows.data_ptr(), positions.data_ptr(), index.data_ptr(), work, *slots.addresses, count, num_steps, num_best,
            width, slots.capacity, torch.get_num_threads(),
        )  # fmt: skip
        each = zip(drafted.transpose(0, 1).tolist(), probs.transpose(0, 1).tolist(), strict=True)
        return [[list(zip(*place, strict=True)) for place in zip(*row, strict=True)] for row in each]
