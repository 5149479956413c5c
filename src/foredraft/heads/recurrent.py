"""Heads that draft token by token from their own states: what the engine asks of them, and how they are unrolled.

Training. ``unroll_states(features, token_ids, embeddings, num_steps)`` yields what the lm_head reads at each step:

    features   [B, S, layers * target hidden]   state of every token of the text, layers side by side
    token_ids  [B, S]                           padded on the right
    yields     [B, S - 1, hidden]               step j, row i reads token i + 1 + j and predicts token i + 2 + j

Tokens are those of the text (teacher forcing); states are the target's in step 0 and the head's own from step 1 on, as
when it drafts (training-time test; EAGLE-3, Li et al., 2503.01840, section 3.2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from foredraft.heads.layers import Attend, UnrolledAttention, rotary_table

LmHead = Callable[[Tensor], Tensor]
"""From states ``[..., hidden]`` to logits ``[..., V]``."""


class RecurrentHead(Protocol):
    """What drafting needs. A head without a method ``logits`` shares the target's lm_head, one without
    ``embed_tokens`` its embeddings."""

    def combine(self, features: Tensor) -> Tensor:
        """The first state ``[..., hidden]`` from the target's, ``[..., layers * target hidden]``."""
        ...

    def step(self, embeddings: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """The state that is fed back, and what the lm_head reads; all ``[..., hidden]``."""
        ...


class StateHead(nn.Module, ABC):
    """A head on one state of the target that shares its lm_head.

    ``config`` has ``layer``, the configuration of its decoder layers, and ``feature_layers``, whose state it reads.
    """

    config: Any

    def combine(self, features: Tensor) -> Tensor:
        return features

    @abstractmethod
    def step(self, embeddings: Tensor, hidden: Tensor, attend: Attend) -> tuple[Tensor, Tensor]: ...

    def unroll_states(
        self, features: Tensor, token_ids: Tensor, embeddings: Tensor, num_steps: int
    ) -> Iterator[Tensor]:
        """See the top of this file.

        Args:
            embeddings: the target's, ``[V, hidden]``; not read if the head has its own.
        """
        own = getattr(self, "embed_tokens", None)
        return unroll_states(self, self.config.layer, features, token_ids, own.weight if own else embeddings, num_steps)

    def unroll(
        self, features: Tensor, token_ids: Tensor, embeddings: Tensor, num_steps: int, lm_head: LmHead
    ) -> Iterator[Tensor]:
        """The logits ``[B, S - 1, V]`` of each step by the target's lm_head."""
        return map(lm_head, self.unroll_states(features, token_ids, embeddings, num_steps))


def unroll_states(
    head: RecurrentHead, layer: Any, features: Tensor, token_ids: Tensor, embeddings: Tensor, num_steps: int
) -> Iterator[Tensor]:
    """What the lm_head of any recurrent head reads at each step; see the top of this file."""
    num_rows = token_ids.shape[1] - 1
    attend = UnrolledAttention(rotary_table(layer, num_rows + num_steps), num_rows)
    hidden = head.combine(features[:, :-1])
    for step in range(num_steps):
        following = F.pad(token_ids[:, 1 + step :], (0, step))
        attend.step = step
        hidden, normed = head.step(F.embedding(following, embeddings).to(hidden), hidden, attend)
        yield normed
