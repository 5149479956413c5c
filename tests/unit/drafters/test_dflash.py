"""DFlash in the engine: what it drafts is what training sees and what the paper's formula gives."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from foredraft import EngineConfig, SamplingParams, SpeculativeConfig
from foredraft.drafters import dflash, make_drafter
from foredraft.drafters.dflash import DFlashDrafter, DFlashTreeDrafter
from foredraft.engine import Engine
from foredraft.errors import IncompatibleDrafterError
from foredraft.heads.block_runner import BlockRunner
from foredraft.heads.dflash import DFlashHead, block_labels, block_loss, choose_anchors
from foredraft.heads.dflash_format import save_zlab
from foredraft.policy import FixedPolicy
from foredraft.testing import (
    RecordingDrafter,
    dflash_config,
    dflash_head,
    engine_for,
    hidden_states,
    reference,
    run,
    target_for,
)
from foredraft.types import Request
from foredraft.verify.tree import path_to

PROMPTS = ([7, 8, 9], [5, *range(20, 55)], [3, 5, 3, 5, 3], [11])
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def head(tiny: Any) -> DFlashHead:
    return dflash_head(dflash_config(tiny))


def engine_of(model: Any, head: DFlashHead, width: int = 1, **options: Any) -> Engine:
    target = target_for(model)
    runner, places = BlockRunner(head, target), head.config.block_size - 1
    drafter = DFlashDrafter(runner, 64, places) if width == 1 else DFlashTreeDrafter(runner, 64, places, width)
    return engine_for(target, RecordingDrafter(drafter), **{"num_speculative_tokens": 4, **options})


def in_training(model: Any, head: DFlashHead, text: list[int], count: int, start: int = 0) -> torch.Tensor:
    """The head's logits ``[count, draft vocabulary]`` of the first places behind a text."""
    tokens = torch.tensor([text])
    features = hidden_states(model, tokens, head.config.feature_layers)
    features[:, len(text) - 1 :] = 9.0  # unknown when the draft is made
    anchors = torch.tensor([[len(text) - 1 - start]])
    with torch.no_grad():
        out: torch.Tensor = head(
            features[:, start:], tokens[:, start:], anchors, model.get_input_embeddings().weight, model.lm_head.weight
        )
    return out[0, 0, :count]


def by_formula(model: Any, head: DFlashHead, text: list[int], count: int) -> torch.Tensor:
    """The same of a one-layer head, written out from the paper: no module of the package takes part."""
    w, num_heads, num_kv, dim = dict(head.state_dict()), 4, 2, 16

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w[name]

    def heads(x: torch.Tensor, name: str, count: int) -> torch.Tensor:
        return (x @ w[f"layers.0.self_attn.{name}.weight"].T).view(len(x), count, dim)

    def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None] / 10000.0 ** (torch.arange(0, dim, 2) / dim)
        pair = torch.complex(x[..., : dim // 2], x[..., dim // 2 :]) * torch.polar(torch.ones(()), angles)[:, None]
        return torch.cat([pair.real, pair.imag], -1)

    n, size = len(text) - 1, head.config.block_size
    states = hidden_states(model, torch.tensor([text]), head.config.feature_layers)[0, :n]
    f = norm(states @ w["fc.weight"].T, "hidden_norm.weight")
    h = model.get_input_embeddings().weight[[text[-1], *[head.config.mask_token_id] * (size - 1)]]
    x = norm(h, "layers.0.input_layernorm.weight")
    block, attention = torch.arange(n, n + size), "layers.0.self_attn."
    query = turned(norm(heads(x, "q_proj", num_heads), attention + "q_norm.weight"), block)
    both = torch.cat([f, x])
    key = turned(norm(heads(both, "k_proj", num_kv), attention + "k_norm.weight"), torch.arange(n + size))
    value = heads(both, "v_proj", num_kv)
    out = torch.stack(
        [
            torch.softmax(query[:, i] @ key[:, i // 2].T / dim**0.5, -1) @ value[:, i // 2]  # all of the block is seen
            for i in range(num_heads)
        ],
        1,
    )
    h = h + out.flatten(1) @ w[attention + "o_proj.weight"].T
    y = norm(h, "layers.0.post_attention_layernorm.weight")
    gate, up, down = (w[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    h = h + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
    said: torch.Tensor = norm(h, "norm.weight")[1 : count + 1] @ model.lm_head.weight.T
    return said


def check_chains(engine: Engine, model: Any, head: DFlashHead) -> int:
    """Assert that each draft is what training gives; returns how many there were."""
    recorder, checked = engine.drafter, 0
    assert isinstance(recorder, RecordingDrafter)
    for texts, draft in zip(recorder.texts, recorder.drafts, strict=True):
        for text, tokens, count in zip(texts, draft.token_ids.tolist(), draft.num_draft_tokens, strict=True):
            if count:
                best = in_training(model, head, text, count).argmax(-1)
                best = best if head.token_ids is None else head.token_ids[best]
                assert best.tolist() == tokens[:count]
                checked += 1
    return checked


def check_entries(engine: Engine, _: Any) -> None:
    """Committed entries are those of true states: no more than the text has but one, and the same as made anew."""
    drafter = engine.drafter.inner  # type: ignore[attr-defined]
    for sequence in engine.scheduler.running:
        if sequence.sequence_id in drafter.runner.slots:
            waiting = sum(map(len, drafter._waiting[sequence.sequence_id].parts))
            held = drafter.runner.slots.length(sequence.sequence_id)
            assert held + waiting <= len(sequence.token_ids) - 1


def test_the_formula_of_the_paper(tiny: Any, head: DFlashHead):
    for text, count in ((list(range(20, 31)), 8), ([3, 5], 1), ([9], 3)):
        expected = by_formula(tiny, head, text, count)
        assert torch.allclose(in_training(tiny, head, text, count), expected, atol=1e-3, rtol=1e-3)
    engine = engine_of(tiny, head)
    sequences = run(engine, [[3, 5, 4], *PROMPTS], GREEDY, after_step=check_entries)
    assert sequences[1].output_token_ids == reference(tiny, PROMPTS[0], GREEDY).token_ids
    assert check_chains(engine, tiny, head) > 20
    recorder = engine.drafter
    assert isinstance(recorder, RecordingDrafter)
    first = next(i for i, draft in enumerate(recorder.drafts) if draft.num_draft_tokens[0])
    guesses = by_formula(tiny, head, recorder.texts[first][0], 4).argmax(-1).tolist()
    assert recorder.drafts[first].token_ids[0].tolist() == guesses


@pytest.mark.parametrize(
    ("num_layers", "changes"),
    [
        (2, {"draft_vocab_size": 48, "has_embeddings": True, "feature_layers": (0, 1, 2)}),
        (
            2,
            {
                "is_causal": (True, False),
                "windows": (6, None),
                "embedding_scale": 3.0,
                "logit_scale": 0.5,
                "logit_cap": 3.0,
                "block_size": 4,
            },
        ),
    ],
)
def test_drafts_are_what_training_gives(tiny: Any, num_layers: int, changes: dict[str, Any]):
    """Positions, masks and scales of engine and training agree: every variant, in ragged batches."""
    head = dflash_head(dflash_config(tiny, num_layers, **changes), seed=2)
    engine = engine_of(tiny, head)
    sequences = run(engine, PROMPTS, GREEDY, after_step=check_entries)
    assert check_chains(engine, tiny, head) > 20
    assert [s.output_token_ids for s in sequences] == [reference(tiny, p, GREEDY).token_ids for p in PROMPTS]
    assert not engine.drafter.inner.runner.slots.num_open  # type: ignore[attr-defined]


def test_entries_are_those_of_true_states(tiny: Any, head: DFlashHead):
    """After steps that accepted and rejected, the cache holds what a fresh one holds, bit for bit but rounding."""
    engine = engine_of(tiny, head)
    request = engine.add_request(Request("a", list(PROMPTS[1]), GREEDY))
    for _ in range(8):
        engine.step()
    runner = engine.drafter.inner.runner  # type: ignore[attr-defined]
    length = runner.slots.length(request.sequence_id)
    assert len(PROMPTS[1]) < length < len(request.token_ids)
    states = hidden_states(tiny, torch.tensor([request.token_ids[:length]]), head.config.feature_layers)[0]
    runner.slots.open(-9)
    runner.add([(-9, states)])
    for held, fresh in zip(runner.slots.read(request.sequence_id), runner.slots.read(-9), strict=True):
        assert all(torch.allclose(ours, theirs, atol=1e-3) for ours, theirs in zip(held, fresh, strict=True))


def test_trees(tiny: Any, head: DFlashHead):
    """Nodes are among the likeliest of their place, given the text and nothing else."""
    engine = engine_of(tiny, head, width=3, num_speculative_tokens=12)
    sequences = run(engine, PROMPTS, GREEDY)
    assert [s.output_token_ids for s in sequences] == [reference(tiny, p, GREEDY).token_ids for p in PROMPTS]
    recorder, deepest = engine.drafter, 0
    assert isinstance(recorder, RecordingDrafter)
    for texts, draft in zip(recorder.texts[1:4], recorder.drafts[1:4], strict=True):
        for i, text in enumerate(texts):
            count = draft.num_draft_tokens[i]
            tokens, parents = draft.token_ids[i, :count].tolist(), draft.parents[i, :count].tolist()
            likeliest = in_training(tiny, head, text, 8).topk(3).indices.tolist()
            for node in range(count):
                path = path_to(node, parents)
                assert tokens[node] in likeliest[len(path) - 1]
                deepest = max(deepest, len(path))
    assert deepest > 3


def test_chunks_steps_without_a_draft_and_states_that_wait(
    tiny: Any, head: DFlashHead, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dflash, "MOST_WAITING", 3)
    engine = engine_of(tiny, head, max_num_batched_tokens=8)
    requests = [engine.add_request(Request(str(i), list(prompt), GREEDY)) for i, prompt in enumerate(PROMPTS)]
    number = 0
    while engine.has_unfinished_requests:
        engine.policy = FixedPolicy(4 if number % 3 else 0)
        engine.step()
        number += 1
    for prompt, sequence in zip(PROMPTS, requests, strict=True):
        assert sequence.output_token_ids == reference(tiny, prompt, GREEDY).token_ids
    assert check_chains(engine, tiny, head) > 10


def test_preempted_sequences_and_states_behind_a_gap(tiny: Any, head: DFlashHead):
    engine = engine_of(tiny, head)
    request = engine.add_request(Request("a", list(PROMPTS[1]), GREEDY))
    for _ in range(4):
        engine.step()
    engine.preempt("a")
    while engine.has_unfinished_requests:
        engine.step()
    assert request.output_token_ids == reference(tiny, PROMPTS[1], GREEDY).token_ids
    assert check_chains(engine, tiny, head) > 6
    inner = engine.drafter.inner  # type: ignore[attr-defined]
    given = inner.observe_features

    def from_five_on(sequence_id: int, token_ids: list[int], start: int, features: torch.Tensor) -> None:
        given(sequence_id, token_ids, max(start, 5), features[max(0, 5 - start) :])

    inner.observe_features = from_five_on
    (sequence,) = run(engine, [PROMPTS[1]], GREEDY)
    assert sequence.output_token_ids == reference(tiny, PROMPTS[1], GREEDY).token_ids
    text, draft = engine.drafter.texts[-6][0], engine.drafter.drafts[-6]  # type: ignore[attr-defined]
    tokens = draft.token_ids[0, : draft.num_draft_tokens[0]].tolist()
    assert tokens
    assert in_training(tiny, head, text, len(tokens), start=5).argmax(-1).tolist() == tokens


def test_bf16_with_native_kernels(tiny: Any, head: DFlashHead):
    """Where the packed kernels run: greedy output is that of plain decoding, and first guesses are those in float32."""
    for width in (1, 3):
        target = target_for(tiny, dtype=torch.bfloat16)
        runner = BlockRunner(head, target)
        drafter = DFlashDrafter(runner, 64, 8) if width == 1 else DFlashTreeDrafter(runner, 64, 8, width)
        recorder = RecordingDrafter(drafter)
        drafted = run(engine_for(target, recorder, num_speculative_tokens=6), PROMPTS, GREEDY)
        plain = run(engine_for(target_for(tiny, dtype=torch.bfloat16)), PROMPTS, GREEDY)
        if target.native is not None:
            assert [s.output_token_ids for s in drafted] == [s.output_token_ids for s in plain]
        if width == 1:
            guessed = [
                (in_training(tiny, head, text, count).argmax(-1)[:2].tolist(), draft.token_ids[i, :2].tolist())
                for texts, draft in zip(recorder.texts[1:4], recorder.drafts[1:4], strict=True)
                for i, (text, count) in enumerate(zip(texts, draft.num_draft_tokens, strict=True))
            ]
            right = sum(ours == theirs for ours, theirs in guessed)
            assert right >= len(guessed) - 3, "near-ties apart"


def test_built_by_name_and_no_further_than_a_block(
    tiny: Any, head: DFlashHead, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    save_zlab(head, tmp_path, 2)
    config = SpeculativeConfig(method="dflash", model=str(tmp_path), num_speculative_tokens=12)
    with caplog.at_level(logging.WARNING):
        target = target_for(tiny)
        drafter = make_drafter(config, EngineConfig(model="tiny", dtype="float32"), target, None)
    assert "num_speculative_tokens=12 is above the 8 tokens that" in caplog.text
    assert drafter.feature_layers == (1, 2)
    engine = engine_for(target, RecordingDrafter(drafter), num_speculative_tokens=12)
    sequences = run(engine, PROMPTS, GREEDY)
    assert [s.output_token_ids for s in sequences] == [reference(tiny, p, GREEDY).token_ids for p in PROMPTS]
    assert max(max(draft.num_draft_tokens) for draft in engine.drafter.drafts) == 8  # type: ignore[attr-defined]


def test_a_window_that_looks_ahead_is_refused_unless_it_holds_all(tiny: Any):
    head = dflash_head(dflash_config(tiny, windows=(100,)))
    with pytest.raises(IncompatibleDrafterError, match="100 places back, and texts may have 256.*max_model_len to 91"):
        BlockRunner(head, target_for(tiny))
    BlockRunner(head, target_for(tiny, max_model_len=91))


def test_anchors_labels_and_weights():
    labels = torch.arange(40).view(2, 20).clone()
    labels[0, :6] = labels[1, 12:] = -100
    anchors = choose_anchors(labels != -100, 9, torch.Generator().manual_seed(0))
    assert anchors.shape == (2, 9)
    assert set(anchors[0].tolist()) <= set(range(5, 19))
    assert set(anchors[1].tolist()) <= set(range(11))
    assert (anchors.diff() >= 0).all()
    behind = block_labels(labels, torch.tensor([[5, 18], [9, 0]]), 4)
    assert behind.tolist() == [[[6, 7, 8], [19, -100, -100]], [[30, 31, -100], [21, 22, 23]]]
    logits = torch.zeros(1, 1, 3, 8)
    loss = block_loss(logits, torch.tensor([[[1, 2, -100]]]), gamma=4.0)
    assert float(loss) == pytest.approx((1 + 2.718281828 ** (-1 / 4)) / 2 * torch.tensor(8.0).log().item(), rel=1e-5)
    none_learnt = choose_anchors(torch.zeros(1, 20, dtype=torch.bool), 3)
    assert none_learnt.tolist() == [[0, 0, 0]]


def test_up_to_the_last_position(tiny: Any, head: DFlashHead):
    """Blocks reach past the positions that the model has; texts do not."""
    params = SamplingParams(temperature=0.0, max_tokens=None)
    target = target_for(tiny, max_model_len=20)
    recorder = RecordingDrafter(DFlashDrafter(BlockRunner(head, target), 64, 8))
    drafted = run(engine_for(target, recorder, num_speculative_tokens=8), PROMPTS[:1], params)
    plain = run(engine_for(target_for(tiny, max_model_len=20)), PROMPTS[:1], params)
    assert [s.output_token_ids for s in drafted] == [s.output_token_ids for s in plain]
    assert len(drafted[0].token_ids) == 20
    assert {1, 8} <= {draft.num_draft_tokens[0] for draft in recorder.drafts}
