"""The EAGLE-1 head (Li et al., 2401.15077): one decoder layer that guesses the target's next state.

Drafting. A row pairs the target's state f_i at place i, which its lm_head reads, with the next token c_{i+1}::

    x = fc(cat(embedding, f))
    h = x + attention(x);  h = h + mlp(post_attention_layernorm(h))       no norm before the attention
    logits = target's lm_head(h)          h stands for f_{i+1} and is read by the next row

The variant with norms (``layernorms``, of speculators) has one over the embedding, one before the attention and one
before the lm_head. EAGLE-2 (2406.16858) is the same head under trees that follow its confidence (``drafters.growing``).

Training, beside ``unroll_states`` of ``recurrent``: states f are disturbed by :func:`with_noise`, and step j is judged
by :func:`regression_loss` against the true states and the token laws that follow from them (section 3.3)::

    for step, guessed in enumerate(head.unroll_states(with_noise(features, generator), token_ids, embeddings, 1)):
        true = features[:, 1 + step :]                     # row i of step j stands for the state of token i + 1 + j
        loss = regression_loss(guessed[:, : true.shape[1]], true, lm_head)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.heads.layers import Attend, DecoderLayer, rms_norm
from foredraft.heads.recurrent import LmHead, StateHead
from foredraft.target.features import AFTER_NORM

NOISE_WIDTH, NOISE_LEN = 0.2, 512
TOKEN_WEIGHT = 0.1


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


def with_noise(features: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """States ``[B, S, hidden]`` with uniform noise of width 0.2, less on longer texts.

    It stands for the errors in the head's own guesses, which it reads from the second draft token on.
    """
    noise = torch.rand(features.shape, generator=generator).to(features) - 0.5
    return features + noise * (NOISE_WIDTH * NOISE_LEN / features.shape[1])


def regression_loss(guessed: Tensor, true: Tensor, lm_head: LmHead, mask: Tensor | None = None) -> Tensor:
    """Smooth L1 distance of states plus 0.1 times the cross-entropy of the token laws that follow from them.

    Args:
        guessed, true: states ``[B, R, hidden]`` as the lm_head reads them.
        mask: ``[B, R]``, rows that count; None takes all.
    """
    counts = torch.ones(guessed.shape[:2]).to(guessed) if mask is None else mask.to(guessed)
    distance = F.smooth_l1_loss(guessed, true, reduction="none").mean(-1)
    law = torch.softmax(lm_head(true).float(), -1)
    entropy = -(law * torch.log_softmax(lm_head(guessed).float(), -1)).sum(-1)
    return ((distance + TOKEN_WEIGHT * entropy) * counts).sum() / counts.sum().clamp_min(1.0)
