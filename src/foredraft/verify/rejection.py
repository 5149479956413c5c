"""Token-by-token rejection sampling of a draft chain (Leviathan et al., 2211.17192, algorithm 1; Chen et al.,
2302.01318, algorithm 2), and what the other ratio rule shares with it.

A draft token x is accepted with probability min(1, target(x) / draft(x)). At the first rejection the token is
drawn from the residual distribution norm(max(target - draft, 0)) instead; if none is rejected, a bonus token
is drawn from the target. The emitted tokens then have the target's law, provided that ``draft_probs`` is the
law that the draft was drawn from, and that draft, acceptance and recovered token use independent noise.

Shapes used by every rule (float32 or float64, kept): B rows, N draft tokens padded, V vocabulary.

    draft_token_ids    [B, N] int64       entries at and past num_draft_tokens may hold anything
    num_draft_tokens   [B] int64          0 is legal
    target_probs       [B, N + 1, V]      row i judges draft token i; row num_draft_tokens[b] is the bonus row
    draft_probs        [B, N, V] or None  None: the proposal was deterministic (one-hot)

A row's bits do not depend on the other rows, and rows of ``target_probs`` past the bonus row are not read
into a result. Nothing is modified.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accept_probs(
    draft_token_ids: Tensor, num_draft_tokens: Tensor, target_probs: Tensor, draft_probs: Tensor | None
) -> Tensor:
    """The probability min(1, target / draft) with which each draft token passes its test.

    Its mean over drafts is the overlap sum_x min(target(x), draft(x)) = 1 - total variation.

    Returns:
        ``[B, N]``, 0 at and past ``num_draft_tokens``.
    """
    return likelihood_ratios(draft_token_ids, num_draft_tokens, target_probs, draft_probs).clamp(max=1.0)


def count_accepted(accept_probs: Tensor, uniforms: Tensor) -> Tensor:
    """Length of the leading run of draft tokens that pass: uniform < accept probability.

    Args:
        accept_probs: ``[B, N]``.
        uniforms: ``[B, N]``, independent and uniform on (0, 1), float64.

    Returns:
        ``[B]`` int64.
    """
    return leading_run(uniforms < accept_probs)


def next_token_probs(
    draft_token_ids: Tensor,
    num_draft_tokens: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    num_accepted: Tensor,
) -> Tensor:
    """The law of the token after the accepted ones: the residual after a rejection, else the bonus row.

    Args:
        num_accepted: ``[B]`` int64, from :func:`count_accepted`.

    Returns:
        ``[B, V]``. Where the residual vanishes by rounding (target and draft agree), the target's row.
    """
    scale_B = torch.ones_like(target_probs[:, 0, 0])
    return residual_or_bonus_probs(draft_token_ids, num_draft_tokens, target_probs, draft_probs, num_accepted, scale_B)


def residual_or_bonus_probs(
    draft_token_ids: Tensor,
    num_draft_tokens: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    num_accepted: Tensor,
    target_scale_B: Tensor,
) -> Tensor:
    """norm(max(scale * target - draft, 0)) at position ``num_accepted``, or the target's row if all passed.

    Only that one row per sequence is read. Under a deterministic proposal the residual is the target without
    the draft token, whatever the scale.
    """
    every_row = torch.arange(len(num_accepted), device=num_accepted.device)
    next_probs_BV = target_probs[every_row, num_accepted]
    rejected = (num_accepted < num_draft_tokens).nonzero().squeeze(-1)
    if not len(rejected):
        return next_probs_BV
    position = num_accepted[rejected]
    target_RV = next_probs_BV[rejected]
    if draft_probs is None:
        residual_RV = target_RV.scatter(-1, draft_token_ids[rejected, position][:, None], 0.0)
    else:
        residual_RV = target_scale_B[rejected, None] * target_RV
        residual_RV = residual_RV.sub_(draft_probs[rejected, position]).clamp_(min=0.0)
    mass_R1 = row_sums(residual_RV)[:, None]
    next_probs_BV[rejected] = torch.where(mass_R1 > 0.0, residual_RV / mass_R1, target_RV)
    return next_probs_BV


def likelihood_ratios(
    draft_token_ids: Tensor, num_draft_tokens: Tensor, target_probs: Tensor, draft_probs: Tensor | None
) -> Tensor:
    """target / draft of each draft token, ``[B, N]``, finite; 0 at and past ``num_draft_tokens``.

    A token of draft probability 0 cannot have been drawn; its ratio is 0, so that it is never accepted.
    """
    is_real = real_positions(draft_token_ids, num_draft_tokens)
    ratios_BN = token_probs(draft_token_ids, is_real, target_probs)
    if draft_probs is not None:
        drafted_BN = token_probs(draft_token_ids, is_real, draft_probs)
        ratios_BN = torch.where(drafted_BN > 0.0, ratios_BN / drafted_BN, 0.0)
    # A subnormal draft probability may give inf, and a later inf * 0 would be nan.
    return ratios_BN.clamp(max=torch.finfo(ratios_BN.dtype).max)


def real_positions(draft_token_ids: Tensor, num_draft_tokens: Tensor) -> Tensor:
    """``[B, N]`` bool: which entries of the draft are not padding."""
    num_positions = draft_token_ids.shape[1]
    return torch.arange(num_positions, device=draft_token_ids.device) < num_draft_tokens[:, None]


def token_probs(draft_token_ids: Tensor, is_real: Tensor, probs: Tensor) -> Tensor:
    """Probability of each draft token under ``probs [B, at least N, V]``, ``[B, N]``; 0 for padding."""
    token_ids = torch.where(is_real, draft_token_ids, 0)[..., None]
    gathered = probs[:, : draft_token_ids.shape[1]].gather(-1, token_ids).squeeze(-1)
    return torch.where(is_real, gathered, 0.0)


def leading_run(passed: Tensor) -> Tensor:
    """Number of True before the first False of each row: ``[B, N]`` bool -> ``[B]`` int64."""
    return passed.to(torch.int64).cumprod(dim=-1).sum(dim=-1)


def row_sums(values: Tensor) -> Tensor:
    """Sums over the last dimension, accumulated in float64, in the dtype of ``values``.

    One sum per row, because torch splits the work of one large sum by the number of rows, and so its
    rounding would depend on the neighbours.
    """
    rows = values.reshape(-1, values.shape[-1])
    sums = [row.sum(dtype=torch.float64) for row in rows]
    return torch.stack(sums).to(values.dtype).reshape(values.shape[:-1]) if sums else values[..., 0]
