"""The EAGLE-3 head (Li et al., 2503.01840): one decoder layer over the target's states and its own.

Drafting. A row pairs the target's state f_i at place i with the next token c_{i+1} and predicts c_{i+2}; the row that
follows takes the state that this one gave instead of f_{i+1}, so a draft needs no pass of the target::

    h = fc(cat(low, mid, high))            states of three layers of the target, counted as in target/features.py
    x = cat(input_layernorm(embedding), hidden_norm(h))
    h = h + attention(x);  h = h + mlp(post_attention_layernorm(h))
    logits = lm_head(norm(h))              over the draft vocabulary; id i means token i + d2t[i]
    next h = h                             before the norm; behind it if ``norm_output``

Training. ``unroll(features, token_ids, embeddings, num_steps)`` yields the logits of each step of training-time test:

    features   [B, S, layers * target hidden]   state of every token of the text, layers side by side
    token_ids  [B, S]                           padded on the right
    yields     [B, S - 1, draft vocabulary]     step j, row i: what is predicted for token i + 2 + j

    for step, logits in enumerate(head.unroll(features, token_ids, embeddings, 3)):
        labels = token_ids[:, 2 + step :]                 # target ids, or the target's own law at places 1 + step ...
        loss = loss + 0.8**step * f(logits[:, : labels.shape[1]], labels)

Tokens are those of the text (teacher forcing), states the head's own from step 1 on. ``head.draft_ids(labels)`` gives
ids of the draft vocabulary, -1 where it has none; ``head.restrict(target_logits)`` its columns. A trained head is
written by ``eagle3_format.save_eagle3``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.heads.layers import Attend, DecoderLayer, rms_norm
from foredraft.heads.recurrent import unroll_states


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """Shapes and variants of a head.

    Attributes:
        layer: configuration of its decoder layers, of transformers (Llama or Qwen3).
        draft_vocab_size: ids that it can draft.
        target_vocab_size, target_hidden_size: of the target.
        feature_layers: whose states it reads.
        norm_before_residual: the residual is the normed state (speculators), not the state itself.
        norm_before_fc: one norm over all states before ``fc`` (gpt-oss); fc_norm: one a layer (EAGLE 3.1).
        norm_output: the state that is fed back is the normed one (EAGLE 3.1).
        has_embeddings: has token embeddings of its own, not the target's.
    """

    layer: Any
    draft_vocab_size: int
    target_vocab_size: int
    target_hidden_size: int
    feature_layers: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    has_embeddings: bool = False


class Eagle3Layer(DecoderLayer):
    """The first layer, whose attention reads the token beside the state."""

    def __init__(self, config: Any, norm_before_residual: bool):
        super().__init__(config, 0, 2 * config.hidden_size)
        self.hidden_norm = rms_norm(config.hidden_size, config)
        self.norm_before_residual = norm_before_residual

    def run(self, embeddings: Tensor, hidden: Tensor, attend: Attend) -> Tensor:
        normed = self.hidden_norm(hidden)
        both = torch.cat([self.input_layernorm(embeddings), normed], -1)
        return self.through(normed if self.norm_before_residual else hidden, both, attend)


class Eagle3Head(nn.Module):
    """The module; names of its tensors are those of the speculators format."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.config = config
        layer, size = config.layer, config.layer.hidden_size
        num_features = len(config.feature_layers)
        if config.has_embeddings:
            self.embed_tokens = nn.Embedding(config.target_vocab_size, size)
        if config.norm_before_fc:
            self.input_norm = rms_norm(num_features * config.target_hidden_size, layer)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(rms_norm(config.target_hidden_size, layer) for _ in range(num_features))
        self.fc = nn.Linear(num_features * config.target_hidden_size, size, bias=False)
        first = Eagle3Layer(layer, config.norm_before_residual)
        self.layers = nn.ModuleList([first, *(DecoderLayer(layer, i) for i in range(1, layer.num_hidden_layers))])
        self.norm = rms_norm(size, layer)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.target_vocab_size, dtype=torch.bool))
        self.set_vocabulary(torch.arange(config.draft_vocab_size))

    @property
    def token_ids(self) -> Tensor:
        """The target's id of every id of the draft vocabulary, ``[draft vocabulary]``."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def set_vocabulary(self, token_ids: Tensor) -> None:
        """Draft only these tokens, ``[draft vocabulary]`` ascending."""
        self.d2t.copy_(token_ids - torch.arange(len(token_ids), device=token_ids.device))
        self.t2d.zero_()
        self.t2d[token_ids] = True

    def combine(self, features: Tensor) -> Tensor:
        """The first state ``[..., hidden]`` from the target's, ``[..., layers * target hidden]``."""
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        hidden: Tensor = self.fc(features)
        return hidden

    def step(self, embeddings: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """The state that is fed back, and what :meth:`logits` reads; all ``[..., hidden]``."""
        first: Any = self.layers[0]
        hidden = first.run(embeddings, hidden, attend)
        for layer in self.layers[1:]:
            hidden = layer(hidden, attend)
        normed = self.norm(hidden)
        return (normed if self.config.norm_output else hidden), normed

    def logits(self, normed: Tensor) -> Tensor:
        out: Tensor = self.lm_head(normed)
        return out

    def unroll(self, features: Tensor, token_ids: Tensor, embeddings: Tensor, num_steps: int) -> Iterator[Tensor]:
        """Logits of each step over whole texts; see the top of this file."""
        return map(self.logits, self.unroll_states(features, token_ids, embeddings, num_steps))

    def unroll_states(
        self, features: Tensor, token_ids: Tensor, embeddings: Tensor, num_steps: int
    ) -> Iterator[Tensor]:
        """What :meth:`logits` reads at each step, ``[B, S - 1, hidden]``.

        Args:
            embeddings: the target's, ``[V, hidden]``; not read if the head has its own.
        """
        embeddings = self.embed_tokens.weight if self.config.has_embeddings else embeddings
        return unroll_states(self, self.config.layer, features, token_ids, embeddings, num_steps)

    def draft_ids(self, token_ids: Tensor) -> Tensor:
        """Ids of the draft vocabulary for the target's; -1 for tokens that it lacks."""
        places = self.t2d.cumsum(0) - 1
        return torch.where(self.t2d[token_ids], places[token_ids], -1)

    def restrict(self, logits: Tensor) -> Tensor:
        """The columns ``[..., draft vocabulary]`` of logits ``[..., V]`` of the target."""
        return logits[..., self.token_ids.to(logits.device)]
