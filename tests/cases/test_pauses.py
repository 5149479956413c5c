"""ADP: a drafter that was not asked for some steps catches up before it drafts again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from foredraft import Engine, SamplingParams
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.policy import PlanRow, StepOutcome
from foredraft.testing import RecordingDrafter, check_caches, engine_for, reference, run, target_for

PROMPTS = [[1, 2, 3], [10, 11], [7, 8, 9, 10, 7, 8]]
BEFORE, PAUSE = 5, 10
LENGTH = 4


class Pausing:
    """Four draft tokens for five rounds, none for ten tokens, then four again; only for the rows that are paused."""

    forecast = None

    def __init__(self, paused: Sequence[int]):
        self.paused, self.rounds = set(paused), 0

    def rests(self, num_rows: int) -> bool:
        return False

    def plan(self, rows: Sequence[PlanRow], num_other_tokens: int) -> list[int]:
        pausing = BEFORE <= self.rounds < BEFORE + PAUSE
        self.rounds += 1
        return [0 if pausing and row.sequence_id in self.paused else min(LENGTH, row.limit) for row in rows]

    def observe(self, step: StepOutcome) -> None: ...

    def forget(self, sequence_id: int) -> None: ...


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("paused", [[1], [0, 1, 2]], ids=["one row", "all"])
def test_o38_after_a_pause_every_draft_is_accepted(tiny: Any, paused: list[int], seed: int | None):
    """The draft model has the target's weights. Around the pause caches are compared with a pass from scratch."""
    params = SamplingParams(temperature=0.0 if seed is None else 1.0, seed=seed, max_tokens=80)
    drafter = RecordingDrafter(DraftModelDrafter(target_for(tiny), 64))
    policy = Pausing(paused)
    engine = engine_for(tiny, drafter, num_speculative_tokens=LENGTH, policy=policy)

    def check(engine: Engine, _: object) -> None:
        if policy.rounds in (BEFORE, BEFORE + 1, BEFORE + PAUSE, BEFORE + PAUSE + 1):
            check_caches(engine)

    sequences = run(engine, PROMPTS, params, after_step=check)
    after = [widths for widths in drafter.widths[BEFORE + PAUSE :] if len(widths) == len(PROMPTS)]
    assert drafter.widths[BEFORE][paused[0]] == 0
    assert any(widths[paused[0]] == LENGTH for widths in after), "drafting was to go on after the pause"
    for sequence, prompt in zip(sequences, PROMPTS, strict=True):
        assert sequence.output_token_ids == reference(tiny, prompt, params).token_ids
        assert sequence.metrics.acceptance_rate == 1.0
