"""Measures what a pass of the target costs, by number of tokens and by context, and makes the policy that needs it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from statistics import median

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.policy import FixedPolicy, GoodputPolicy, PassTable, Policy, StepCost
from foredraft.target.forward import TargetModel
from foredraft.target.layout import PassRow
from foredraft.target.measurements import measurement_file, read_measurement, write_measurement

NUM_TOKENS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
REPEATS = 5
SHORT, LONG = 16, 1024
WIDE = 8
"""Tokens of a row in the measurement of what a token pays for its context."""


def settle_pass_table(target: TargetModel, fingerprint: str, config: EngineConfig) -> PassTable:
    """The table of a model, measured the first time (some seconds) and kept in the cache folder.

    Args:
        fingerprint: changes with the model's configuration or weights.
    """
    file = measurement_file("pass_times", target, fingerprint, config)
    stored = read_measurement(file)
    try:
        return PassTable(
            tuple(stored["num_tokens"]), tuple(stored["seconds"]), float(stored["key_s"]), float(stored["pair_s"])
        )
    except (KeyError, TypeError, ValueError):
        table = measure_pass_table(target)
        write_measurement(file, asdict(table))
        return table


def make_policy(speculative: SpeculativeConfig, target: TargetModel, fingerprint: str, config: EngineConfig) -> Policy:
    """The policy that a configuration names; ``goodput`` needs the target's pass times, which are measured once."""
    if speculative.policy == "goodput" and speculative.max_draft_tokens:
        return GoodputPolicy(StepCost(settle_pass_table(target, fingerprint, config)))
    return FixedPolicy(speculative.max_draft_tokens)


def measure_pass_table(
    target: TargetModel, tell: Callable[[float], None] = lambda fraction: None, repeats: int = REPEATS
) -> PassTable:
    """Time passes of every size in turn, so that a slow moment meets all of them; medians.

    Args:
        tell: called with the fraction that is done.
        repeats: rounds.
    """
    room = target.max_model_len
    short = min(SHORT, room // 4)
    long = min(LONG, room - WIDE)
    sizes = [n for n in NUM_TOKENS if short + n <= room]
    near, far = -2, -3
    target.slots.open(near)
    target.slots.open(far)
    try:
        target.prefill(near, [1] * short)
        target.prefill(far, [1] * long)
        cases = {("near", n): PassRow(near, [1] * n, n) for n in sizes}
        cases |= {("far", n): PassRow(far, [1] * n, n) for n in (1, WIDE)}
        times: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
        for repeat in range(repeats + 1):
            for case, row in cases.items():
                began = time.perf_counter()
                target.forward([row])
                times[case].append(time.perf_counter() - began)
            tell((repeat + 1) / (repeats + 1))
    finally:
        target.slots.close(near)
        target.slots.close(far)
    seconds = {case: median(found[1:]) for case, found in times.items()}  # the first round is a warm-up
    keys = long - short
    key_s = max(0.0, seconds["far", 1] - seconds["near", 1]) / keys
    wide_s = max(0.0, seconds["far", WIDE] - seconds["near", WIDE]) / keys
    return PassTable(
        tuple(sizes),
        tuple(_rising([seconds["near", n] for n in sizes])),
        key_s,
        max(0.0, wide_s - key_s) / (WIDE - 1),
    )


def _rising(values: list[float]) -> list[float]:
    """Noise taken out of a series that cannot fall: no value is above the next."""
    for i in range(len(values) - 2, -1, -1):
        values[i] = min(values[i], values[i + 1])
    return values
