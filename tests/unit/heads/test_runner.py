"""A head's layer behind its input runs in one native call, with the bits of its modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from foredraft.heads.layers import DecoderLayer
from foredraft.heads.runner import HeadRunner
from foredraft.target.layout import PassRow
from foredraft.testing import eagle3_config, eagle3_head, target_for

ROWS = [PassRow(0, [3, 5, 7], 0), PassRow(1, [9, 4], 0)]
TREE = [PassRow(0, [2, 6, 8], 0, [-1, -1, 0]), PassRow(1, [11], 0, [-1])]


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_one_call_gives_the_bits_of_the_modules(tiny: Any, kind: Any, norm_before_residual: bool):
    """Two layers, the first over token and state; texts, then a tree and a chain behind them."""
    base = eagle3_config(tiny, norm_before_residual=norm_before_residual)
    options = {**base.layer.to_dict(), "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
    layer = kind(**{name: value for name, value in options.items() if name not in ("model_type", "attention_bias")})
    target = target_for(tiny, dtype=torch.bfloat16)
    if target.native is None:
        pytest.skip("needs AVX512-BF16 and a C++ compiler")
    runner = HeadRunner(eagle3_head(replace(base, layer=layer)), layer, target)
    layers = [module for module in runner.head.modules() if isinstance(module, DecoderLayer)]  # type: ignore[attr-defined]
    assert len(layers) == 2
    assert all(each.packed is not None for each in layers)
    found = outputs(runner)
    for each in layers:
        each.packed = None
    for one, other in zip(found, outputs(runner), strict=True):
        assert one.equal(other)


@torch.inference_mode()
def outputs(runner: HeadRunner) -> list[torch.Tensor]:
    """States, and keys and values, of a pass over texts and one over drafts."""
    size, generator = runner.embeddings.shape[1], torch.Generator().manual_seed(0)
    for sequence_id in (0, 1):
        runner.slots.open(sequence_id)
    found: list[torch.Tensor] = []
    for rows in (ROWS, TREE):
        count = sum(len(row.token_ids) for row in rows)
        states = torch.randn(count, size, generator=generator).to(runner.embeddings.dtype)
        found += runner.forward(rows, states)
        if rows is ROWS:
            for row in rows:
                runner.slots.commit(row.sequence_id, len(row.token_ids))
    found += [tensor.clone() for tensor in (*runner.slots.keys, *runner.slots.values)]
    for sequence_id in (0, 1):
        runner.slots.close(sequence_id)
    return found
