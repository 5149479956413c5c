"""The compiled model: one graph for all passes, and the same tokens as without it."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from foredraft.drafters.ngram import NGramDrafter
from foredraft.errors import UnsupportedModelError
from foredraft.target import forward
from foredraft.target.attention import ATTENTION_NAME, register_attention
from foredraft.target.forward import TargetModel
from foredraft.target.layout import PassRow, PassShape
from foredraft.target.selfcheck import TOKEN_IDENTICAL, find_shape
from foredraft.testing import (
    RecordingDrafter,
    engine_for,
    random_model,
    reference,
    run,
    target_for,
    tiny_config,
    tiny_model,
)
from foredraft.types import SamplingParams

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="torch.compile needs a C++ compiler"
)
PROMPTS = ((7,), (7, 8, 9, 10, 7, 8, 9), tuple(range(20, 37)), (3, 5, 3, 5, 3), (*range(40, 60), *range(40, 56), 41))
COUNTERS = torch._dynamo.utils.counters


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by all models here, so most of them find their code in the cache."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(0, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def compiled(model: Any, folder: Path) -> TargetModel:
    return compile_model(model, folder)


def compile_model(model: Any, folder: Path, *, packed: bool = True, dtype: torch.dtype = torch.float32) -> TargetModel:
    register_attention()
    twin = copy.deepcopy(model).to(dtype)
    twin.config._attn_implementation = ATTENTION_NAME
    return TargetModel(twin, model.config.max_position_embeddings, packed=packed, compiled=True, folder=folder)


def logits_of(target: TargetModel, rows: list[PassRow]) -> torch.Tensor:
    """One pass over fresh sequences, which are closed again."""
    for row in rows:
        target.slots.open(row.sequence_id)
    try:
        return target.forward(rows).clone()
    finally:
        for row in rows:
            target.slots.close(row.sequence_id)


def some_tokens(count: int) -> list[int]:
    return [i * 7 % 61 for i in range(count)]


def test_drafts_in_a_ragged_batch_give_the_reference_tokens(compiled: TargetModel, model: Any):
    """Float32: rounding of the compiled graph does not reach the tokens of a model without near-ties."""
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    drafter = RecordingDrafter(NGramDrafter(1, 4))
    sequences = run(engine_for(compiled, drafter), PROMPTS, greedy)
    for prompt, sequence in zip(PROMPTS, sequences, strict=True):
        assert sequence.output_token_ids == reference(model, prompt, greedy).token_ids
    accepted = sum(s.metrics.num_accepted_tokens for s in sequences)
    assert 0 < accepted < sum(s.metrics.num_draft_tokens for s in sequences)
    assert any(len(set(draft.num_draft_tokens)) > 1 for draft in drafter.drafts)


def test_no_pass_compiles_again(compiled: TargetModel):
    """From one token to 600, with one row of logits, several and none, in one to five rows."""
    graphs = COUNTERS["stats"]["unique_graphs"]
    compiled.shape = PassShape(min_tokens=1, min_queries=1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for count in (1, 2, 3, 8, 100, 600):
            for num_logits in {0, 1, min(count, 2), count}:
                shape = logits_of(compiled, [PassRow(0, some_tokens(count), num_logits)]).shape
                assert shape == (num_logits, compiled.vocab_size)
        for num_rows in (2, 3, 5):
            rows = [PassRow(i, some_tokens(1 + 40 * i), i % 2) for i in range(num_rows)]
            assert len(logits_of(compiled, rows)) == num_rows // 2
    assert COUNTERS["stats"]["unique_graphs"] == graphs > 0


def test_a_graph_outlives_the_growth_of_the_cache(model: Any, folder: Path):
    """More slots and a larger capacity come with new tensors; the logits stay those of the model without a graph."""
    compiled, eager = compile_model(model, folder), target_for(model)
    before = compiled.slots.num_slots, compiled.slots.capacity
    for target in (compiled, eager):
        target.slots.open(0)
        target.prefill(0, some_tokens(500))
        for sequence in range(1, 6):
            target.slots.open(sequence)
        target.prefill(5, some_tokens(40))
        target.slots.close(1)
    rows = [PassRow(0, some_tokens(100), 3), PassRow(5, [9, 8], 2)]
    difference = compiled.forward(rows) - eager.forward(rows)
    assert difference.abs().max() < 1e-3
    after = compiled.slots.num_slots, compiled.slots.capacity
    assert all(new > old for new, old in zip(after, before, strict=True))


@pytest.mark.parametrize("native", [pytest.param(True, marks=pytest.mark.slow), False], ids=["native", "torch"])
def test_drafts_do_not_change_a_bit_in_bf16(model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, native: bool):
    """The self-check settles the compiled model; then drafts in a batch and plain decoding alone agree.

    Greedy and sampled with a seed each; logits in bf16 have ties and near-ties in plenty.
    """
    if not native:
        monkeypatch.setattr(forward, "native_library", lambda folder: None)
    target = compile_model(model, folder, dtype=torch.bfloat16)
    if native and target.native is None:
        pytest.skip("the C++ kernels need AVX512-BF16")
    numerics = find_shape(target)
    if numerics.contract != TOKEN_IDENTICAL:
        assert target.native is None, "our own kernels do not depend on the pass"
        pytest.skip(f"torch's kernels differ by {numerics.max_difference} here, whatever the shape of the pass")
    target.shape = numerics.shape
    few = {"max_tokens": 24, "allowed_token_ids": tuple(range(8))}  # so that n-grams come back
    params = [SamplingParams(temperature=0.0, **few), *(SamplingParams(seed=seed, **few) for seed in range(4))]
    drafted = run(engine_for(target, NGramDrafter(1, 4)), PROMPTS, params)
    for prompt, param, sequence in zip(PROMPTS, params, drafted, strict=True):
        plain = run(engine_for(target), [prompt], param)[0]
        assert sequence.output_token_ids == plain.output_token_ids
    accepted = sum(s.metrics.num_accepted_tokens for s in drafted)
    assert 0 < accepted < sum(s.metrics.num_draft_tokens for s in drafted)


@pytest.mark.slow  # compiles two models
def test_models_keep_their_own_graphs(compiled: TargetModel, model: Any, folder: Path):
    """Graphs are found by code object and ours check no weights: a shallower model must not run a deeper one's."""
    other = random_model(LlamaForCausalLM, tiny_config(num_hidden_layers=1), 1)
    shallow = compile_model(other, folder, packed=False)
    row = PassRow(0, some_tokens(9), 9)
    for target, original in ((shallow, other), (compiled, model), (shallow, other)):
        assert torch.allclose(logits_of(target, [row]), logits_of(target_for(original), [row]), atol=1e-4)


def test_what_was_compiled_is_kept_in_our_folder(
    compiled: TargetModel, model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Another model of the same shape takes the code from there; the user's own setting stays as it was."""
    assert any((folder / "compiled").rglob("*.so"))
    setting = str(folder / "of-the-user")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", setting)
    hits, misses = (COUNTERS["inductor"][f"fxgraph_cache_{kind}"] for kind in ("hit", "miss"))
    compile_model(model, folder)
    assert COUNTERS["inductor"]["fxgraph_cache_hit"] == hits + 1
    assert COUNTERS["inductor"]["fxgraph_cache_miss"] == misses
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == setting
    assert not Path(setting).exists()


class TwoGraphs(LlamaForCausalLM):
    """Decides by a value that only the run knows, which no single graph can hold."""

    def forward(self, *args: Any, **options: Any) -> Any:
        out = super().forward(*args, **options)
        if out.logits.sum() > 0:
            out.logits += 1
        return out


def test_a_model_that_is_no_single_graph_is_refused_by_name(folder: Path):
    other = random_model(TwoGraphs, tiny_config(num_hidden_layers=1), 0)
    with pytest.raises(UnsupportedModelError, match="TwoGraphs cannot be compiled: .*branching.*; leave compile"):
        compile_model(other, folder)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_compiled_model_on_the_gpu_gives_the_same_logits(model: Any, folder: Path):
    twin = copy.deepcopy(model).cuda()
    eager, compiled = target_for(twin), compile_model(twin, folder)
    for count in (1, 5, 100):
        row = PassRow(0, some_tokens(count), count)
        assert torch.allclose(logits_of(compiled, [row]), logits_of(eager, [row]), atol=1e-2)
