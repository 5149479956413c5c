"""The draft vocabulary: the most frequent tokens of the answers, and those without which no answer ends."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

SMALL_HEAD_BYTES = 16_000_000
SMALLEST = 4096
USUAL = 32_000
BYTES_OF_A_NUMBER = 2
TAUGHT = 8192
"""Tokens whose laws are compared where a draft can be any token."""


def default_size(num_body_parameters: int, hidden_size: int, vocab_size: int, num_projections: int = 1) -> int:
    """So many tokens that a small head has at most 16 MB in bfloat16, but 4,096 at least; 32,000 for larger heads.

    Args:
        num_body_parameters: of the head without its projections to the vocabulary.
    """
    left = SMALL_HEAD_BYTES - BYTES_OF_A_NUMBER * num_body_parameters - vocab_size  # t2d has a byte a token
    a_token = BYTES_OF_A_NUMBER * hidden_size * num_projections + 8  # rows of the projections, and an entry of d2t
    fitting = max(SMALLEST, left // a_token // 64 * 64)
    return min(vocab_size, fitting if left > 0 else USUAL)


def draft_vocabulary(counts: Tensor, size: int, always: Collection[int]) -> Tensor:
    """Tokens to draft, ascending: ``always``, then the most frequent ones, of equally frequent ones the lower id.

    Args:
        counts: ``[V]``, how often each token occurs in the answers.
    """
    wanted = counts.clone().double()
    wanted[list(always)] = float("inf")
    order = torch.sort(wanted, descending=True, stable=True).indices
    return order[: min(size, len(counts))].sort().values


def mask_token(counts: Tensor, embeddings: Tensor, never: Collection[int]) -> int:
    """The token that stands for what is to be filled in: the rarest, of equally rare ones the highest id.

    Args:
        counts: ``[V]``, how often each token occurs in the answers.
        embeddings: of the target, ``[V, H]``; a token that has none is not taken, since a norm leaves it at 0.
        never: tokens that are not taken.
    """
    rarity = counts.double()
    rarity[list(never)] = float("inf")
    rarity[(embeddings == 0).all(-1)] = float("inf")
    return len(counts) - 1 - int(rarity.flip(0).argmin())
