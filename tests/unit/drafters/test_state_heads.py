"""EAGLE-1, MTP and the MLP speculator in the engine: what they draft is what training sees, whatever came before."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft import EngineConfig, SamplingParams, SpeculativeConfig
from foredraft.drafters import Drafter, DraftRow, make_drafter
from foredraft.drafters.mlp import MlpDrafter, MlpTreeDrafter
from foredraft.drafters.recurrent_head import make_head_drafter
from foredraft.engine import Engine
from foredraft.heads.eagle_format import save_eagle
from foredraft.heads.mlp import MlpSpeculator, save_mlp
from foredraft.heads.mtp_format import save_mtp
from foredraft.heads.runner import HeadRunner
from foredraft.policy import FixedPolicy
from foredraft.testing import (
    RecordingDrafter,
    check_chains,
    draft_logits,
    eagle_head,
    engine_for,
    mlp_speculator,
    mtp_head,
    reference,
    run,
    target_for,
)
from foredraft.types import Draft, Request
from foredraft.verify.tree import path_to

PROMPTS = ([7, 8, 9], [5, *range(20, 45)], [3, 5, 3, 5, 3], [11])
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
BEFORE_NORM = {"feature_layers": (2,)}
HEADS: dict[str, Callable[[Any], Any]] = {
    "eagle": lambda model: eagle_head(model, scale=1.5, has_embeddings=True),
    "eagle with norms": lambda model: eagle_head(
        model, scale=2.0, layernorms=True, fc_bias=True, norm_output=True, **BEFORE_NORM
    ),
    "mtp of llama": lambda model: mtp_head(model, states_first=True, norm_output=False, **BEFORE_NORM),
    "mtp of deepseek": lambda model: mtp_head(model, "deepseek_v3"),
    "mtp of qwen3-next": lambda model: mtp_head(model, "qwen3_next"),
    "mtp of qwen3.5": lambda model: mtp_head(model, "qwen3_5_text"),
    "mlp": lambda model: mlp_speculator(model),
    "tied mlp": lambda model: mlp_speculator(model, tie_weights=True, scale_input=True, **BEFORE_NORM),
}
SAVE: dict[str, Callable[[Any, Path], None]] = {
    "eagle": lambda head, path: save_eagle(head, path, {"name_or_path": "x", "architectures": ["LlamaForCausalLM"]}),
    "mtp": lambda head, path: save_mtp(head, path, num_layers=2),
    "mlp": save_mlp,
}


@pytest.fixture(params=HEADS)
def head(request: pytest.FixtureRequest, tiny: Any) -> Any:
    return HEADS[request.param](tiny)


def drafter_of(head: Any, target: Any, width: int = 1, depth: int = 3) -> Drafter:
    if isinstance(head, MlpSpeculator):
        return MlpDrafter(head, target) if width == 1 else MlpTreeDrafter(head, target, width, depth)
    runner = HeadRunner(head, head.config.layer, target)
    return make_head_drafter(runner, head.config.feature_layers, target.vocab_size, None, width, depth)


def engine_of(model: Any, head: Any, width: int = 1, depth: int = 3, **options: Any) -> Engine:
    target = target_for(model)
    recorder = RecordingDrafter(drafter_of(head, target, width, depth))
    return engine_for(target, recorder, **{"num_speculative_tokens": 3, **options})


@functools.cache
def plain(model: Any, prompt: tuple[int, ...], params: SamplingParams = GREEDY) -> list[int]:
    return reference(model, prompt, params).token_ids


def check_plain(model: Any, sequences: Sequence[Any], prompts: Sequence[list[int]] = PROMPTS) -> None:
    assert [s.output_token_ids for s in sequences] == [plain(model, tuple(p)) for p in prompts]


def test_drafts_are_what_unrolling_gives(tiny: Any, head: Any):
    """Positions, offsets and norms of engine and training agree, in ragged batches; the output is plain decoding's."""
    engine = engine_of(tiny, head)
    check_plain(tiny, run(engine, PROMPTS, GREEDY))
    assert check_chains(engine.drafter, tiny, head) > 15
    assert max(max(counts) for counts in engine.drafter.widths) == 3


@pytest.mark.parametrize("name", ["eagle", "mlp"])
def test_a_tree_is_what_unrolling_gives(tiny: Any, name: str):
    head = HEADS[name](tiny)
    engine = engine_of(tiny, head, 2, 3, num_speculative_tokens=7)
    recorder = engine.drafter
    check_plain(tiny, run(engine, PROMPTS[1:], GREEDY), PROMPTS[1:])
    deepest = 0
    for texts, draft in zip(recorder.texts[1:4], recorder.drafts[1:4], strict=True):
        for i, text in enumerate(texts):
            count = draft.num_draft_tokens[i]
            tokens, parents = draft.token_ids[i, :count].tolist(), draft.parents[i, :count].tolist()
            for node in range(count):
                path = [tokens[at] for at in path_to(node, parents)]
                assert path[-1] in draft_logits(tiny, head, text, path[:-1])[-1].topk(2).indices.tolist()
                deepest = max(deepest, len(path))
    assert deepest == 3


class Corrected(Drafter):
    """Proposes what the target will say in place of another drafter's guesses, which a recorder inside has kept."""

    def __init__(self, recorder: RecordingDrafter, text: list[int]):
        self.recorder, self.text, self.feature_layers = recorder, text, recorder.feature_layers
        self.observe_features = recorder.observe_features  # type: ignore[method-assign]
        self.forget = recorder.forget  # type: ignore[method-assign]

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        draft = self.recorder.propose(rows)
        length, count = len(rows[0].token_ids), draft.num_draft_tokens[0]
        right = torch.tensor([self.text[length : length + count]], dtype=torch.int64)
        return replace(draft, token_ids=right)


@pytest.mark.parametrize("name", ["eagle with norms", "mtp of qwen3.5", "mlp"])
def test_a_guessed_state_never_stays(tiny: Any, name: str):
    """Drafts that are accepted are read again with the target's states: the next guess is that of a fresh head."""
    head, prompt = HEADS[name](tiny), list(PROMPTS[1])
    params = replace(GREEDY, max_tokens=20)
    engine = engine_of(tiny, head)
    recorder = engine.drafter
    engine.drafter = Corrected(recorder, [*prompt, *plain(tiny, tuple(prompt), params), 0])
    (sequence,) = run(engine, [prompt], params)
    assert sequence.metrics.num_accepted_tokens >= 12
    assert check_chains(recorder, tiny, head) > 3


@pytest.mark.parametrize("name", ["eagle", "mtp of llama", "mlp"])
def test_steps_without_a_draft(tiny: Any, name: str):
    """O38: rows that were not drafted for catch up, a prompt in chunks loses no state, nothing is kept at the end."""
    head = HEADS[name](tiny)
    engine = engine_of(tiny, head, max_num_batched_tokens=8)
    engine.policy = FixedPolicy(0)
    requests = [engine.add_request(Request(str(i), list(p), GREEDY)) for i, p in enumerate(PROMPTS[:2])]
    for number in range(60):
        engine.policy = FixedPolicy(3 if number % 5 > 2 else 0)
        if engine.has_unfinished_requests:
            engine.step()
    check_plain(tiny, requests, PROMPTS[:2])
    assert check_chains(engine.drafter, tiny, head) > 3
    inner: Any = engine.drafter.inner
    assert not (inner._last if name == "mlp" else inner.cache.runner.slots.num_open)


@pytest.mark.parametrize("method", ["eagle", "mtp", "ngram+mlp"])
def test_built_by_name_and_mixed_with_another_source(tiny: Any, tmp_path: Path, method: str):
    kind = method.split("+")[-1]
    head = HEADS[{"mtp": "mtp of qwen3-next"}.get(kind, kind)](tiny)
    SAVE[kind](head, tmp_path)
    target = target_for(tiny)
    config = SpeculativeConfig(method=method, model=str(tmp_path), num_speculative_tokens=3)
    drafter = make_drafter(config, EngineConfig(model="tiny", dtype="float32"), target, None)
    assert drafter.feature_layers == (-1,)
    engine = engine_for(target, RecordingDrafter(drafter), num_speculative_tokens=3)
    check_plain(tiny, run(engine, PROMPTS, GREEDY))
    if method == kind:
        assert 0.0 < drafter.cost < 1.0
        assert check_chains(engine.drafter, tiny, head) > 10


@pytest.mark.slow  # the same kernels as in the test of EAGLE-3
@pytest.mark.parametrize("name", ["mtp of deepseek", "mlp"])
def test_bf16(tiny: Any, name: str):
    """Packed and with native kernels: greedy output is that of plain decoding, first guesses those in float32."""
    head = HEADS[name](tiny)
    target = target_for(tiny, dtype=torch.bfloat16)
    recorder = RecordingDrafter(drafter_of(head, target))
    drafted = run(engine_for(target, recorder, num_speculative_tokens=3), PROMPTS, GREEDY)
    alone = run(engine_for(target_for(tiny, dtype=torch.bfloat16)), PROMPTS, GREEDY)
    if target.native is not None:
        assert [s.output_token_ids for s in drafted] == [s.output_token_ids for s in alone]
    firsts = [
        (draft_logits(tiny, head, text, [])[0].topk(2).indices.tolist(), int(draft.token_ids[i, 0]))
        for texts, draft in zip(recorder.texts, recorder.drafts, strict=True)
        for i, text in enumerate(texts)
        if draft.num_draft_tokens[i]
    ]
    assert sum(token in best for best, token in firsts) > 0.7 * len(firsts) > 8
