"""Where the seconds of a step went: for the metrics of its requests, and for the policy."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from foredraft.engine.scheduler import ScheduledRow
from foredraft.engine.sequence import Sequence
from foredraft.policy import PlanRow, RowOutcome, StepOutcome
from foredraft.types import Draft, Verdict

Planned = tuple[PlanRow, int]
"""What a policy was told of a row, and the draft tokens that were planned for it."""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of a step's parts."""

    draft: float
    target: float
    verify: float
    host: float

    @classmethod
    def between(
        cls, started: float, drafted: float, passed: float, verified: float, ended: float, draft_s: float
    ) -> StepSeconds:
        """From the clock at the ends of the parts, and what of the first was the drafter's."""
        return cls(draft_s, passed - drafted, verified - passed, ended - verified + drafted - started - draft_s)


def share_seconds(rows: Seq[ScheduledRow[Sequence]], seconds: StepSeconds) -> None:
    """Add an equal share of a step to the metrics of each of its rows."""
    now, share = time.perf_counter(), 1.0 / len(rows)
    for row in rows:
        metrics = row.sequence.metrics
        metrics.draft_s += seconds.draft * share
        metrics.target_s += seconds.target * share
        metrics.verify_s += seconds.verify * share
        metrics.host_s += seconds.host * share
        metrics.total_s = now - row.sequence.arrived_s
        if row.completes and metrics.first_token_s is None:
            metrics.first_token_s = now - row.sequence.arrived_s


def step_outcome(
    rows: Seq[ScheduledRow[Sequence]],
    planned: Seq[Planned],
    draft: Draft,
    verdicts: Seq[Verdict],
    seconds: StepSeconds,
) -> StepOutcome:
    """What the policy is told of a step."""
    counts = iter(draft.num_draft_tokens)
    fed = [row.num_tokens + (next(counts) if row.completes else 0) for row in rows]
    lengths = [len(row.sequence.token_ids) for row in rows]
    return StepOutcome(
        rows=[
            RowOutcome(
                row.sequence_id,
                row.route,
                count,
                draft.num_draft_tokens[i],
                verdicts[i].path,
                row.match_len,
                row.source,
                row.is_free,
                row.branches,
                row.num_unread,
            )
            for i, (row, count) in enumerate(planned)
        ],
        num_rows=len(rows),
        num_tokens=sum(fed),
        num_keys=sum(lengths),
        num_pairs=sum(n * length for n, length in zip(fed, lengths, strict=True)),
        draft_s=seconds.draft,
        target_s=seconds.target,
        verify_s=seconds.verify,
        host_s=seconds.host,
    )
