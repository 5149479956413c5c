"""Block verification of a draft chain (Sun et al., 2403.10444, algorithm 2).

The draft is judged as a whole: P_0 = 1 and P_i = min(P_{i-1} * target(x_i) / draft(x_i), 1) is the chance
that the first i tokens may stay. Stopping after i < n tokens has probability

    h_i = R_i / (R_i + 1 - P_i),   R_i = sum_x max(P_i * target(x | x_1..x_i) - draft(x | x_1..x_i), 0)

and h_n = P_n. The number accepted is the largest i whose own uniform number lies below h_i; the next token
has the law norm(max(P_i * target - draft, 0)), or the target's if all n are accepted. The emitted tokens have
the target's law, and no fewer are accepted on average than by `rejection`. Shapes: see `rejection`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.verify.rejection import (
    likelihood_ratios,
    real_positions,
    residual_or_bonus_probs,
    row_sums,
    token_probs,
)


def stop_probs(
    draft_token_ids: Tensor, num_draft_tokens: Tensor, target_probs: Tensor, draft_probs: Tensor | None
) -> Tensor:
    """h_i, the probability to stop after draft token i unless a longer prefix is accepted.

    Returns:
        ``[B, N]``; entry i belongs to the first i + 1 tokens. 0 at and past ``num_draft_tokens``.
    """
    prefix_BN = prefix_probs(draft_token_ids, num_draft_tokens, target_probs, draft_probs)
    num_positions = draft_token_ids.shape[1]
    if num_positions == 0:
        return prefix_BN
    inner = prefix_BN[:, :-1]
    is_real = real_positions(draft_token_ids, num_draft_tokens)
    if draft_probs is None:
        next_BN = token_probs(draft_token_ids, is_real, target_probs)[:, 1:]
        residual_mass = inner * (1.0 - next_BN).clamp(min=0.0)
    else:
        excess = inner[..., None] * target_probs[:, 1:num_positions]
        residual_mass = row_sums(excess.sub_(draft_probs[:, 1:]).clamp_(min=0.0))
    # In this order: where inner is 1 a tiny residual must not be lost in a sum with 1.
    denominator = residual_mass + (1.0 - inner)
    # 0 / 0: the prefix stays for sure, and target and draft agree on what follows.
    inner_stop = torch.where(denominator > 0.0, residual_mass / denominator, 1.0)
    stop_BN = torch.cat([inner_stop, prefix_BN[:, -1:]], dim=-1)
    is_last = torch.arange(num_positions, device=stop_BN.device) == num_draft_tokens[:, None] - 1
    return torch.where(is_real, torch.where(is_last, prefix_BN, stop_BN), 0.0)


def count_accepted(stop_probs: Tensor, uniforms: Tensor) -> Tensor:
    """The longest prefix that passes its test: the largest i with uniform_i < h_i, else 0.

    Args:
        stop_probs: ``[B, N]``.
        uniforms: ``[B, N]``, independent and uniform on (0, 1), float64.

    Returns:
        ``[B]`` int64.
    """
    lengths = torch.arange(1, stop_probs.shape[1] + 1, device=stop_probs.device)
    passed = torch.where(uniforms < stop_probs, lengths, 0)
    return torch.cat([passed.new_zeros(len(passed), 1), passed], dim=-1).amax(dim=-1)


def next_token_probs(
    draft_token_ids: Tensor,
    num_draft_tokens: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    num_accepted: Tensor,
) -> Tensor:
    """The law of the token after the accepted ones: norm(max(P_i * target - draft, 0)), or the bonus row.

    Args:
        num_accepted: ``[B]`` int64, from :func:`count_accepted`.

    Returns:
        ``[B, V]``. Where the residual vanishes by rounding, the target's row.
    """
    prefix_BN = prefix_probs(draft_token_ids, num_draft_tokens, target_probs, draft_probs)
    padded = torch.cat([prefix_BN.new_ones(len(prefix_BN), 1), prefix_BN], dim=-1)
    scale_B = padded.gather(-1, num_accepted[:, None]).squeeze(-1)
    return residual_or_bonus_probs(draft_token_ids, num_draft_tokens, target_probs, draft_probs, num_accepted, scale_B)


def prefix_probs(
    draft_token_ids: Tensor, num_draft_tokens: Tensor, target_probs: Tensor, draft_probs: Tensor | None
) -> Tensor:
    """P_1 .. P_N: ``[B, N]``, 0 at and past ``num_draft_tokens``."""
    ratios_BN = likelihood_ratios(draft_token_ids, num_draft_tokens, target_probs, draft_probs)
    prefix_BN = torch.empty_like(ratios_BN)
    running_B = ratios_BN.new_ones(len(ratios_BN))
    for position in range(ratios_BN.shape[1]):
        running_B = (running_B * ratios_BN[:, position]).clamp(max=1.0)
        prefix_BN[:, position] = running_B
    return prefix_BN
