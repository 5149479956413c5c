"""Arms that need no model: each run is made up, and can be told to fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from foredraft.measure.arms import Run, TimeSplit


def made_up_run(tokens: Sequence[int], *, total_s: float = 2.0, first_s: float = 0.5, width: int = 0) -> Run:
    """A run of plain deliveries, or with ``width`` draft tokens a pass, all of them accepted."""
    emitted = [len(part) for part in _parts(list(tokens), width + 1)]
    split = TimeSplit(0.1 * total_s, 0.8 * total_s, 0.06 * total_s, 0.04 * total_s)
    drafted = [count - 1 for count in emitted]
    return Run(list(tokens), drafted, emitted, len(emitted), first_s, total_s, split)


def _parts(tokens: list[int], size: int) -> list[list[int]]:
    return [tokens[start : start + size] for start in range(0, len(tokens), size)]


@dataclass
class ScriptedArm:
    """Notes what it is asked for; ``on_run`` is called first and may raise."""

    engine: str
    method: str
    num_speculative_tokens: int = 0
    total_s: float = 2.0
    on_run: Callable[[], None] = lambda: None
    asked: list[dict[str, Any]] = field(default_factory=list)

    def run(self, prompt: Sequence[int], *, temperature: float, seed: int, max_tokens: int) -> Run:
        self.on_run()
        self.asked.append({"temperature": temperature, "seed": seed, "max_tokens": max_tokens})
        tokens = [(seed if temperature else 0) + prompt[0] + index for index in range(max_tokens)]
        return made_up_run(tokens, total_s=self.total_s, width=self.num_speculative_tokens)
