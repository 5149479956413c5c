"""Layers in one native call give the bits of the packed modules called step by step, whatever the rows of a pass."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

from foredraft.target import layers
from foredraft.target.early_exit import EarlyExit
from foredraft.target.features import AFTER_NORM, HiddenStates
from foredraft.target.forward import TargetModel
from foredraft.target.layers import PackedLayer
from foredraft.target.layout import PassRow
from foredraft.target.queries import QueryLog
from foredraft.testing import random_model

SIZES = {
    "vocab_size": 64,
    "hidden_size": 192,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
KINDS = {
    "Llama": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64, "intermediate_size": 100},
    "Mistral": {"sliding_window": 20},
    "Qwen2": {},
    "Qwen3": {},
    "SmolLM3": {"no_rope_layers": [1, 0, 1, 0]},
}
TEXTS = {0: [3, 14, 15, 9], 1: list(range(60)), 2: [7, 8] * 70}
PROMPT = [i * i % 61 for i in range(300)]
TREE = PassRow(1, [5, 9, 11, 7, 3, 2], 6, [-1, -1, 0, 1, 2])
PASSES = {
    "1": [PassRow(1, [5], 1)],
    "2": [PassRow(0, [5, 6], 1)],
    "5": [PassRow(2, [5, 6, 7, 8, 9], 5)],
    "17": [PassRow(1, list(range(17)), 17)],
    "ragged": [PassRow(2, [1, 2, 3], 3), PassRow(0, [4], 1), PassRow(1, list(range(7)), 2)],
    "tree": [PassRow(0, [1, 2], 2), TREE],
    "prompt": [PassRow(0, PROMPT, 1), PassRow(2, [4, 5], 2)],
}


def target_of(kind: str, **options) -> TargetModel:
    config = getattr(tf, f"{kind}Config")(**{**SIZES, **options})
    model = random_model(tf.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, 1)
    generator = torch.Generator().manual_seed(2)
    for name, weight in model.named_parameters():  # transformers starts biases at 0 and norms at 1
        if name.endswith("bias") or "norm" in name:
            weight.data.add_(torch.randn(weight.shape, generator=generator), alpha=0.2)
    target = TargetModel(model.to(torch.bfloat16), 600)
    if target.native is None:
        pytest.skip("needs AVX512-BF16 and a C++ compiler")
    for sequence, text in TEXTS.items():
        target.slots.open(sequence)
        target.prefill(sequence, text)
    target.slots.reserve(500)
    return target


@pytest.fixture(scope="module", params=KINDS)
def target(request):
    return target_of(request.param, **KINDS[request.param])


@pytest.fixture
def llama():
    return target_of("Llama")


def by_steps(target: TargetModel) -> TargetModel:
    """The same model, of the layers as they were before they were packed as a whole."""
    return target.with_layers([layer.layer for layer in target.layers])


def run(target: TargetModel, rows: list[PassRow], layer_ids: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """Logits, states that are wanted, and what the pass left in the slots, which held zeros past the texts."""
    slots, wanted = target.slots, HiddenStates(layer_ids) if layer_ids else None
    for sequence, text in TEXTS.items():
        for tensor in (*slots.keys, *slots.values):
            tensor[slots.slot(sequence), len(text) :] = 0
    logits = target.forward(rows, wanted)
    states = list(wanted.of_sequence.values()) if wanted else []
    in_use = [slots.slot(sequence) for sequence in TEXTS]
    return [logits, *states, *(tensor[in_use, :500] for tensor in (*slots.keys, *slots.values))]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.fixture
def calls(monkeypatch):
    """How many layers each native call ran."""
    found: list[int] = []
    run_natively = layers.run_layers

    def counted(entries, num_layers, *args, **options):
        found.append(num_layers)
        return run_natively(entries, num_layers, *args, **options)

    monkeypatch.setattr(layers, "run_layers", counted)
    return found


@pytest.mark.parametrize("rows", PASSES.values(), ids=PASSES)
def test_one_call_gives_the_bits_of_the_steps(target, rows, calls):
    """Biases, windows, norms of heads, layers without positions; sizes that fill no block of the kernels."""
    ours = run(target, rows)
    assert calls == [4]
    assert same(ours, run(by_steps(target), rows))
    assert calls == [4]


def test_threads_change_no_bit(llama):
    """The team shares the rows or the columns of a step, never a sum."""
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append([run(llama, rows) for rows in PASSES.values()])
    torch.set_num_threads(before)
    assert all(same(ours, theirs) for other in found[1:] for ours, theirs in zip(other, found[0], strict=True))


def test_states_that_are_wanted_are_noted_in_the_call(llama, calls):
    """They are those of the steps."""
    expected = run(by_steps(llama), PASSES["ragged"])
    wanted = (0, 2, 4, AFTER_NORM)
    llama.tap(wanted)
    calls.clear()
    logits, *rest = run(llama, PASSES["ragged"], wanted)
    assert calls == [4]
    assert same([logits, *rest[3:]], expected)
    steps = by_steps(llama)
    steps._tapped = set()
    steps.tap(wanted)
    assert same([logits, *rest], run(steps, PASSES["ragged"], wanted))


def test_some_of_the_layers_run_in_one_call(llama, calls):
    """A view's layers follow each other in the call as they do in the view."""
    view = llama.with_layers([llama.layers[i] for i in (0, 2, 3)])
    calls.clear()
    ours = run(view, PASSES["tree"])
    assert calls == [3]
    steps = llama.with_layers([llama.layers[i].layer for i in (0, 2, 3)])
    assert same(ours, run(steps, PASSES["tree"]))


def test_an_early_exit_cuts_the_call_in_two(llama, calls):
    """Layers at the cut run alone; the pass that goes on from the draft has the bits of the whole."""
    rows = [PassRow(0, [5, 6, 7], 3)]
    expected = llama.forward(rows)
    llama.early_exit = EarlyExit(llama, 2)
    calls.clear()
    llama.early_exit.draft([PassRow(0, [5, 6], 1)])
    assert calls == [1, 1]
    calls.clear()
    assert torch.equal(llama.forward(rows), expected)
    assert calls == [1, 1, 1, 1]


def test_queries_are_noted_step_by_step(llama, calls):
    """What attention sees is not known outside of the call."""
    expected = run(llama, PASSES["5"])
    llama.query_log = QueryLog(3)
    calls.clear()
    assert same(run(llama, PASSES["5"]), expected)
    assert not calls
    assert [query.shape for query in llama.query_log.take(2)] == [(1, 6, 32)] * 4


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Granite", {"residual_multiplier": 0.5, "attention_multiplier": 0.2}),
        ("Gemma2", {}),
        ("Olmo2", {}),
        ("Llama", {"head_dim": 16}),
    ],
)
def test_other_layers_stay_as_they_are(kind, options):
    """Scaled residuals, norms elsewhere, heads that the kernel does not know: one of these is enough."""
    target = target_of(kind, **options)
    assert target.lowering.layer_list is None
    assert not any(isinstance(layer, PackedLayer) for layer in target.layers)


def test_the_arena_grows_by_doubling():
    """One block of memory for passes of all sizes."""
    arena = layers.Arena()
    small = arena.at(100)
    assert arena.at(60) == small
    arena.at(101)
    assert len(arena._memory) == 200
    arena.at(1000)
    assert len(arena._memory) == 1000
