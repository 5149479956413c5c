"""EAGLE-3 in the engine: what it drafts is what training sees, whatever came before; and it never misses a state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft import EngineConfig, SamplingParams, SpeculativeConfig
from foredraft.drafters import DraftRow, head_cache, make_drafter
from foredraft.drafters.recurrent_head import HeadDrafter, make_head_drafter
from foredraft.engine import Engine
from foredraft.errors import IncompatibleDrafterError
from foredraft.heads.eagle3 import Eagle3Head
from foredraft.heads.eagle3_format import save_eagle3
from foredraft.heads.runner import HeadRunner
from foredraft.policy import FixedPolicy
from foredraft.testing import (
    RecordingDrafter,
    check_chains,
    draft_logits,
    eagle3_config,
    eagle3_head,
    engine_for,
    reference,
    run,
    target_for,
    tiny_mamba,
)
from foredraft.types import Draft, Request, node_depths
from foredraft.verify.tree import path_to

PROMPTS = ([7, 8, 9], [5, *range(20, 45)], [3, 5, 3, 5, 3], [11])
GREEDY = SamplingParams(temperature=0.0, max_tokens=14)


@pytest.fixture(scope="module")
def head(tiny: Any) -> Eagle3Head:
    return eagle3_head(eagle3_config(tiny))


def engine_of(
    model: Any, head: Eagle3Head, width: int = 1, depth: int = 3, beam: int | None = None, **options: Any
) -> Engine:
    target = target_for(model)
    runner = HeadRunner(head, head.config.layer, target)
    shape = width, depth, beam
    drafter = make_head_drafter(runner, head.config.feature_layers, target.vocab_size, head.token_ids, *shape)
    return engine_for(target, RecordingDrafter(drafter), **{"num_speculative_tokens": 4, **options})


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"norm_before_residual": True, "norm_before_fc": True},
        {"fc_norm": True, "norm_output": True, "has_embeddings": True},
        {"feature_layers": (0, 2), "draft_vocab_size": 64},
    ],
)
def test_drafts_are_what_unrolling_gives(tiny: Any, flags: dict[str, Any]):
    """Positions, offsets and norms of engine and training agree: every variant, in ragged batches."""
    head = eagle3_head(eagle3_config(tiny, **flags), seed=2)
    engine = engine_of(tiny, head)
    sequences = run(engine, PROMPTS, GREEDY)
    assert check_chains(engine.drafter, tiny, head) > 20
    assert [s.output_token_ids for s in sequences] == [reference(tiny, p, GREEDY).token_ids for p in PROMPTS]


def test_a_layer_of_the_qwen3_kind_and_a_second_layer(tiny: Any):
    from transformers import Qwen3Config

    base = eagle3_config(tiny)
    options = {**base.layer.to_dict(), "head_dim": 16, "num_hidden_layers": 2}
    own = {k: v for k, v in options.items() if k not in ("model_type", "mlp_bias")}  # Qwen3 has no mlp_bias
    head = eagle3_head(replace(base, layer=Qwen3Config(**own)))
    engine = engine_of(tiny, head)
    run(engine, PROMPTS[:2], GREEDY)
    assert check_chains(engine.drafter, tiny, head) > 10


class Oracle(HeadDrafter):
    """Proposes what the target will say, whatever the head guesses; the guesses are kept in ``guesses``."""

    def __init__(self, drafter: HeadDrafter, text: list[int], num_right: int):
        vars(self).update(vars(drafter))
        self.text, self.num_right = text, num_right
        self.guesses: list[tuple[list[int], list[int]]] = []

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        (row,), draft = rows, super().propose(rows)
        length, count = len(row.token_ids), draft.num_draft_tokens[0]
        if count:
            self.guesses.append((list(row.token_ids), draft.token_ids[0, :count].tolist()))
        right = self.text[length : length + min(count, self.num_right)]
        draft.token_ids[0, : len(right)] = torch.tensor(right, dtype=torch.int64)
        return draft


@pytest.mark.parametrize("num_right", [1, 4])
def test_a_guessed_state_never_stays(tiny: Any, head: Eagle3Head, num_right: int):
    """Drafts that are accepted are read again with the target's states: the next guess is that of a fresh head."""
    prompt, params = list(PROMPTS[1]), replace(GREEDY, max_tokens=30)
    engine = engine_of(tiny, head)
    inner = engine.drafter.inner  # type: ignore[attr-defined]
    oracle = Oracle(inner, [*prompt, *reference(tiny, prompt, params).token_ids], num_right)
    engine.drafter = oracle
    (sequence,) = run(engine, [prompt], params)
    assert sequence.metrics.num_accepted_tokens >= 29 - len(oracle.guesses) - 1
    for text, tokens in oracle.guesses:
        best = draft_logits(tiny, head, text, tokens[:-1]).argmax(-1)
        assert head.token_ids[best].tolist() == tokens
    assert len(oracle.guesses) > 4


@pytest.mark.parametrize(("width", "beam"), [(2, None), (3, None), (3, 1), (3, 2)])
def test_a_tree_is_what_unrolling_gives(tiny: Any, head: Eagle3Head, width: int, beam: int | None):
    """Each node is among the likeliest that unrolling finds behind its path; nodes are fed once, among their kin. With
    a beam so many nodes of a level have children."""
    engine = engine_of(tiny, head, width, 3, beam, num_speculative_tokens=9)
    recorder = engine.drafter
    assert isinstance(recorder, RecordingDrafter)
    sequences = run(engine, PROMPTS, GREEDY)
    assert [s.output_token_ids for s in sequences] == [reference(tiny, p, GREEDY).token_ids for p in PROMPTS]
    deepest = 0
    for texts, draft in zip(recorder.texts[1:5], recorder.drafts[1:5], strict=True):
        for i, text in enumerate(texts):
            count = draft.num_draft_tokens[i]
            tokens, parents = draft.token_ids[i, :count].tolist(), draft.parents[i, :count].tolist()
            for node in range(count):
                path = [tokens[at] for at in path_to(node, parents)]
                likeliest = draft_logits(tiny, head, text, path[:-1])[-1].topk(width).indices
                assert path[-1] in head.token_ids[likeliest].tolist()
                deepest = max(deepest, len(path))
            depths = node_depths(parents)
            branching = Counter(depths[parent] for parent in set(parents) - {-1})
            assert max(branching.values(), default=0) <= (beam or width)
    assert deepest == 3


@pytest.mark.parametrize(("rule", "temperature"), [("coupled", 0.8), ("rejection", 0.8), ("auto", 0.0)])
@pytest.mark.parametrize("width", [1, 2])
def test_a_small_vocabulary_is_drawn_from_as_a_part_of_the_large_one(
    tiny: Any, rule: str, temperature: float, width: int
):
    """A bias of zero changes nothing but that the whole vocabulary is looked at: same drafts, same laws."""
    head = eagle3_head(eagle3_config(tiny, draft_vocab_size=64))
    drafts = []
    for bias in (None, {3: 0.0}):
        engine = engine_of(tiny, head, width, acceptance_rule=rule)
        params = SamplingParams(temperature=temperature, top_p=0.9, seed=5, max_tokens=10, logit_bias=bias)
        run(engine, PROMPTS, params)
        assert isinstance(engine.drafter, RecordingDrafter)
        drafts.append([draft for draft in engine.drafter.drafts if any(draft.num_draft_tokens)])
    assert len(drafts[0]) == len(drafts[1]) > 2
    for narrow, wide in zip(*drafts, strict=True):
        assert torch.equal(narrow.token_ids, wide.token_ids)
        if narrow.probs is not None and wide.probs is not None:
            torch.testing.assert_close(narrow.probs, wide.probs)
            assert set(narrow.probs.nonzero()[:, -1].tolist()) <= set(head.token_ids.tolist())


def test_prompts_in_chunks_and_steps_without_a_draft(tiny: Any, head: Eagle3Head):
    """O38: a row that was not drafted for catches up; a prompt of several chunks loses no state."""
    engine = engine_of(tiny, head, max_num_batched_tokens=8)
    for width in (0, 3, 0, 0, 4):
        engine.policy = FixedPolicy(width)
        requests = [engine.add_request(Request(f"{width}-{i}", list(p), GREEDY)) for i, p in enumerate(PROMPTS)]
        for number in range(6):
            engine.policy = FixedPolicy(width if number % 3 else 0)
            engine.step()
        while engine.has_unfinished_requests:
            engine.step()
        for prompt, sequence in zip(PROMPTS, requests, strict=True):
            assert sequence.output_token_ids == reference(tiny, prompt, GREEDY).token_ids
    assert check_chains(engine.drafter, tiny, head) > 10
    inner = engine.drafter.inner  # type: ignore[attr-defined]
    assert not inner.cache.runner.slots.num_open


def test_many_states_that_wait_are_fed(tiny: Any, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(head_cache, "MOST_WAITING", 3)
    monkeypatch.setattr(head_cache, "CHUNK", 5)
    engine = engine_of(tiny, head)
    engine.policy = FixedPolicy(0)
    engine.add_request(Request("a", list(PROMPTS[1]), GREEDY))
    for _ in range(6):
        engine.step()
    inner = engine.drafter.inner  # type: ignore[attr-defined]
    (waiting,) = inner.cache._waiting.values()
    assert 1 <= waiting.count <= 4
    engine.policy = FixedPolicy(4)
    while engine.has_unfinished_requests:
        engine.step()
    assert check_chains(engine.drafter, tiny, head) > 3


def test_states_behind_a_gap_begin_a_new_memory(tiny: Any, head: Eagle3Head):
    """A cache that begins with a prefix computed for another sequence brings no states of it; drafts go on."""
    engine = engine_of(tiny, head)
    inner = engine.drafter.inner  # type: ignore[attr-defined]
    given = inner.observe_features

    def from_five_on(sequence_id: int, token_ids: list[int], start: int, features: torch.Tensor) -> None:
        given(sequence_id, token_ids, max(start, 5), features[max(0, 5 - start) :])

    inner.observe_features = from_five_on
    (sequence,) = run(engine, [PROMPTS[1]], GREEDY)
    assert sequence.output_token_ids == reference(tiny, PROMPTS[1], GREEDY).token_ids
    assert sequence.metrics.num_drafts > 5


def test_built_by_name_and_mixed_with_another_source(tiny: Any, head: Eagle3Head, tmp_path: Path):
    save_eagle3(head, tmp_path, {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]})
    for method in ("eagle3", "ngram+eagle3"):
        target = target_for(tiny)
        config = SpeculativeConfig(method=method, model=str(tmp_path), num_speculative_tokens=3)
        drafter = make_drafter(config, EngineConfig(model="tiny", dtype="float32"), target, None)
        assert drafter.feature_layers == (0, 1, 2)
        engine = engine_for(target, RecordingDrafter(drafter), num_speculative_tokens=3)
        sequences = run(engine, PROMPTS, GREEDY)
        assert [s.output_token_ids for s in sequences] == [reference(tiny, p, GREEDY).token_ids for p in PROMPTS]
        if method == "eagle3":
            assert check_chains(engine.drafter, tiny, head) > 10


def test_bf16_with_native_kernels(tiny: Any, head: Eagle3Head):
    """Chains and trees in bf16, where the packed kernels run: greedy output is that of plain decoding."""
    for width in (1, 3):
        target = target_for(tiny, dtype=torch.bfloat16)
        runner = HeadRunner(head, head.config.layer, target)
        drafter = make_head_drafter(runner, (0, 1, 2), 64, head.token_ids, width, 3)
        recorder = RecordingDrafter(drafter)
        drafted = run(engine_for(target, recorder, num_speculative_tokens=6), PROMPTS, GREEDY)
        plain = run(engine_for(target_for(tiny, dtype=torch.bfloat16)), PROMPTS, GREEDY)
        if target.native is not None:
            assert [s.output_token_ids for s in drafted] == [s.output_token_ids for s in plain]
        right = total = 0
        for text, draft in zip(recorder.texts[1], [recorder.drafts[1]] * len(PROMPTS), strict=True):
            best = head.token_ids[draft_logits(tiny, head, text, []).argmax(-1)].tolist()
            right += best[0] in draft.token_ids[recorder.texts[1].index(text), :width].tolist()
            total += 1
        assert right >= total - 1, "first guesses in bf16 are those in float32, but for a near-tie"


def test_refused_where_states_are_not_to_be_had(tiny: Any, head: Eagle3Head):
    class Wanting(HeadDrafter):
        def __init__(self) -> None:
            self.feature_layers = (1,)

    with pytest.raises(IncompatibleDrafterError, match="Wanting needs hidden states of the target.*Mamba2"):
        engine_for(target_for(tiny_mamba(), packed=False), Wanting())


def test_preempted_sequences_and_reused_prefixes(tiny: Any, head: Eagle3Head):
    """A preempted row is fed anew and drafts as ever; one that begins on another's cache lacks states, and drafts."""
    engine = engine_of(tiny, head)
    request = engine.add_request(Request("a", list(PROMPTS[1]), GREEDY))
    for _ in range(4):
        engine.step()
    engine.preempt("a")
    while engine.has_unfinished_requests:
        engine.step()
    assert request.output_token_ids == reference(tiny, PROMPTS[1], GREEDY).token_ids
    assert check_chains(engine.drafter, tiny, head) > 6
    (again,) = run(engine, [[*PROMPTS[1], 9]], GREEDY)
    assert again.output_token_ids == reference(tiny, [*PROMPTS[1], 9], GREEDY).token_ids
    assert again.metrics.num_drafts > 5
