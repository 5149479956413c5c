"""Measures what a pass of the target costs, by rows, tokens and context, and makes the policy that needs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np
from scipy.optimize import nnls

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.drafters import Drafter
from foredraft.policy import (
    DraftCost,
    FixedPolicy,
    GoodputPolicy,
    HeuristicPolicy,
    PassTable,
    Policy,
    SpecDecPolicy,
    StepCost,
    TiersPolicy,
)
from foredraft.target.forward import TargetModel
from foredraft.target.layout import PassRow
from foredraft.target.measurements import measurement_file, read_measurement, write_measurement

NUM_TOKENS = (1, 2, 4, 8, 14, 16, 24, 32, 48, 64, 96, 128, 256)
"""Tokens of passes of one row; the table's points."""
BATCHES = ((4, 1), (4, 4), (14, 1), (14, 4), (14, 8))
"""Rows and tokens of each, behind a short context."""
LONG_ROWS, LONG_TOKENS = (1, 2), (1, 8)
REPEATS, FEWEST = 5, 2
BUDGET_S = 10.0
"""After so many seconds no further round begins, but for the fewest."""
SHORT, LONG = 16, 1024
SHORTEST_S = 1e-6
"""A point of the table that noise has driven to nothing stays a time."""


@dataclass(frozen=True, slots=True)
class PassSample:
    """Median seconds of a pass over ``num_rows`` rows of ``num_tokens`` tokens each, ``context_len`` of which a row's
    first token attends to, itself included."""

    num_rows: int
    num_tokens: int
    context_len: int
    seconds: float

    @property
    def total_tokens(self) -> int:
        return self.num_rows * self.num_tokens

    @property
    def num_keys(self) -> int:
        return self.num_rows * self.context_len

    @property
    def num_pairs(self) -> int:
        return self.total_tokens * self.context_len

    def predicted_s(self, table: PassTable) -> float:
        """What a table says of it."""
        return table.pass_s(self.num_rows, self.total_tokens, self.num_keys, self.num_pairs)


def settle_pass_samples(
    target: TargetModel,
    fingerprint: str,
    config: EngineConfig,
    *,
    refresh: bool = False,
    tell: Callable[[float], None] = lambda fraction: None,
) -> list[PassSample]:
    """Pass times of a model, measured the first time (some seconds) and kept in the cache folder.

    Args:
        fingerprint: changes with the model's configuration or weights.
        refresh: measure again.
        tell: called with the fraction that is done.
    """
    file = measurement_file("pass_times", target, fingerprint, config)
    try:
        stored = [] if refresh else [PassSample(**sample) for sample in read_measurement(file)["samples"]]
    except (KeyError, TypeError):
        stored = []
    if not stored:
        stored = measure_pass_samples(target, tell)
        write_measurement(file, {"samples": [asdict(sample) for sample in stored]})
    return stored


def make_policy(
    speculative: SpeculativeConfig, drafter: Drafter, target: TargetModel, fingerprint: str, config: EngineConfig
) -> Policy:
    """The policy that a configuration names; ``goodput`` needs the target's pass times, which are measured once."""
    most = speculative.max_draft_tokens
    if not most or speculative.policy in ("fixed", "confidence"):  # the drafter itself ends drafts for the latter
        return FixedPolicy(most)
    if speculative.policy == "heuristic":
        return HeuristicPolicy(most)
    if speculative.policy == "tiers":
        return TiersPolicy(most)
    if speculative.policy == "specdec++":
        return SpecDecPolicy()
    table = fit_table(settle_pass_samples(target, fingerprint, config))
    declared = DraftCost(step_s=drafter.cost * table.seconds[0])
    return GoodputPolicy(StepCost(table, declared, drafter.max_passes))


def measure_pass_samples(
    target: TargetModel, tell: Callable[[float], None] = lambda fraction: None, repeats: int = REPEATS
) -> list[PassSample]:
    """Time passes of every size in turn, so that a slow moment meets all of them; medians.

    Args:
        tell: called with the fraction that is done.
        repeats: rounds, after one to warm up; fewer for a large model, which shall not take minutes.
    """
    room = target.max_model_len
    short = min(SHORT, room // 4)
    long = min(LONG, room - max(LONG_TOKENS))
    near = [-2 - i for i in range(max(rows for rows, _ in BATCHES))]
    far = [near[-1] - 1 - i for i in range(max(LONG_ROWS))]
    sizes = [(1, n) for n in NUM_TOKENS] + list(BATCHES)
    cases = [(near[:rows], n, short) for rows, n in sizes if short + n <= room]
    cases += [(far[:rows], n, long) for rows in LONG_ROWS for n in LONG_TOKENS]
    times: list[list[float]] = [[] for _ in cases]
    for sequence in (*near, *far):
        target.slots.open(sequence)
    try:
        for sequence in (*near, *far):
            target.prefill(sequence, [1] * (short if sequence in near else long))
        started = time.perf_counter()
        for repeat in range(repeats + 1):
            if repeat > FEWEST and time.perf_counter() - started > BUDGET_S:
                tell(1.0)
                break
            for (sequences, n, _), found in zip(cases, times, strict=True):
                rows = [PassRow(sequence, [1] * n, n) for sequence in sequences]
                began = time.perf_counter()
                target.forward(rows)
                found.append(time.perf_counter() - began)
            tell((repeat + 1) / (repeats + 1))
    finally:
        for sequence in (*near, *far):
            target.slots.close(sequence)
    return [
        PassSample(len(sequences), n, context + 1, median(found[1:]))
        for (sequences, n, context), found in zip(cases, times, strict=True)
    ]


def fit_table(samples: Sequence[PassSample]) -> PassTable:
    """The table that comes closest to the samples, relative to their seconds (non-negative least squares)."""
    knots = sorted({sample.total_tokens for sample in samples if sample.num_rows == 1})
    unit = np.eye(len(knots))
    counts = [
        [
            *(float(np.interp(sample.total_tokens, knots, hat)) for hat in unit),
            sample.num_rows - 1,
            sample.num_keys,
            sample.num_pairs - sample.num_keys,
        ]
        for sample in samples
    ]
    seconds = np.array([sample.seconds for sample in samples])
    matrix = np.array(counts) / seconds[:, None]
    scale = np.maximum(matrix.max(axis=0), 1e-30)
    found, _ = nnls(matrix / scale, np.ones(len(samples)))
    *points, row_s, key_s, pair_s = (found / scale).tolist()
    return PassTable(tuple(knots), tuple(max(SHORTEST_S, s) for s in _rising(points)), key_s, pair_s, row_s)


def _rising(values: list[float]) -> list[float]:
    """Noise taken out of a series that cannot fall: no value is above the next."""
    for i in range(len(values) - 2, -1, -1):
        values[i] = min(values[i], values[i + 1])
    return values
