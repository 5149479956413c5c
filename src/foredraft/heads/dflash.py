"""The DFlash head (Chen et al., 2602.06036): block diffusion in one step, which fills a block of masks at once.

Drafting. Behind the last token, the anchor, stand masks. The block's rows attend to each other, masks ahead of them
too, and to keys and values that each layer makes of the target's states of the text before the anchor::

    text      c0 .. c(n-2)          c(n-1)  M   M   M
    read as   f0 .. f(n-2)          embeddings               f = hidden_norm(fc(states of several layers))
    says                                    d1  d2  d3       row j of the block tells the token at its own place

    per layer   x = input_layernorm(h);  query = q(x);  keys = k(f), k(x);  values = v(f), v(x)
    logits      lm_head(norm(h)), the target's unless the head has one for a draft vocabulary

Training. ``head(features, token_ids, anchors, embeddings, output)`` looks ahead from several places of each text:

    features   [B, S, layers * target hidden]    states of every token, layers side by side
    token_ids  [B, S]                            padded on the right
    anchors    [B, A]                            places in the text, from choose_anchors; each begins a block
    returns    [B, A, block_size - 1, vocab]     at [b, a, j] what is said of place anchors[b, a] + 1 + j

    labels = block_labels(labels, anchors, head.config.block_size)        # [B, A, block_size - 1]
    loss = block_loss(logits, head.draft_ids(labels), gamma)              # early places weigh more

A trained head is written by ``dflash_format.save_dflash``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.heads.layers import DecoderLayer, HeadAttention, rms_norm, rotary_table

IGNORED = -100
"""A label that is not to be learnt; the one of torch's cross entropy."""


@dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    """Shapes and variants of a head.

    Attributes:
        layer: configuration of its decoder layers, a Qwen3Config of transformers.
        block_size: the anchor and the masks behind it, so a token more than can be drafted.
        mask_token_id: whose embedding a place has that is to be filled.
        target_vocab_size, target_hidden_size: of the target.
        feature_layers: whose states it reads.
        is_causal: of each layer: rows of a block do not look ahead.
        windows: of each layer: how many places back it looks, itself included; None is all of the text.
        draft_vocab_size: ids that it can draft, with a head of its own; None takes the target's head.
        has_embeddings: has token embeddings of its own, not the target's.
        embedding_scale, logit_scale, logit_cap: factors of embeddings and logits, and the logits' soft cap (0: none).
    """

    layer: Any
    block_size: int
    mask_token_id: int
    target_vocab_size: int
    target_hidden_size: int
    feature_layers: tuple[int, ...]
    is_causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    draft_vocab_size: int | None = None
    has_embeddings: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0


class DFlashHead(nn.Module):
    """The module; names of its tensors are those of the published files."""

    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.config = config
        layer, size = config.layer, config.layer.hidden_size
        if config.has_embeddings:
            self.embed_tokens = nn.Embedding(config.target_vocab_size, size)
        self.fc = nn.Linear(len(config.feature_layers) * config.target_hidden_size, size, bias=False)
        self.hidden_norm = rms_norm(size, layer)
        self.layers = nn.ModuleList(DecoderLayer(layer, i) for i in range(layer.num_hidden_layers))
        self.norm = rms_norm(size, layer)
        has_map, count = config.draft_vocab_size is not None, config.draft_vocab_size or 0
        if has_map:
            self.lm_head = nn.Linear(size, count, bias=False)
        self.register_buffer("d2t", torch.zeros(count, dtype=torch.int64) if has_map else None)
        self.register_buffer("t2d", torch.zeros(config.target_vocab_size, dtype=torch.bool) if has_map else None)
        if has_map:
            self.set_vocabulary(torch.arange(count))

    @property
    def token_ids(self) -> Tensor | None:
        """The target's id of every id of the draft vocabulary; None if they are the same."""
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def set_vocabulary(self, token_ids: Tensor) -> None:
        """Draft only these tokens, ``[draft vocabulary]`` ascending."""
        assert self.d2t is not None
        assert self.t2d is not None
        self.d2t.copy_(token_ids - torch.arange(len(token_ids), device=token_ids.device))
        self.t2d.zero_()
        self.t2d[token_ids] = True

    def draft_ids(self, token_ids: Tensor) -> Tensor:
        """Ids of the draft vocabulary for the target's; -100 stays, and is what tokens get that it lacks."""
        if self.t2d is None:
            return token_ids
        known = token_ids.clamp_min(0)
        places = self.t2d.cumsum(0) - 1
        return torch.where((token_ids >= 0) & self.t2d[known], places[known], IGNORED)

    def context(self, features: Tensor) -> Tensor:
        """What the layers make keys and values of, ``[..., hidden]``, from states ``[..., layers * hidden]``."""
        hidden: Tensor = self.hidden_norm(self.fc(features))
        return hidden

    def scaled(self, logits: Tensor) -> Tensor:
        """Logits as the head means them, from those of its output layer."""
        cap = self.config.logit_cap
        logits = logits * self.config.logit_scale if self.config.logit_scale != 1.0 else logits
        return torch.tanh(logits / cap) * cap if cap else logits

    def forward(
        self, features: Tensor, token_ids: Tensor, anchors: Tensor, embeddings: Tensor, output: Tensor
    ) -> Tensor:
        """Logits of the blocks behind some places; see the top of this file.

        Args:
            embeddings: the target's, ``[V, hidden]``; not read if the head has its own.
            output: weight of the target's head, ``[V, hidden]``; not read if the head has its own.
        """
        said = self.hidden_of(features, token_ids, anchors, embeddings)
        return self.scaled(F.linear(said, output if self.config.draft_vocab_size is None else self.lm_head.weight))

    def hidden_of(self, features: Tensor, token_ids: Tensor, anchors: Tensor, embeddings: Tensor) -> Tensor:
        """What the output layer reads, ``[B, A, block_size - 1, hidden]``."""
        size, num_texts = self.config.block_size, len(token_ids)
        tokens = anchors.new_full((*anchors.shape, size), self.config.mask_token_id)
        tokens[..., 0] = token_ids.gather(1, anchors)
        places = (anchors[..., None] + torch.arange(size, device=anchors.device)).flatten(1)
        embeddings = self.embed_tokens.weight if self.config.has_embeddings else embeddings
        hidden = F.embedding(tokens.flatten(1), embeddings) * self.config.embedding_scale
        context = self.context(features)
        attend = BlockAttention(self.config, context, places, anchors)
        for layer in self.layers:
            hidden = layer(hidden.to(context), attend)
        said: Tensor = self.norm(hidden).view(num_texts, -1, size, hidden.shape[-1])[:, :, 1:]
        return said


class BlockAttention:
    """Attention in training: the rows of a block see the text before its anchor, and their own block.

    Args:
        context: of the texts, ``[B, S, hidden]``.
        places: of the blocks' rows in the text, ``[B, A * block]``.
        anchors: ``[B, A]``.
    """

    def __init__(self, config: DFlashConfig, context: Tensor, places: Tensor, anchors: Tensor):
        self._config, self._context = config, context
        length, device = context.shape[1], context.device
        cos, sin = rotary_table(config.layer, length + config.block_size)
        self._cos, self._sin = cos.to(context), sin.to(context)
        self._places = places
        block = torch.arange(anchors.shape[1], device=device).repeat_interleave(config.block_size)
        before = torch.arange(length, device=device) < anchors.repeat_interleave(config.block_size, 1)[..., None]
        own = (block == block[:, None]).expand(len(anchors), -1, -1)
        self._visible = torch.cat([before, own], -1)
        text = torch.arange(length, device=device).expand(len(anchors), -1)
        self._distance = places[..., None] - torch.cat([text, places], 1)[:, None]

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(module, HeadAttention)
        length = self._context.shape[1]
        at = self._places
        query, own_key, own_value = module.project(x, self._cos[at], self._sin[at])
        _, key, value = module.project(self._context, self._cos[None, :length], self._sin[None, :length])
        visible, window = self._visible, self._config.windows[module.layer_idx]
        if self._config.is_causal[module.layer_idx]:
            visible = visible & (self._distance >= 0)
        if window is not None:
            visible = visible & (self._distance < window)
        out = F.scaled_dot_product_attention(
            query, torch.cat([key, own_key], 2), torch.cat([value, own_value], 2), visible[:, None]
        )
        attended: Tensor = module.o_proj(out.transpose(1, 2).flatten(2))
        return attended


def choose_anchors(learnt: Tensor, num_anchors: int, generator: torch.Generator | None = None) -> Tensor:
    """Places ``[B, num_anchors]`` to look ahead from, drawn anew in each pass over the data.

    Args:
        learnt: where a token is to be learnt, ``[B, S]``; a block begins before such a one, and may reach past
            the end.

    Returns:
        ascending; some twice if a text of the batch has fewer than are wanted.
    """
    possible = learnt[:, 1:].clone()
    possible[:, 0] |= ~possible.any(1)
    weights = possible.to("cpu", torch.float32)
    few = int(weights.sum(1).min()) < num_anchors
    chosen = torch.multinomial(weights, num_anchors, replacement=few, generator=generator)
    return chosen.sort(1).values.to(learnt.device)


def block_labels(labels: Tensor, anchors: Tensor, block_size: int) -> Tensor:
    """What each place behind the anchors is to be filled with, ``[B, A, block_size - 1]``.

    Args:
        labels: the texts, ``[B, S]``, -100 where a token is not to be learnt.
    """
    places = anchors[..., None] + torch.arange(1, block_size, device=anchors.device)
    inside = F.pad(labels, (0, block_size), value=IGNORED)
    return inside.gather(1, places.flatten(1)).view(places.shape)


def block_loss(logits: Tensor, labels: Tensor, gamma: float) -> Tensor:
    """Mean cross entropy over labelled places; place j behind the anchor weighs exp(-(j - 1) / gamma).

    A mistake early in a block costs all that follows it (2602.06036; gamma is 7 for blocks of 16 there, 4 for 8).
    """
    losses = F.cross_entropy(logits.flatten(0, 2).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
    weights = torch.exp(-torch.arange(labels.shape[-1], device=labels.device) / gamma)
    return (losses.view(labels.shape) * weights).sum() / (labels != IGNORED).sum().clamp_min(1)
