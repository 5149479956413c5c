"""PRM: penalties, filters and minimum length act on every place of a block as they do on single tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest

from foredraft import SamplingParams
from foredraft.testing import ScriptedDrafter, constant_bigram, engine_for, run

IMPOSSIBLE = float("-inf")
FOUR_WORDS = [0.60, 0.25, 0.10, 0.05]


def log(probs: list[float]) -> list[float]:
    return [math.log(p) if p else IMPOSSIBLE for p in probs]


@pytest.mark.parametrize("k", [0, 1, 2, 3, 5])
def test_o06_a_frequency_penalty_counts_every_committed_token(k: int):
    """Counting only the last token of a block gives long runs of 3; the smallest gap on the way is 0.12."""
    logits = [-10.0, -10.0, -10.0, 2.0, 1.5, -10.0]
    engine = engine_for(constant_bigram(logits), ScriptedDrafter([3] * 8) if k else None, num_speculative_tokens=k)
    params = SamplingParams(temperature=0, frequency_penalty=0.31, max_tokens=16)
    (sequence,) = run(engine, [[1]], params)
    assert sequence.output_token_ids == [3, 3, 4, 3, 4, 3, 4, 3, 4, 3, 4, 3, 4, 3, 4, 3]
    if k:
        assert 0 < sequence.metrics.num_accepted_tokens < sequence.metrics.num_draft_tokens


@pytest.mark.parametrize("draft", [[3] * 8, [3, 3, 2, 3, 2], [2] * 8])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_o06_a_minimum_length_counts_every_committed_token(k: int, draft: list[int]):
    """The end token has the top logit everywhere, so it stands at place 7 exactly."""
    engine = engine_for(
        constant_bigram([0.0, 0.0, 5.0, 4.0]), ScriptedDrafter(draft), num_speculative_tokens=k, eos_token_ids=(2,)
    )
    (sequence,) = run(engine, [[1]], SamplingParams(temperature=0, min_tokens=6, max_tokens=20))
    assert sequence.output_token_ids == [3] * 6 + [2]
    assert sequence.finish_reason == "stop"
    if k > 1 and draft[0] == 3:
        assert sequence.metrics.num_accepted_tokens > 0


FILTERS: dict[str, dict[str, Any]] = {"min-p": {"min_p": 0.3}, "top-k": {"top_k": 2}, "top-p": {"top_p": 0.8}}


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled", "match"])
@pytest.mark.parametrize("k", [1, 4, *(pytest.param(k, marks=pytest.mark.slow) for k in (2, 3))])
@pytest.mark.parametrize("name", FILTERS)
def test_o07_filters_act_on_every_row(name: str, k: int, rule: str):
    """Token 2 is filtered out and proposed all the time; unfiltered it would come one time in ten."""
    drafter = ScriptedDrafter([2] * k)
    engine = engine_for(constant_bigram(log(FOUR_WORDS)), drafter, num_speculative_tokens=k, acceptance_rule=rule)
    params = [SamplingParams(seed=i, max_tokens=40, **FILTERS[name]) for i in range(10)]
    sequences = run(engine, [[0]] * 10, params)
    tokens = [token for sequence in sequences for token in sequence.output_token_ids]
    assert set(tokens) == {0, 1}
    assert sum(s.metrics.num_draft_tokens for s in sequences) > 300
    assert sum(s.metrics.num_accepted_tokens for s in sequences) == 0


def test_o07_filtered_frequencies():
    """20,000 tokens, fixed seeds: (0.7059, 0.2941); with other seeds 0.02 is exceeded once in 10^9."""
    drafter = ScriptedDrafter([2, 2, 2])
    engine = engine_for(
        constant_bigram(log(FOUR_WORDS)), drafter, num_speculative_tokens=3, max_num_seqs=250,
        acceptance_rule="rejection",
    )  # fmt: skip
    params = [SamplingParams(seed=i, max_tokens=80, min_p=0.3) for i in range(250)]
    tokens = [token for sequence in run(engine, [[0]] * 250, params) for token in sequence.output_token_ids]
    assert len(tokens) == 20_000
    assert abs(tokens.count(0) / 20_000 - 0.7059) < 0.02
    assert tokens.count(0) + tokens.count(1) == 20_000


@pytest.mark.parametrize("k", range(7))
def test_o08_the_minimum_masks_neither_one_row_more_nor_less(k: int):
    """One mask row too many gives five 3s, one too few gives three."""
    model = constant_bigram([0.0, 0.0, 5.0, 4.0])

    def decode(draft: list[int], min_tokens: int) -> Any:
        drafter = ScriptedDrafter(draft) if k else None
        engine = engine_for(model, drafter, num_speculative_tokens=k, eos_token_ids=(2,))
        return run(engine, [[1]], SamplingParams(temperature=0, min_tokens=min_tokens, max_tokens=10))[0]

    right = decode([3] * 8, 4)
    assert right.output_token_ids == [3, 3, 3, 3, 2]
    if k > 1:
        assert right.metrics.num_accepted_tokens >= 2
    early_end = decode([2, 3, 3, 3, 3, 3], 4)
    assert early_end.output_token_ids == [3, 3, 3, 3, 2]
    if k:
        assert early_end.metrics.num_target_passes >= 4, "an end token in the first slot was accepted"
    assert decode([3] * 8, 0).output_token_ids == [2]
    assert decode([2] * 8, 0).output_token_ids == [2]
