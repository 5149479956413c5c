"""Draft lengths that maximise expected emitted tokens per second, for the whole batch at once, 0 included.

The next draft token of any row adds its survival to what is emitted and its row's share to the cost of the pass. Taken
in the order of falling survival, the best number of them is where

    (rows + sum of survivals) / (draft + pass + overhead)

is highest (goodput as in SmartSpec, Liu et al., 2406.14066; there with one length for all rows). Survival falls along a
row, so the order never takes a token before the one that it follows.

Where a route gets no drafts its acceptance is not seen. So a row of it is given one token now and then, as often as one
per cent of the time pays for; half as often after each time that this changes nothing, down to a tenth of a per cent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.policy.acceptance import AcceptanceBook
from foredraft.policy.base import PlanRow, StepOutcome
from foredraft.policy.cost import StepCost

FIRST_SHARE, LAST_SHARE = 0.01, 0.001
"""Share of the time that probing a route may take, at first and at least."""


@dataclass(slots=True)
class _Probe:
    """Of a route that gets no drafts: seconds saved up for a probe, and which share of the time is saved."""

    saved_s: float = 0.0
    share: float = FIRST_SHARE


class GoodputPolicy:
    """The controller.

    Args:
        cost: of a step.
    """

    def __init__(self, cost: StepCost):
        self.cost = cost
        self.acceptance = AcceptanceBook()
        self._probes: dict[str, _Probe] = {}

    def plan(self, rows: Sequence[PlanRow], num_other_tokens: int) -> list[int]:
        lengths = self._best_lengths(rows, num_other_tokens)
        for at in self._probing(rows, lengths, num_other_tokens):
            lengths[at] = 1
        return lengths

    def observe(self, step: StepOutcome) -> None:
        for row in step.rows:
            self.acceptance.observe(row.sequence_id, row.route, row.num_draft_tokens, row.num_accepted)
        self.cost.observe_pass(step.num_tokens, step.num_keys, step.num_pairs, step.target_s)
        longest = max((row.planned for row in step.rows), default=0)
        num_logits = sum(1 + row.num_draft_tokens for row in step.rows)
        if step.rows:
            self.cost.observe_rest(longest, num_logits, step.draft_s, step.verify_s, step.host_s)

    def forget(self, sequence_id: int) -> None:
        self.acceptance.forget(sequence_id)

    def _best_lengths(self, rows: Sequence[PlanRow], num_other_tokens: int) -> list[int]:
        tokens = [
            (chance, at, position)
            for at, row in enumerate(rows)
            for position, chance in enumerate(self._survival(row), start=1)
        ]
        tokens.sort(key=lambda token: (-token[0], token[2]))
        keys = sum(row.context_len for row in rows)
        emitted, pairs, longest = float(len(rows)), keys, 0
        best = emitted / self._step_s(len(rows), num_other_tokens, keys, pairs, 0) if rows else 0.0
        taken = 0
        for count, (chance, at, position) in enumerate(tokens, start=1):
            emitted += chance
            pairs += rows[at].context_len
            longest = max(longest, position)
            goodput = emitted / self._step_s(len(rows) + count, num_other_tokens, keys, pairs, longest)
            if goodput > best:
                best, taken = goodput, count
        lengths = [0] * len(rows)
        for _, at, position in tokens[:taken]:
            lengths[at] = max(lengths[at], position)
        return lengths

    def _step_s(self, num_logits: int, num_other_tokens: int, keys: int, pairs: int, longest: int) -> float:
        cost = self.cost
        passed = cost.pass_s(num_logits + num_other_tokens, keys, pairs)
        return passed + cost.draft_s(longest) + cost.overhead_s(num_logits)

    def _survival(self, row: PlanRow) -> list[float]:
        return self.acceptance.survival(row.sequence_id, row.route, row.limit)

    def _probing(self, rows: Sequence[PlanRow], lengths: Sequence[int], num_other_tokens: int) -> list[int]:
        """One row of each route that has had no drafts for long enough."""
        first_of_route = {row.route: at for at, row in reversed(list(enumerate(rows))) if row.limit > 0}
        for row, length in zip(rows, lengths, strict=True):
            if length and first_of_route.pop(row.route, None) is not None:
                self._probes.pop(row.route, None)
        if not first_of_route:
            return []
        keys = sum(row.context_len for row in rows)
        num_logits = len(rows) + sum(lengths)
        step_s = self._step_s(num_logits, num_other_tokens, keys, keys, max(lengths))
        probe_s = self._step_s(num_logits + 1, num_other_tokens, keys, keys, max(1, max(lengths))) - step_s
        chosen = []
        for route, at in first_of_route.items():
            probe = self._probes.setdefault(route, _Probe())
            probe.saved_s += probe.share * step_s
            if probe.saved_s >= probe_s:
                probe.saved_s, probe.share = 0.0, max(probe.share / 2, LAST_SHARE)
                chosen.append(at)
        return chosen
