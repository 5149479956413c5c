"""A Hugging Face causal language model that runs over KV slots: rows in, logits out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from foredraft.errors import UnsupportedModelError
from foredraft.target.attention import ATTENTION_NAME, register_attention
from foredraft.target.compiled import CompiledModel
from foredraft.target.early_exit import EarlyExit
from foredraft.target.features import HiddenStates, check_layer_ids, tap
from foredraft.target.kinds import describe, state_kinds
from foredraft.target.layers import LayerStack
from foredraft.target.layout import PassLayout, PassRow, PassShape, build_layout
from foredraft.target.lowering import LoweringReport, find_attention, lower, run_model
from foredraft.target.native_build import native_library
from foredraft.target.queries import QueryLog
from foredraft.target.segments import LONG_ROW
from foredraft.target.slots import KVSlots
from foredraft.target.views import find_layers, with_layers
from foredraft.target.zoo import cache_folder

PROBE_ID = -4


class TargetModel:
    """One model of attention layers with its cache. ``wrap.wrap_model`` gives the class that a model needs.

    Args:
        model: a causal LM loaded with ``attn_implementation="foredraft"``; it is changed in place when
            ``packed`` is set, so the caller must own it.
        max_model_len: most tokens of a sequence.
        packed: replace linear layers, norms, gated MLPs and attention by packed ones (checked one by one).
        compiled: run through torch.compile: a minute the first time, seconds later; see ``compiled``.
        folder: where kernels and compiled graphs are kept; None is the user's cache folder.

    Raises:
        UnsupportedModelError: the model keeps state that is no key/value cache, or calls attention in a way
            that is not known; or it cannot be compiled.

    Attributes:
        supports_trees: drafts may branch.
        runs_parts: some of the layers can run without the others, in the same slots.
        early_exit: set by a drafter of the first layers; passes then go on from the states of its draft.
        query_log: set by a drafter that wants to know what the last tokens attended to.
    """

    supports_trees: ClassVar[bool] = True
    runs_parts: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        max_model_len: int,
        *,
        packed: bool = True,
        compiled: bool = False,
        folder: Path | None = None,
    ):
        if kinds := state_kinds(model):
            raise UnsupportedModelError(
                f"{describe(model)} keeps a state that cannot be rolled back after a rejected draft "
                f"({', '.join(kinds)}); wrap it with wrap_model"
            )
        self._adopt(model, max_model_len)
        config: Any = model.config
        config._attn_implementation = ATTENTION_NAME
        register_attention()
        calls = find_attention(model, self.device)
        self.slots = KVSlots([call.shape for call in calls], self.dtype, self.device, max_model_len)
        folder = folder or cache_folder()
        self.native = native_library(folder) if packed and self.device.type == "cpu" else None
        self.lowering = lower(model, calls, self.slots, self.native) if packed else LoweringReport()
        self.compiled = CompiledModel(model, self.slots, folder) if compiled else None
        self._logits_of = self.compiled or self._runner()
        self.shape = PassShape()

    def _adopt(self, model: nn.Module, max_model_len: int) -> None:
        config: Any = model.config
        self.model = model.eval().requires_grad_(False)
        parameter = next(model.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        self.vocab_size = int(config.get_text_config().vocab_size)
        self.hidden_size = int(config.get_text_config().hidden_size)
        self.num_layers = int(config.get_text_config().num_hidden_layers)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.max_model_len = max_model_len
        self.num_passes = 0
        self.early_exit: EarlyExit | None = None
        self.query_log: QueryLog | None = None
        self._tapped: set[int] = set()

    def forward(self, rows: Sequence[PassRow], wanted: HiddenStates | None = None) -> Tensor:
        """One pass over the next tokens of the given sequences, each opened in ``slots`` before.

        Writes their keys and values at and past the committed lengths; changes no length.

        Args:
            wanted: is given the hidden states of its layers, which :meth:`tap` was told of before.

        Returns:
            logits ``[sum of num_logits, vocab]`` in the model's dtype, in the order of ``rows``.
        """
        shape = self.shape if self.compiled is None else self.compiled.widened(self.shape)
        self.num_passes += 1
        if self.early_exit is not None and wanted is None and (kept := self.early_exit.take(rows)):
            return self.early_exit.resume(rows, kept)
        layout = build_layout(rows, self.slots, shape, self.native)
        if self.query_log is not None:
            layout = replace(layout, queries={})
        if wanted is not None:
            layout = replace(layout, hidden_states={}, wanted_states=wanted.layer_ids)
        self.slots.scratch_of.update((row.sequence_id, self) for row in rows)
        with torch.inference_mode():
            logits = self._logits_of(layout)
            if self.query_log is not None:
                self.query_log.note(rows, layout)
            if wanted is not None:
                wanted.take(rows, layout)
        return logits[: layout.num_logits, : self.vocab_size]

    def num_positions(self, text_len: int, max_draft_tokens: int) -> int:
        """Positions of a slot that passes touch at most while no text of a batch is longer than ``text_len``.

        Drafts, padding to the widest of the short rows, and blocks of keys lie behind a text.
        """
        scratch = LONG_ROW + max_draft_tokens + 1
        return self.shape.num_keys(min(text_len, self.max_model_len) + scratch)

    def prefill(self, sequence_id: int, token_ids: Sequence[int], chunk: int = 512) -> None:
        """Feed and commit tokens whose logits nobody needs."""
        for start in range(0, len(token_ids), chunk):
            part = list(token_ids[start : start + chunk])
            self.forward([PassRow(sequence_id, part, 0)])
            self.slots.commit(sequence_id, len(part))

    def gives_states(self, layer_ids: Sequence[int]) -> bool:
        """Whether passes can be asked for the hidden states of some layers."""
        return self.compiled is None

    def tap(self, layer_ids: Sequence[int]) -> None:
        """Make the hidden states of some layers available to passes; the numbering is that of ``features``.

        Raises:
            UnsupportedModelError: the layers cannot be told, or there is none of a number.
        """
        new = [layer for layer in layer_ids if layer not in self._tapped]
        if new:
            check_layer_ids(self.model, self.layers, new)
            if not isinstance(self._logits_of, LayerStack):  # which notes them itself
                tap(self.model, self.layers, new)
            self._tapped.update(new)

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers of a whole model.

        Raises:
            UnsupportedModelError: they cannot be told, or do not run without the others.
        """
        if self.compiled is not None:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} is compiled as a whole and cannot run some of its layers for a draft; "
                "leave compile at False, or use another method"
            )
        if not self.runs_parts:
            raise UnsupportedModelError(
                f"{describe(self.model)} keeps a state that its layers cannot share with a draft; use another method"
            )
        return list(find_layers(self.model, len(self.slots.layers))[1])

    def _runner(self) -> Callable[[PassLayout], Tensor]:
        """What gives a pass's logits, as it is not compiled."""
        name = self.lowering.layer_list
        return partial(run_model, self.model) if name is None else LayerStack(self.model, name)

    def with_layers(self, layers: Sequence[nn.Module], slots: KVSlots | None = None) -> TargetModel:
        """A model of some of this one's :attr:`layers`, which shares the weights and, unless given others, the slots.

        Raises:
            UnsupportedModelError: the model does not run with these layers.
        """
        view = copy.copy(self)
        view.slots = slots or self.slots
        view.num_passes, view.early_exit, view.query_log = 0, None, None
        view.model = with_layers(self.model, find_layers(self.model, len(self.layers))[0], layers)
        view._logits_of = view._runner()
        view.slots.open(PROBE_ID)
        try:
            view.forward([PassRow(PROBE_ID, [0, 0], 1)])
        except (TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
            name = type(self.model).__name__
            raise UnsupportedModelError(
                f"{name} does not run with {len(layers)} of its {len(self.layers)} layers ({error}), so it cannot "
                "draft for itself; use another method"
            ) from error
        finally:
            view.slots.close(PROBE_ID)
        return view
