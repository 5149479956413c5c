"""LP, MET: log-probabilities are the target's, and counters count the leading run only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foredraft import SamplingParams
from foredraft.drafters.base import chain_draft
from foredraft.drafters.draft_model import DraftModelDrafter
from foredraft.engine.delivery import deliver
from foredraft.testing import ScriptedDrafter, constant_bigram, engine_for, reference, run, target_for
from foredraft.types import Request, Verdict
from foredraft.verify import match

PROBS = torch.tensor([0.60, 0.25, 0.10, 0.05])


def test_o28_logprobs_of_accepted_recovered_and_bonus_tokens():
    """The drafter is right, right and wrong, or right once: all three kinds of places occur."""
    scripts = ([0], [0, 0, 1, 0], [1, 0], [])
    drafter = ScriptedDrafter(lambda text: scripts[len(text) % 4])
    engine = engine_for(constant_bigram(PROBS.log().tolist()), drafter, num_speculative_tokens=4)
    kinds = set()

    def after_step(_: Any, outputs: Any) -> None:
        (out,) = outputs
        accepted, wanted = len(out.token_ids) - 1, len(scripts[(text_len := texts[-1]) % 4])
        texts.append(text_len + len(out.token_ids))
        kinds.update({"accepted"} if accepted else set())
        kinds.add("bonus" if accepted == wanted else "recovered")

    texts = [1]
    (sequence,) = run(engine, [[1]], SamplingParams(temperature=0, max_tokens=24, logprobs=2), after_step=after_step)
    assert kinds == {"accepted", "recovered", "bonus"}
    assert len(sequence.logprobs) == len(sequence.output_token_ids) == 24
    for entry in sequence.logprobs:
        assert list(entry) == [0, 1]
        assert [entry[0].logprob, entry[1].logprob] == pytest.approx([-0.5108, -1.3863], abs=1e-4)
        assert [entry[0].rank, entry[1].rank] == [1, 2]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"seed": 3, "top_k": 5}], ids=["greedy", "sampled"])
def test_o28_logprobs_are_those_of_plain_decoding(tiny: Any, tiny_draft: Any, sampling: dict[str, Any]):
    """From the unfiltered distribution of a full pass over the text, within 1e-4, one per token."""
    params = SamplingParams(**sampling, max_tokens=30, logprobs=3)
    engine = engine_for(tiny, DraftModelDrafter(target_for(tiny_draft), 64), num_speculative_tokens=4)
    (sequence,) = run(engine, [[1, 2, 3]], params)
    expected = reference(tiny, [1, 2, 3], params)
    assert sequence.output_token_ids == expected.token_ids
    assert len(sequence.logprobs) == 30
    for entry, token, logprobs in zip(sequence.logprobs, expected.token_ids, expected.logprobs, strict=True):
        assert next(iter(entry)) == token
        assert set(logprobs.topk(3).indices.tolist()) <= set(entry)
        for other, value in entry.items():
            assert value.logprob == pytest.approx(float(logprobs[other]), abs=1e-4)
            assert value.rank == int((logprobs > logprobs[other]).sum()) + 1
    assert 0 < sequence.metrics.num_accepted_tokens < sequence.metrics.num_draft_tokens


def test_o35_a_match_behind_the_first_mismatch_counts_nowhere():
    """Three verify results of width 4 as matches per place: 1, 4 and 0 are accepted, 5 of 12."""
    matches = ([1, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1])
    engine = engine_for(constant_bigram([1.0] * 12), ScriptedDrafter([1]), num_speculative_tokens=4)
    sequence = engine.add_request(Request("a", [0], SamplingParams(temperature=0, max_tokens=50)))
    for row in matches:
        target_ids = torch.tensor([[4, 5, 6, 7, 8]])
        draft_ids = torch.tensor([[4 + i if right else 9 for i, right in enumerate(row)]])
        count = int(match.count_matches(draft_ids, torch.tensor([4]), target_ids))
        verdict = Verdict(target_ids[0, : count + 1].tolist(), list(range(count)), count == 4)
        deliver([sequence], chain_draft(draft_ids.tolist()), [verdict], torch.zeros(5, 12))
    metrics = sequence.metrics
    assert metrics.num_accepted_tokens == 5
    assert metrics.num_draft_tokens == 12
    assert metrics.num_emitted_tokens == len(sequence.output_token_ids) == 8
    assert (metrics.num_target_passes, metrics.num_drafts) == (3, 3)
    assert metrics.acceptance_rate == pytest.approx(5 / 12)
    assert metrics.tokens_per_target_pass == pytest.approx(8 / 3)
    assert metrics.acceptance_per_position == pytest.approx([2 / 3, 1 / 3, 1 / 3, 1 / 3])


def test_o35_emitted_is_accepted_plus_rounds_on_any_run(tiny: Any, tiny_draft: Any):
    engine = engine_for(tiny, DraftModelDrafter(target_for(tiny_draft), 64), num_speculative_tokens=4)
    for seed in range(3):
        for sequence in run(engine, [[1, 2, 3], [10]], SamplingParams(seed=seed, max_tokens=37)):
            metrics = sequence.metrics
            assert metrics.num_emitted_tokens == 37
            assert metrics.num_emitted_tokens == metrics.num_accepted_tokens + metrics.num_target_passes
            assert sum(metrics.accepted_per_position) == metrics.num_accepted_tokens > 0
