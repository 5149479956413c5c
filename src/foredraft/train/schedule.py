"""What changes during training, as functions of the update's number; nothing else has to be kept for a resume."""

from __future__ import annotations

import math
from collections.abc import Callable

GROUND = 0.05
"""The learning rate ends at this share of its maximum."""
SAMPLES = 300


def learning_rate_factor(update: int, num_updates: int, warm_up: float) -> float:
    """Linear to 1 over the share ``warm_up`` of all updates, then half a cosine down to :data:`GROUND`."""
    first = max(1, round(warm_up * num_updates))
    if update < first:
        return (update + 1) / first
    progress = (update - first) / max(1, num_updates - first)
    return GROUND + (1.0 - GROUND) * 0.5 * (1.0 + math.cos(math.pi * progress))


def num_steps_at(update: int, num_updates: int, most: int, is_trained: bool = False) -> int:
    """How many steps a head is unrolled: one in the first third, up to three then, all of them in the last sixth.

    Longer unrolling from the start costs a multiple and learns less in the same time. A head that was trained before
    is unrolled over all of them from the start: with one it would forget what it knows of the later ones.
    """
    if is_trained:
        return most
    if 3 * update < num_updates:
        return 1
    return min(3, most) if 6 * update < 5 * num_updates else most


def updates_within(
    seconds: float, seconds_of: Callable[[int], float], most_steps: int, is_trained: bool = False
) -> int:
    """How many updates fit into a time; ``seconds_of`` gives what one of so many steps takes."""
    cost = {steps: seconds_of(steps) for steps in sorted({1, min(3, most_steps), most_steps})}
    mean = sum(cost[num_steps_at(i, SAMPLES, most_steps, is_trained)] for i in range(SAMPLES)) / SAMPLES
    return max(1, int(seconds / mean))
