"""The target drafts for itself over few of its keys and values (MagicDec, Sadhukhan et al., 2408.11049).

    text    [ sinks | ............... what the prompt's end attended to ............... | newest tokens ]
    slot    [ sinks | chosen entries, other ones for each head | newest tokens | draft (scratch)        ]

Entries are copies from the target's cache, so keys keep the rotation of their true positions. Until a text exceeds the
budget its slot holds all of it. From then on it holds anchors, which stay, and a window, which grows with the text
until the budget is reached and then starts anew, shorter by an eighth of the budget. Anchors are the first tokens
(StreamingLLM, Xiao et al., 2309.17453) and, with the selection ``snapkv``, what the prompt's last tokens attended to
most (SnapKV, Li et al., 2404.14469); those are chosen once.

The draft reads as many weights as the target does. It pays where reading the cache takes longer than that: long
texts, large batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters.self_draft import SelfDrafter
from foredraft.target.forward import TargetModel
from foredraft.target.queries import QueryLog
from foredraft.target.slots import KVSlots

OBSERVED = 32
"""Tokens at a prompt's end whose attention chooses; SnapKV's observation window."""
POOLED = 5
"""Neighbouring entries whose attention is averaged, so that words are kept whole."""


@dataclass(slots=True)
class _Entries:
    """What the slot of a sequence holds: ``anchors [num_anchors, heads]`` per layer, then the text from ``start``."""

    prompt_len: int
    anchors: list[Tensor] | None = None
    start: int = 0


class SparseKVDrafter(SelfDrafter):
    """Drafts with the whole target over a part of its cache.

    Args:
        budget: most entries of a sequence, without its draft.
        sinks: how many of them are the text's first tokens.
        selection: ``window`` or ``snapkv``.
    """

    def __init__(self, target: TargetModel, budget: int, sinks: int, selection: str):
        layers, source = target.layers, target.slots
        slots = KVSlots(source.layers, source.dtype, source.device, source.max_len)
        super().__init__(target, target.with_layers(layers, slots).forward, slots)
        self.cost = 1.0
        self._budget, self._sinks = budget, sinks
        self._query_log: QueryLog | None = None
        if selection == "snapkv":
            self._query_log = target.query_log = QueryLog(OBSERVED)
        self._entries: dict[int, _Entries] = {}

    def forget(self, sequence_id: int) -> None:
        if self._query_log is not None:
            self._query_log.forget(sequence_id)
        if self._entries.pop(sequence_id, None) is not None:
            self._slots.close(sequence_id)

    def _catch_up(self, sequence_id: int, text: list[int]) -> None:
        """Copy what the text has grown by; start the window anew where that exceeds the budget."""
        length = len(text) - 1
        if sequence_id not in self._entries:
            self._slots.open(sequence_id)
            self._entries[sequence_id] = _Entries(prompt_len=length)
        entries = self._entries[sequence_id]
        held = self._slots.length(sequence_id)
        num_anchors = len(entries.anchors[0]) if entries.anchors is not None else 0
        copied = entries.start + held - num_anchors
        if held + length - copied > self._budget:
            self._start_anew(sequence_id, entries, length)
            copied = entries.start
        if copied < length:
            self._slots.append(sequence_id, [(k[copied:], v[copied:]) for k, v in self._text_slots.read(sequence_id)])

    def _start_anew(self, sequence_id: int, entries: _Entries, length: int) -> None:
        """Empty the slot but for the anchors, and set where in the text the window is to begin."""
        cached = self._text_slots.read(sequence_id)
        reserve = max(1, self._budget // 8)
        if entries.anchors is None:
            queries = self._query_log.take(sequence_id) if self._query_log is not None else None
            window = max(min(OBSERVED, self._budget // 2), self._budget // 4) - reserve
            end = max(self._sinks, min(entries.prompt_len - OBSERVED, length - window))
            count = 0 if queries is None else min(self._budget - window - reserve - self._sinks, end - self._sinks)
            entries.anchors = self._choose_anchors(cached, queries or [], end, count)
        entries.start = length - (self._budget - len(entries.anchors[0]) - reserve)
        self._slots.truncate(sequence_id, 0)
        self._slots.append(
            sequence_id,
            [
                (_per_head(keys, anchors), _per_head(values, anchors))
                for (keys, values), anchors in zip(cached, entries.anchors, strict=True)
            ],
        )

    def _choose_anchors(
        self, cached: list[tuple[Tensor, Tensor]], queries: list[Tensor], end: int, count: int
    ) -> list[Tensor]:
        """The sinks and, of the entries from there to ``end``, for each head the ``count`` with the most attention."""
        found = []
        for layer, (keys, _) in enumerate(cached):
            anchors = torch.arange(self._sinks, device=keys.device)[:, None].expand(-1, keys.shape[1])
            if count > 0:
                scores = attention_scores(queries[layer], keys[self._sinks : end])
                chosen = scores.topk(count, dim=0).indices.sort(dim=0).values
                anchors = torch.cat([anchors, chosen + self._sinks])
            found.append(anchors)
        return found


def attention_scores(query_THD: Tensor, keys_SHD: Tensor) -> Tensor:
    """How much attention the entries get from all queries together, ``[S, kv_heads]`` (SnapKV, section 4).

    Args:
        query_THD: scaled, ``[T, query_heads, D]``; heads that share a key are summed.
        keys_SHD: ``[S, kv_heads, D]``; a softmax runs over these alone. Neighbours are averaged.
    """
    num_kv_heads = keys_SHD.shape[1]
    keys_HDS = keys_SHD.float().permute(1, 2, 0)
    query = query_THD.float().unflatten(1, (num_kv_heads, -1)).transpose(0, 1).flatten(1, 2)
    sums_HS = torch.softmax(query @ keys_HDS, -1).sum(1)
    return F.avg_pool1d(sums_HS[None], POOLED, stride=1, padding=POOLED // 2)[0].T


def _per_head(entries_SHD: Tensor, index_NH: Tensor) -> Tensor:
    """The entries ``index_NH`` of each head, ``[N, heads, D]``."""
    return entries_SHD.gather(0, index_NH[:, :, None].expand(-1, -1, entries_SHD.shape[2]))


def build(speculative: SpeculativeConfig, config: EngineConfig, target: TargetModel, tokenizer: Any) -> SparseKVDrafter:
    return SparseKVDrafter(
        target, speculative.sparse_kv_budget, speculative.sparse_kv_sinks, speculative.sparse_kv_selection
    )
