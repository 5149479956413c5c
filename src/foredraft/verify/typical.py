"""Typical acceptance (Medusa, Cai et al., 2401.10774, section 2.3.1). LOSSY: the output is not the target's.

A draft token x stays if target(x) > min(epsilon, delta * exp(-entropy(target))): likely tokens always stay,
unlikely ones do where the target itself is undecided. What is drafted is thereby over-represented. Only for
use behind ``allow_lossy=True``. Shapes: see `rejection`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.verify.rejection import real_positions, row_sums, token_probs


def accept_probs(
    draft_token_ids: Tensor,
    num_draft_tokens: Tensor,
    target_probs: Tensor,
    posterior_threshold: float,
    posterior_alpha: float,
) -> Tensor:
    """1 for a draft token that is typical under the target, else 0. No noise is needed.

    Args:
        posterior_threshold: epsilon, in (0, 1]; Medusa's own value is 0.09.
        posterior_alpha: delta, above 0; Medusa's own value is 0.3, the root of epsilon.

    Returns:
        ``[B, N]``, 0 at and past ``num_draft_tokens``. `rejection.count_accepted` takes it with any uniforms.
    """
    is_real = real_positions(draft_token_ids, num_draft_tokens)
    entropy_BN = row_sums(torch.special.entr(target_probs[:, : draft_token_ids.shape[1]]))
    limit_BN = (posterior_alpha * torch.exp(-entropy_BN)).clamp(max=posterior_threshold)
    typical = token_probs(draft_token_ids, is_real, target_probs) > limit_BN
    return (typical & is_real).to(target_probs.dtype)


def next_token_probs(target_probs: Tensor, num_accepted: Tensor) -> Tensor:
    """The target's row after the accepted tokens, after a rejection too: ``[B, V]``."""
    return target_probs[torch.arange(len(num_accepted), device=num_accepted.device), num_accepted]
