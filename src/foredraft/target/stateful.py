"""A model whose layers keep a state that cannot be cut: transformers' own cache a sequence, snapshot and replay.

Mamba, linear attention, short convolutions, and hybrids of these with attention. Rows of a pass run one after the
other, so a pass costs as many calls of the model as it has rows; the weights are not packed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from foredraft.errors import UnsupportedModelError
from foredraft.target.features import AFTER_NORM, HiddenStates
from foredraft.target.forward import TargetModel
from foredraft.target.kinds import describe
from foredraft.target.layout import PassRow, PassShape
from foredraft.target.lowering import LoweringReport
from foredraft.target.states import StateSlots

LONGEST_REPLAY = 8
"""A snapshot is taken behind accepted tokens once there are more than this: so many at most are fed again and again."""
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")
"""Under one of these a model takes its cache and gives it back."""


class StatefulModel(TargetModel):
    """The interface of :class:`TargetModel` over states that can only be copied.

    Args:
        model: a causal LM, which the caller must own: its attention implementation is set.
        max_model_len: most tokens of a sequence.

    Attributes:
        single_steps: the model continues a state correctly by one token at a time only, so that a pass over
            n tokens costs n calls, unless it is a sequence's first. Set by ``statecheck``.

    Raises:
        UnsupportedModelError: the model takes its cache in a way that is not known.
    """

    supports_trees = False
    runs_parts = False
    slots: StateSlots  # type: ignore[assignment]  # the engine uses what both kinds of slots have

    def __init__(self, model: nn.Module, max_model_len: int):
        self._adopt(model, max_model_len)
        any_model: Any = model
        any_model.set_attn_implementation("sdpa" if any_model._supports_sdpa else "eager")
        self._parameters = frozenset(inspect.signature(any_model.forward).parameters)
        self._cache_name = next((name for name in CACHE_NAMES if name in self._parameters), "")
        if not self._cache_name:
            raise UnsupportedModelError(
                f"{describe(model)} takes its cache under none of the names {', '.join(CACHE_NAMES)}; not supported"
            )
        self.slots = StateSlots(max_model_len)
        self.native = self.compiled = None
        self.lowering = LoweringReport()
        self.shape = PassShape(min_tokens=1, min_queries=1)
        self.single_steps = False
        self._noted: list[Tensor] = []  # states of the row that runs, once they are tapped

    def forward(self, rows: Sequence[PassRow], wanted: HiddenStates | None = None) -> Tensor:
        """See :meth:`TargetModel.forward`; what an earlier pass fed without a commit is undone first."""
        self.num_passes += 1
        logits = []
        with torch.inference_mode():
            for row in rows:
                self._noted.clear()
                start = self.slots.length(row.sequence_id)
                logits.append(self._run(row))
                if wanted is not None:
                    wanted.start_of[row.sequence_id] = start
                    wanted.of_sequence[row.sequence_id] = torch.cat(self._noted)[:, None]
        return torch.cat(logits)

    def gives_states(self, layer_ids: Sequence[int]) -> bool:
        return set(layer_ids) <= {AFTER_NORM}

    def tap(self, layer_ids: Sequence[int]) -> None:
        if layer_ids and not self._tapped:
            self._tapped.add(AFTER_NORM)
            any_model: Any = self.model
            any_model.base_model.register_forward_hook(lambda module, args, output: self._noted.append(output[0][0]))

    def call(self, token_ids: Sequence[int], start: int, cache: Any, num_logits: int) -> tuple[Tensor, Any]:
        """Feed tokens at positions from ``start`` on; logits ``[num_logits, V]`` of the last, and the cache after.

        ``cache`` None is the empty state; the one given is changed.
        """
        model: Any = self.model
        if cache is None and model._supports_default_dynamic_cache():
            cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        options: dict[str, Any] = {"use_cache": True, self._cache_name: cache}
        if "position_ids" in self._parameters:
            options["position_ids"] = torch.arange(start, start + len(token_ids), device=self.device)[None]
        if "logits_to_keep" in self._parameters:
            options["logits_to_keep"] = max(num_logits, 1)
        out = model(input_ids=torch.tensor([list(token_ids)], device=self.device), **options)
        logits = out.logits[0, out.logits.shape[1] - num_logits :, : self.vocab_size]
        return logits, getattr(out, self._cache_name, cache)  # some only change the one that they were given

    def _run(self, row: PassRow) -> Tensor:
        """One row's logits. Its last ``num_logits - 1`` tokens are a draft and may be rejected."""
        assert list(row.parents) == list(range(-1, len(row.parents) - 1)), "a state cannot branch"
        slots, sequence = self.slots, row.sequence_id
        slots.rewind(sequence)
        num_drafted = max(row.num_logits - 1, 0)
        certain = row.token_ids[: len(row.token_ids) - num_drafted]
        if slots.replay_len(sequence) > (0 if num_drafted else LONGEST_REPLAY):
            slots.take_snapshot(sequence)
        if not num_drafted or len(certain) <= LONGEST_REPLAY:
            return self._feed(sequence, row.token_ids, row.num_logits)
        first = self._feed(sequence, certain, 1)
        slots.take_snapshot(sequence)
        return torch.cat([first, self._feed(sequence, row.token_ids[len(certain) :], num_drafted)])

    def _feed(self, sequence_id: int, token_ids: list[int], num_logits: int) -> Tensor:
        logits, unwanted = [], len(token_ids) - num_logits
        cache, start = self.slots.cache(sequence_id)
        for first, last in self._pieces(len(token_ids), is_first=start == 0):
            wanted = max(0, last - max(first, unwanted))
            part, cache = self.call(token_ids[first:last], start + first, cache, wanted)
            self.slots.advance(sequence_id, cache, last - first)
            logits.append(part)
        return torch.cat(logits)

    def _pieces(self, num_tokens: int, is_first: bool) -> Iterator[tuple[int, int]]:
        if is_first or not self.single_steps:
            yield 0, num_tokens
        else:
            yield from ((i, i + 1) for i in range(num_tokens))
