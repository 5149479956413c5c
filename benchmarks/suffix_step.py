"""Cost of a step of suffix decoding, and memory per token, by tokens stored.

    python benchmarks/suffix_step.py [DEPTH]

Half of the tokens are the request's own text, half responses of earlier requests. A step takes in four tokens and
drafts up to 16. Texts: this repository's sources as words, a skewed vocabulary with repeated passages, a short
period. Prints medians and the worst twentieth of a thousand steps, in microseconds of processor time.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np

from foredraft.drafters import DraftRow
from foredraft.drafters.response_store import ResponseStore
from foredraft.drafters.suffix import SuffixDrafter, SuffixRule
from foredraft.sampling import SamplingRow
from foredraft.types import SamplingParams

NUM_STEPS, TOKENS_PER_STEP, RESPONSE_LEN = 1000, 4, 500
RULE = SuffixRule()
ROOT = Path(__file__).parent.parent


def sources(size: int) -> list[int]:
    words = [word for path in sorted(ROOT.glob("[st]*/**/*.py")) for word in re.findall(r"\w+|\s+|.", path.read_text())]
    ids = {word: index for index, word in enumerate(dict.fromkeys(words))}
    return ([ids[word] for word in words] * (size // len(words) + 1))[:size]


def skewed(size: int) -> list[int]:
    rng = np.random.default_rng(0)
    tokens: list[int] = []
    while len(tokens) < size:
        if len(tokens) > 100 and rng.random() < 0.1:
            start = int(rng.integers(0, len(tokens) - 50))
            tokens += tokens[start : start + int(rng.integers(5, 50))]
        tokens.append(int(min(rng.zipf(1.3), 20_000)))
    return tokens[:size]


TEXTS = {"sources": sources, "skewed": skewed, "period": lambda size: [i % 11 for i in range(size)]}


def measure(name: str, size: int, depth: int) -> str:
    tokens = TEXTS[name](size + NUM_STEPS * TOKENS_PER_STEP)
    tracemalloc.start()
    store = ResponseStore(depth, size)
    for start in range(0, size // 2, RESPONSE_LEN):
        store.add(tokens[start : start + RESPONSE_LEN])
    memory = tracemalloc.get_traced_memory()[0] / (size // 2)
    tracemalloc.stop()
    drafter = SuffixDrafter(depth, RULE, store)
    text, following = tokens[size // 2 : size], tokens[size:]
    step(drafter, text)
    times = []
    for start in range(0, len(following), TOKENS_PER_STEP):
        text += following[start : start + TOKENS_PER_STEP]
        began = time.process_time()
        drafter.observe(0, text)
        step(drafter, text)
        times.append((time.process_time() - began) * 1e6)
    began = time.process_time()
    for start in range(0, size // 2, RESPONSE_LEN):
        store.add(tokens[start : start + RESPONSE_LEN])
        store.tree.drop_oldest_text()
    turnover = (time.process_time() - began) * 1e6 / (size // 2)
    return (
        f"{name:8} {size:7} tokens  step {statistics.median(times):5.0f} us, 95 % {np.quantile(times, 0.95):5.0f} us  "
        f"{memory:4.0f} bytes a token  turnover {turnover:4.1f} us a token"
    )


def step(drafter: SuffixDrafter, text: list[int]) -> None:
    params = SamplingParams(temperature=0)
    drafter.propose([DraftRow(0, text, 16, 0, "greedy", lambda _: SamplingRow(params))])


if __name__ == "__main__":
    depth = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    for name in TEXTS:
        for size in (10_000, 100_000):
            print(measure(name, size, depth))
