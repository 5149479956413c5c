"""The EAGLE-1 head (Li et al., 2401.15077): one decoder layer that guesses the target's next state.

Drafting. A row pairs the target's state f_i at place i, which its lm_head reads, with the next token c_{i+1}::

    x = fc(cat(embedding, f))
    h = x + attention(x);  h = h + mlp(post_attention_layernorm(h))       no norm before the attention
    logits = target's lm_head(h)          h stands for f_{i+1} and is read by the next row

The variant with norms (``layernorms``, of speculators) has one over the embedding, one before the attention and one
before the lm_head. EAGLE-2 (2406.16858) is the same head under trees that follow its confidence (``drafters.growing``).

Training: ``unroll_states`` of ``recurrent``, whose row i of step j stands for the state of token i + 1 + j, as
``train.eagle`` uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.heads.layers import Attend, DecoderLayer, rms_norm
from foredraft.heads.recurrent import StateHead
from foredraft.target.features import AFTER_NORM


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """Shapes and variants of a head.

    Attributes:
        layer: configuration of its decoder layers, of transformers.
        vocab_size: of the target.
        feature_layers: the one whose state it reads.
        fc_bias: ``fc`` has a bias.
        layernorms: the variant with norms.
        norm_output: of that variant: the state that is fed back is the one behind the last norm.
        has_embeddings: has token embeddings of its own, a copy of the target's in most files.
    """

    layer: Any
    vocab_size: int
    feature_layers: tuple[int, ...] = (AFTER_NORM,)
    fc_bias: bool = False
    layernorms: bool = False
    norm_output: bool = False
    has_embeddings: bool = False


class EagleHead(StateHead):
    """The module; names of its tensors are those of the published files, of norms those of speculators."""

    config: EagleConfig

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.config = config
        layer, size = config.layer, config.layer.hidden_size
        if config.has_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.embedding_layernorm = rms_norm(size, layer) if config.layernorms else nn.Identity()
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.layers = nn.ModuleList(DecoderLayer(layer, i) for i in range(layer.num_hidden_layers))
        if not config.layernorms:
            self.layers[0].input_layernorm = nn.Identity()
        self.pre_lm_head_layernorm = rms_norm(size, layer) if config.layernorms else nn.Identity()

    def step(self, embeddings: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        hidden = self.fc(torch.cat([self.embedding_layernorm(embeddings), hidden], -1))
        for layer in self.layers:
            hidden = layer(hidden, attend)
        normed = self.pre_lm_head_layernorm(hidden)
        return (normed if self.config.norm_output else hidden), normed
