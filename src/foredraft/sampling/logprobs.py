"""Log-probabilities for the user: always of the target, always before any filter."""

from __future__ import annotations

from torch import Tensor

from foredraft.types import Logprob


def top_logprobs(logits_MV: Tensor, token_ids_M: Tensor, num_top: int) -> list[dict[int, Logprob]]:
    """Log-probabilities of the emitted tokens and of the ``num_top`` most likely ones.

    Args:
        logits_MV: ``[M, V]``, the target's raw logits, one row per emitted token.
        token_ids_M: ``[M]`` int64, the emitted tokens.
        num_top: 0 returns the emitted token only.

    Returns:
        One mapping per row: the emitted token first, then the others from the most likely down. A rank is 1
        plus the number of tokens that are strictly more likely, so tokens that tie share a rank.
    """
    logprobs_MV = logits_MV.float().log_softmax(dim=-1)
    emitted_M1 = logprobs_MV.gather(-1, token_ids_M[:, None])
    emitted_ranks = ((logprobs_MV > emitted_M1).sum(dim=-1) + 1).tolist()
    top = logprobs_MV.topk(min(num_top, logprobs_MV.shape[-1]), dim=-1)
    top_ranks = ((top.values[:, None, :] > top.values[:, :, None]).sum(dim=-1) + 1).tolist()

    mappings = []
    for row, token_id in enumerate(token_ids_M.tolist()):
        mapping = {token_id: Logprob(float(emitted_M1[row, 0]), emitted_ranks[row])}
        for other, value, rank in zip(top.indices[row].tolist(), top.values[row].tolist(), top_ranks[row], strict=True):
            mapping.setdefault(other, Logprob(value, rank))
        mappings.append(mapping)
    return mappings
