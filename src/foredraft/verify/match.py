"""Acceptance by equality: the target names its token at each position; a draft token stays if it is that.

The emitted tokens are always the target's own: the drafted ones that equal them, then the target's token at
the first mismatch or, if there is none, at the bonus row. How those tokens were chosen decides what is kept:

* greedy: the argmax of each row. Row i saw the draft tokens before it, and they equal what was emitted; so
  its argmax is that of plain decoding. Token-identical.
* sample-and-match: an independent draw from each row. The tokens are draws of the target by construction,
  whatever was drafted. Distribution-exact; accepts sum_x target(x) * draft(x).
* coupled: the draw of row i uses the noise keyed by (seed, position), argmax(log probability + Gumbel noise).
  Plain decoding with that seed draws with the same noise from the same distribution. Token-identical, for any
  draft, for it depends on neither draft nor step. A drafter that draws its own tokens with the same noise is
  accepted with a probability of at least (1 - TV) / (1 + TV) (Daliri et al., 2408.07978).

One draw per position, never one per candidate of several that share a prefix: picking the longest of those
is biased (methods.md 0.3).
"""

from __future__ import annotations

from torch import Tensor

from foredraft.verify.rejection import leading_run, real_positions


def count_matches(draft_token_ids: Tensor, num_draft_tokens: Tensor, target_token_ids: Tensor) -> Tensor:
    """Length of the leading run of draft tokens that equal the target's.

    Args:
        draft_token_ids: ``[B, N]`` int64; padding may hold anything.
        num_draft_tokens: ``[B]`` int64.
        target_token_ids: ``[B, N + 1]`` int64, the target's token at each row.

    Returns:
        ``[B]`` int64, n. The emitted tokens are ``target_token_ids[b, : n + 1]``.
    """
    num_positions = draft_token_ids.shape[1]
    equal = draft_token_ids == target_token_ids[:, :num_positions]
    return leading_run(equal & real_positions(draft_token_ids, num_draft_tokens))
