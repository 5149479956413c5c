"""A DFlash head packed for drafting: the text's keys and values in slots of its own, blocks as passes over them.

    slot      0 ................. length-1 | length .............
              [ made of the target's states | block: anchor, masks ]     the block is scratch, never committed

Within a block rows look ahead. To the attention kernels such a row is one whose queries all stand at the block's end.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.errors import IncompatibleDrafterError
from foredraft.heads.dflash import DFlashHead
from foredraft.heads.layers import HeadAttention, rotary_table
from foredraft.heads.runner import pack
from foredraft.target.forward import TargetModel
from foredraft.target.layout import PassLayout, PassRow, build_layout
from foredraft.target.packed import rotate
from foredraft.target.segments import LaidRow
from foredraft.target.slots import KVSlots
from foredraft.target.storage import LayerShape

NO_TREE = 2**40
"""Where a row's tree begins that has none, for a kernel that is to take the queries' positions as they are given."""


class BlockRunner:
    """Runs a DFlash head.

    Args:
        head: its module; it is copied.
        target: whose kernels, device, embeddings and head are used.

    Raises:
        IncompatibleDrafterError: a layer looks ahead, and back only over a window that the text may outgrow.

    Attributes:
        max_len: most tokens of a text.
        slots: keys and values made of the target's states; an entry's place is that of its token in the text.
        num_parameters: read a pass, the target's head among them if that is used.
    """

    def __init__(self, head: DFlashHead, target: TargetModel):
        self.config = config = head.config
        self.max_len, num_places = target.max_model_len, target.max_model_len + config.block_size
        self._windows = tuple(None if w is not None and w >= num_places else w for w in config.windows)
        for causal, window in zip(config.is_causal, self._windows, strict=True):
            if window is not None and not causal:
                raise IncompatibleDrafterError(
                    f"the head has layers that look ahead and {window} places back, and texts may have "
                    f"{target.max_model_len} tokens; set max_model_len to {window - config.block_size} at most"
                )
        packed = copy.deepcopy(head).to(dtype=target.dtype, device=target.device).requires_grad_(False).eval()
        any_target: Any = target.model
        embeddings = packed.embed_tokens if config.has_embeddings else any_target.get_input_embeddings()
        self._embeddings: Tensor = embeddings.weight.detach()
        self.num_parameters = sum(p.numel() for name, p in packed.named_parameters() if "embed_tokens" not in name)
        if config.draft_vocab_size is None:
            self.num_parameters += target.vocab_size * target.hidden_size
        attentions = [module for module in packed.modules() if isinstance(module, HeadAttention)]
        shapes = [LayerShape(module.num_kv_heads, module.head_dim, module.head_dim) for module in attentions]
        self.slots = KVSlots(shapes, target.dtype, target.device, num_places)
        cos, sin = rotary_table(config.layer, num_places)
        self._cos, self._sin = (table.to(target.device, target.dtype) for table in (cos, sin))
        pack(packed, target.native)
        self._attentions: list[Any] = [layer.self_attn for layer in packed.layers]
        for attention, window in zip(self._attentions, self._windows, strict=True):
            attention.window = window
        self.head, self._target = packed, target
        self._output: Any = packed.lm_head if config.draft_vocab_size else any_target.get_output_embeddings()

    @torch.inference_mode()
    def add(self, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Commit entries made of the states ``[n, layers * hidden]`` of the next tokens of some sequences."""
        counts = [len(states) for _, states in parts]
        starts = [self.slots.length(sequence_id) for sequence_id, _ in parts]
        self.slots.reserve(max(start + count for start, count in zip(starts, counts, strict=True)))
        slots = [self.slots.slot(sequence_id) for sequence_id, _ in parts]
        ranges = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
        flat = [
            [place, self.slots.capacity * slot + place] for slot, at in zip(slots, ranges, strict=True) for place in at
        ]
        places, index = torch.tensor(flat, device=self.slots.device).T
        context = self.head.context(torch.cat([states for _, states in parts]))
        cos_sin = self._cos[places][None], self._sin[places][None]
        for layer, attention in enumerate(self._attentions):
            heads, kv_heads = attention.num_heads, attention.num_kv_heads
            qkv = attention.qkv(context).view(len(flat), heads + 2 * kv_heads, attention.head_dim)
            key = qkv[:, heads : heads + kv_heads]
            key = rotate(attention.k_norm(key) if attention.k_norm is not None else key, *cos_sin)
            self.slots.write(layer, index.contiguous(), key.flatten(1), qkv[:, heads + kv_heads :].flatten(1))
        for (sequence_id, _), count in zip(parts, counts, strict=True):
            self.slots.commit(sequence_id, count)

    @torch.inference_mode()
    def fill(self, anchors: Sequence[tuple[int, int, int]]) -> Tensor:
        """One pass over whole blocks, as in training, each behind a sequence's last token; changes no length.

        Args:
            anchors: sequence, last token, and how many places behind it are wanted.

        Returns:
            logits ``[sum of wanted places, vocab]``, in the order given.
        """
        masks = [self.config.mask_token_id] * (self.config.block_size - 1)
        rows = [PassRow(sequence_id, [token, *masks], len(masks)) for sequence_id, token, _ in anchors]
        layout = build_layout(rows, self.slots, self._target.shape, self._target.native)
        ahead = _looking_ahead(layout, self.config.block_size)
        hidden = F.embedding(layout.token_ids, self._embeddings)
        if self.config.embedding_scale != 1.0:
            hidden = hidden * self.config.embedding_scale
        rotary = F.embedding(layout.positions, self._cos), F.embedding(layout.positions, self._sin)
        layouts = [layout if causal else ahead for causal in self.config.is_causal]

        def attend(module: Any, x: Tensor) -> Tensor:
            out: Tensor = module(x, rotary, layout=layouts[module.layer_idx])[0]
            return out

        for layer in self.head.layers:
            hidden = layer(hidden, attend)
        places = layout.logits_index[: layout.num_logits].view(len(rows), -1)
        wanted = torch.cat([of_row[:count] for of_row, (_, _, count) in zip(places, anchors, strict=True)])
        said = self.head.norm(hidden[0, wanted])
        return self.head.scaled(self._output(said))[:, : self._target.vocab_size]


@dataclass(slots=True)
class _Ahead(LaidRow):
    """A row whose queries all stand at the place of the last token of its block."""

    block_len: int = 0

    @property
    def positions(self) -> list[int]:
        return [self.start + self.block_len - 1] * len(self.tokens)


def _looking_ahead(layout: PassLayout, block_len: int) -> PassLayout:
    """The layout for attention that looks ahead."""
    laid: list[LaidRow] = [
        _Ahead(row.slot, row.start, row.tokens, [], offset=row.offset, block_len=block_len) for row in layout.laid
    ]
    rows = layout.rows.clone()
    rows[:, 4], rows[:, 5] = NO_TREE, 0
    positions = torch.tensor([[p for row in laid for p in row.positions]], device=layout.positions.device)
    return replace(layout, laid=laid, rows=rows, positions=positions)
