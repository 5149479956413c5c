"""What a draft costs to verify: passes of the target over drafts of several sizes, a tree among them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

from foredraft.target.forward import TargetModel
from foredraft.target.layout import PassRow

CONTEXT = 128
REPEATS = 9
CHAINS = (0, 1, 4, 8, 16)
TREE = (-1, -1, -1, -1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 10, 14)
"""Parents of a tree of 16 nodes, five deep, of the kind that best-first drafting grows."""


@dataclass(frozen=True, slots=True)
class PassTime:
    """Median seconds of a pass over one pending token and a draft."""

    num_draft_tokens: int
    is_tree: bool
    seconds: float


def measure_passes(target: TargetModel) -> list[PassTime]:
    """Time one sequence's passes behind a context of 128 tokens, all sizes in turn, after a warm-up."""
    sequence = -2
    context = min(CONTEXT, target.max_model_len // 2)
    drafts: list[tuple[int, ...]] = [tuple(range(-1, n - 1)) for n in CHAINS if context + n < target.max_model_len]
    if target.supports_trees and context + len(TREE) < target.max_model_len:
        drafts.append(TREE)
    times: list[list[float]] = [[] for _ in drafts]
    target.slots.open(sequence)
    try:
        target.prefill(sequence, [1] * context)
        for _ in range(REPEATS + 1):
            for found, parents in zip(times, drafts, strict=True):
                began = time.perf_counter()
                target.forward([PassRow(sequence, [1] * (1 + len(parents)), 1 + len(parents), parents)])
                found.append(time.perf_counter() - began)
    finally:
        target.slots.close(sequence)
    return [
        PassTime(len(parents), parents is TREE, median(found[1:])) for parents, found in zip(drafts, times, strict=True)
    ]


def pass_documents(passes: list[PassTime]) -> list[dict[str, Any]]:
    """The entries of ``passes`` in the JSON document; ``ratio`` is to the pass without a draft."""
    return [
        {
            "num_draft_tokens": each.num_draft_tokens,
            "tree": each.is_tree,
            "ms": round(1e3 * each.seconds, 3),
            "ratio": round(each.seconds / passes[0].seconds, 3),
        }
        for each in passes
    ]
