"""A pass over a tree: each node's logits and the committed path's cache are those of the chain that leads to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from foredraft.target.forward import TargetModel
from foredraft.target.layout import PassRow
from foredraft.testing import random_model

TOKENS = [5, 9, 11, 7, 3, 2, 8, 6, 1, 4]
PARENTS = [-1, -1, 0, 1, 2, 2, 3, 4, -1, 5]
PATH = [0, 2, 5, 9]
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 192,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MODELS = {
    "full": (tf.LlamaForCausalLM, lambda: tf.LlamaConfig(**SHAPE)),
    "window": (tf.MistralForCausalLM, lambda: tf.MistralConfig(**SHAPE, sliding_window=6)),
}


@pytest.fixture(scope="module", params=[(name, dtype) for name in MODELS for dtype in ("bfloat16", "float32")], ids=str)
def target(request: pytest.FixtureRequest) -> TargetModel:
    name, dtype = request.param
    kind, config = MODELS[name]
    return TargetModel(random_model(kind, config(), seed=1).to(getattr(torch, dtype)), 200)


def same(target: TargetModel, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Bit for bit on the native kernels; elsewhere a tree is summed in another order."""
    if target.dtype == torch.bfloat16 and target.native is not None:
        return torch.equal(ours, theirs)
    return torch.allclose(ours, theirs, atol=2e-2 if target.dtype == torch.bfloat16 else 1e-5)


@pytest.fixture
def prefilled(target: TargetModel, length: int) -> Any:
    """The text in slot 1, between two neighbours."""
    for sequence, text in ((1, [1, 2, 3]), (2, [i % 64 for i in range(length)]), (3, [4] * 40)):
        target.slots.open(sequence)
        target.prefill(sequence, text)
    yield target
    for sequence in (1, 2, 3):
        target.slots.close(sequence)


def tree_pass(target: TargetModel) -> torch.Tensor:
    rows = [PassRow(1, [4], 1), PassRow(2, [10, *TOKENS], 11, PARENTS), PassRow(3, [5, 6], 2)]
    return target.forward(rows)[1:12].clone()


@pytest.mark.parametrize("length", [2, 15, 16, 30, 60])
def test_each_node_is_the_end_of_its_chain(prefilled: TargetModel, length: int):
    tree = tree_pass(prefilled)
    for node in range(-1, len(TOKENS)):
        path, at = [], node
        while at >= 0:
            path.append(TOKENS[at])
            at = PARENTS[at]
        alone = prefilled.forward([PassRow(2, [10, *path[::-1]], 1)])[0]
        assert same(prefilled, tree[node + 1], alone), f"node {node} behind {length} tokens"


@pytest.mark.parametrize("length", [15, 30])
def test_the_committed_path_is_a_chain_in_the_cache(prefilled: TargetModel, length: int):
    tree_pass(prefilled)
    prefilled.slots.commit(2, 1, PATH)
    held = [part.clone() for layer in prefilled.slots.read(2) for part in layer]
    prefilled.slots.truncate(2, 0)
    prefilled.prefill(2, [*(i % 64 for i in range(length)), 10, *(TOKENS[i] for i in PATH)])
    fresh = [part for layer in prefilled.slots.read(2) for part in layer]
    assert all(same(prefilled, ours, theirs) for ours, theirs in zip(held, fresh, strict=True))
