"""NG: which of several places prompt lookup copies from, with the drafter made from its options."""

from __future__ import annotations

from typing import Any

from foredraft import SamplingParams
from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters import Drafter, DraftRow, make_drafter
from foredraft.sampling import SamplingRow
from foredraft.testing import RecordingDrafter, engine_for, reference, run

HISTORY = [1, 2, 3, 9, 5, 3, 8, 1, 2, 3]
THREE_PLACES = [7, 1, 2, 3, 4, 7, 5, 6, 8, 9, 7, 0, 7]
"""7 was followed by [1, 2, ...], [5, 6, ...] and, two tokens from the end, [0, 7]."""


def lookup(shortest: int, longest: int) -> Drafter:
    """Made as the engine makes it, so that the options go all the way."""
    config = SpeculativeConfig(method="ngram", prompt_lookup_min=shortest, prompt_lookup_max=longest)
    target: Any = None
    return make_drafter(config, EngineConfig(model="none"), target, None)


def proposed(text: list[int], shortest: int, longest: int, num_tokens: int) -> list[int]:
    row = DraftRow(0, text, num_tokens, 0, "greedy", lambda _: SamplingRow(SamplingParams(temperature=0.0)))
    draft = lookup(shortest, longest).propose([row])
    tokens: list[int] = draft.token_ids[0, : draft.num_draft_tokens[0]].tolist()
    return tokens


def test_o24_the_longest_length_of_the_options_reaches_the_engine(tiny: Any):
    """The first draft of a run copies behind [1, 2, 3]; with a longest length of 1, behind the last 3 alone."""
    first = {}
    for longest in (1, 3):
        drafter = RecordingDrafter(lookup(1, longest))
        params = SamplingParams(temperature=0.0, max_tokens=8)
        (sequence,) = run(engine_for(tiny, drafter, num_speculative_tokens=2), [HISTORY], params)
        assert sequence.output_token_ids == reference(tiny, HISTORY, params).token_ids
        first[longest] = drafter.proposed(sequence.sequence_id)[0]
    assert first == {1: [8, 1], 3: [9, 5]}


def test_o24_the_most_recent_place_is_taken():
    assert proposed(THREE_PLACES, 1, 1, 2) == [0, 7]


def test_o24_where_the_latest_place_is_too_short_the_earliest_is_taken():
    """The last place has two tokens left and four are asked for."""
    assert proposed(THREE_PLACES, 1, 1, 4) == [1, 2, 3, 4]


def test_o24_where_no_continuation_fits_the_earliest_place_is_taken():
    """Two places of 4, three tokens from the end and one; five are asked for."""
    assert proposed([4, 1, 4, 4], 1, 1, 5) == [1, 4, 4]
