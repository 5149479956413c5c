"""MET and BAT: what is counted as accepted, and rows of a batch that differ in the length of their drafts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from foredraft import SamplingParams, transformers_generate
from foredraft.drafters.ngram import NGramDrafter
from foredraft.measure import metrics as formulas
from foredraft.testing import (
    RecordingDrafter,
    ScriptedDrafter,
    check_caches,
    engine_for,
    reference,
    run,
    scripted_model,
    tiny_model,
)
from foredraft.types import Request

SCRIPT, PROMPT = list(range(10, 30)), [5, 6, 7]
ROUNDS = [[True, False, True, True], [True, True, True, True], [False, True, True, True]]
"""Which tokens of a draft are those that the script has there."""


def draft_with_gaps(text: list[int]) -> list[int]:
    """The draft of a round; the rounds begin after 0, 2 and 7 tokens of output."""
    done = len(text) - len(PROMPT)
    matches = ROUNDS[{0: 0, 2: 1, 7: 2}[done]]
    return [token if right else 60 for token, right in zip(SCRIPT[done:], matches, strict=False)]


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("auto", {"temperature": 0.0}),
        ("coupled", {"seed": 1}),
        ("rejection", {"seed": 1}),
        ("block", {"seed": 1}),
        ("match", {"seed": 1}),
    ],
)
def test_o35_a_match_behind_the_first_mismatch_is_not_accepted(rule: str, options: dict[str, Any]):
    """Three drafts of four with 1, 4 and 0 leading matches, and 3, 4 and 3 matches place by place."""
    drafter = RecordingDrafter(ScriptedDrafter(draft_with_gaps))
    engine = engine_for(scripted_model(SCRIPT, 3), drafter, num_speculative_tokens=4, acceptance_rule=rule)
    sequence = engine.add_request(Request("one", PROMPT, SamplingParams(max_tokens=20, **options)))
    emitted = [len(engine.step()[0].token_ids) for _ in ROUNDS]
    per_place = [
        [token == SCRIPT[start + i] for i, token in enumerate(draft)]
        for start, draft in zip((0, 2, 7), drafter.proposed(sequence.sequence_id), strict=True)
    ]
    assert per_place == ROUNDS, "the matches behind a mismatch were to be there"
    assert emitted == [2, 5, 1]
    assert sequence.output_token_ids == SCRIPT[:8]
    counted = sequence.metrics
    assert (counted.num_accepted_tokens, counted.num_draft_tokens, counted.num_emitted_tokens) == (5, 12, 8)
    assert counted.num_drafts == counted.num_target_passes == 3
    assert counted.acceptance_rate == pytest.approx(5 / 12)
    assert counted.tokens_per_target_pass == pytest.approx(8 / 3)
    assert counted.acceptance_per_position == pytest.approx([2 / 3, 1 / 3, 1 / 3, 1 / 3])


def test_o35_the_formulas_agree_with_the_engine():
    """The benchmark computes the same from drafted and emitted tokens of each pass."""
    accepted = [formulas.common_prefix_len(matches, [True] * 4) for matches in ROUNDS]
    assert accepted == formulas.accepted_per_pass([2, 5, 1]) == [1, 4, 0]
    assert [sum(matches) for matches in ROUNDS] == [3, 4, 3], "counted place by place it would be more"
    assert formulas.acceptance_rate(accepted, [4, 4, 4]) == pytest.approx(5 / 12)
    assert formulas.tokens_per_target_pass(8, 3) == pytest.approx(8 / 3)
    assert formulas.acceptance_per_position(accepted, [4, 4, 4]) == pytest.approx([2 / 3, 1 / 3, 1 / 3, 1 / 3])


ROWS = [[7, 8, 9, 10, 7, 8, 9, 10, 7], [1, 2, 3, 4, 5], [*range(20, 31), 40, 41, 40]]
"""Prompt lookup drafts four tokens, none and two."""
MORE_ROWS = [*ROWS, [11], [3, 5, 3, 5, 3]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=30)


@pytest.fixture(scope="module")
def model() -> Any:
    """It falls into loops and out of them again, so drafts are partly right."""
    return tiny_model(3, context=0.01)


@pytest.fixture(scope="module")
def alone(model: Any) -> list[list[int]]:
    """What the reference loop says of each row."""
    return [reference(model, row, GREEDY).token_ids for row in MORE_ROWS]


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("num_draft_tokens", [1, 4, 7])
def test_o35_emitted_is_accepted_plus_rounds(model: Any, num_draft_tokens: int, seed: int | None):
    """On any run that no stop cuts short; accepted and emitted at each place add up as well."""
    engine = engine_for(model, NGramDrafter(1, 4), num_speculative_tokens=num_draft_tokens)
    params = SamplingParams(temperature=0.0 if seed is None else 0.3, seed=seed, max_tokens=30)
    sequences = run(engine, MORE_ROWS, params)
    for sequence in sequences:
        counted = sequence.metrics
        assert counted.num_emitted_tokens == counted.num_accepted_tokens + counted.num_target_passes == 30
        assert sum(counted.accepted_per_position) == counted.num_accepted_tokens
        assert sum(counted.drafted_per_position) == counted.num_draft_tokens
        assert counted.accepted_per_position == sorted(counted.accepted_per_position, reverse=True)
    accepted = sum(sequence.metrics.num_accepted_tokens for sequence in sequences)
    assert 0 < accepted < sum(sequence.metrics.num_draft_tokens for sequence in sequences)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_o33_a_row_is_the_same_in_any_order(model: Any, alone: list[list[int]], order: tuple[int, ...]):
    """The first step has drafts of 4, 0 and 2 tokens side by side."""
    drafter = RecordingDrafter(NGramDrafter(1, 4))
    engine = engine_for(model, drafter)
    steps = []

    def after_step(engine: Any, outputs: Any) -> None:
        check_caches(engine)
        steps.append([len(out.token_ids) for out in outputs])

    sequences = run(engine, [ROWS[i] for i in order], GREEDY, after_step=after_step)
    for index, sequence in zip(order, sequences, strict=True):
        assert sequence.output_token_ids == alone[index]
    assert drafter.widths[0] == [[4, 0, 2][i] for i in order], "the drafts of the first step were to be unequal"
    assert any(len(set(emitted)) > 1 for emitted in steps), "the rows never went on by unequal steps"


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_o33_a_row_is_the_same_in_batches_of_any_size(model: Any, alone: list[list[int]], size: int):
    drafter = RecordingDrafter(NGramDrafter(1, 4))
    sequences = run(engine_for(model, drafter), MORE_ROWS[:size], GREEDY)
    assert [sequence.output_token_ids for sequence in sequences] == alone[:size]
    if size > 1:
        assert any(len(set(widths)) > 1 and 0 in widths for widths in drafter.widths)


@pytest.mark.parametrize("early", [0, 1, 2])
@pytest.mark.parametrize("max_tokens", [1, 3])
def test_o33_a_row_that_finishes_early_leaves_the_others_alone(
    model: Any, alone: list[list[int]], early: int, max_tokens: int
):
    params = [SamplingParams(temperature=0.0, max_tokens=max_tokens if i == early else 30) for i in range(3)]
    drafter = RecordingDrafter(NGramDrafter(1, 4))
    sequences = run(engine_for(model, drafter), ROWS, params)
    for i, sequence in enumerate(sequences):
        assert sequence.output_token_ids == alone[i][: params[i].max_tokens]
    sizes = [len(widths) for widths in drafter.widths]
    assert sizes[0] == 3
    assert 2 in sizes, "the others were to go on in a smaller batch"


def test_o33_a_row_that_joins_late_leaves_the_others_alone(model: Any, alone: list[list[int]]):
    """Two places for five rows: each row that ends makes room for the next."""
    drafter = RecordingDrafter(NGramDrafter(1, 4))
    sequences = run(engine_for(model, drafter, max_num_seqs=2), MORE_ROWS, GREEDY)
    assert [sequence.output_token_ids for sequence in sequences] == alone
    pairs = [tuple(row.sequence_id for row in rows) for rows in drafter.rows]
    assert len(set(pairs)) > 3, "the rows of the batch were to change"


@pytest.mark.parametrize("rule", ["auto", "rejection", "block", "match"])
def test_o33_sampling_rows_are_those_of_a_run_alone(model: Any, rule: str):
    """A seed keys all noise, so a sampling row too is the same alone, beside a greedy one and in any order."""
    params = [
        SamplingParams(temperature=0.4, seed=1, max_tokens=20),
        SamplingParams(temperature=0.0, max_tokens=20),
        SamplingParams(temperature=0.8, top_k=4, seed=2, max_tokens=20),
    ]

    def outputs(order: tuple[int, ...]) -> dict[int, list[int]]:
        drafter = RecordingDrafter(NGramDrafter(1, 4))
        engine = engine_for(model, drafter, acceptance_rule=rule)
        sequences = run(engine, [ROWS[i] for i in order], [params[i] for i in order])
        if len(order) > 1:
            assert any(len(set(widths)) > 1 for widths in drafter.widths)
        rejected = [s.metrics.num_draft_tokens - s.metrics.num_accepted_tokens for s in sequences]
        assert sum(rejected) > 0
        return {i: sequence.output_token_ids for i, sequence in zip(order, sequences, strict=True)}

    solo = {i: outputs((i,))[i] for i in range(3)}
    for order in itertools.permutations(range(3)):
        assert outputs(order) == solo


def test_o33_left_padding_is_taken_off(model: Any, alone: list[list[int]]):
    """Through transformers: prompts of 9, 5 and 14 tokens, padded left to 14."""
    width = max(map(len, ROWS))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in ROWS])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ROWS])
    assert mask.sum(1).tolist() == [9, 5, 14]
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        custom_generate=transformers_generate,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
        max_new_tokens=30,
        do_sample=False,
        pad_token_id=0,
    )
    assert out[:, width:].tolist() == alone[:3]
