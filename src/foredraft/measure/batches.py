"""Throughput of several sequences at once, and whether each gets the tokens that it gets alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foredraft.measure import metrics
from foredraft.measure.arms import ForedraftArm
from foredraft.measure.options import BenchOptions
from foredraft.measure.results import BatchResult


def measure_batches(
    options: BenchOptions,
    arms: Sequence[ForedraftArm],
    prompts: Sequence[Sequence[int]],
    found: Callable[[BatchResult], None],
    tell: Callable[[str, float], None],
) -> None:
    """Decode ``prompts`` one by one, then the first N of them together for each batch size N.

    Results go to ``found`` as they come, so that an interrupted measurement has given what it had.
    """
    cells = [(temperature, arm) for temperature in options.temperatures for arm in arms]
    for index, (temperature, arm) in enumerate(cells):
        tell(f"batches: {arm.method}, temperature {temperature:g}", index / len(cells))
        alone = [
            arm.run(prompt, temperature=temperature, seed=options.seed, max_tokens=options.max_tokens)
            for prompt in prompts
        ]
        for size in options.batch_sizes:
            if size == 1:
                continue
            rates: list[float] = []
            num_identical = size
            for _ in range(options.repeats):
                rows, seconds = arm.run_together(
                    prompts[:size], temperature=temperature, seed=options.seed, max_tokens=options.max_tokens
                )
                same = [row == run.token_ids for row, run in zip(rows, alone, strict=False)]
                num_identical = min(num_identical, sum(same))
                rates.append(metrics.token_rate(sum(map(len, rows)), seconds))
            found(
                BatchResult(
                    method=arm.method,
                    temperature=temperature,
                    batch_size=size,
                    num_tokens=size * options.max_tokens,
                    tokens_per_s=metrics.median_of(rates),
                    alone_tokens_per_s=metrics.median_of(
                        [metrics.token_rate(len(run.token_ids), run.total_s) for run in alone[:size]]
                    ),
                    num_identical=num_identical,
                )
            )
