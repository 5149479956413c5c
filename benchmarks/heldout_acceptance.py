"""A trained head on the 100 held-out prompts, greedy, to the end of each answer: tokens a target pass and time against
plain decoding. Arms in turn on every prompt; the tokens must be those of plain decoding. The last line is JSON.

    python benchmarks/heldout_acceptance.py [MODEL] [--head smollm2-135m-instruct-eagle3] [--max-tokens 160] [--limit N]
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from foredraft import LLM, SamplingParams, SpeculativeConfig
from foredraft.engine import Engine
from foredraft.measure.workloads import dataset_workloads
from foredraft.types import Request

PROMPTS = Path(__file__).parent / "heldout_prompts.jsonl"
BEAM = {"num_speculative_tokens": 7, "tree_width": 3, "tree_beam": 1}
ARMS: dict[str, dict[str, Any]] = {
    "plain": {"method": "none"},
    "chain of 4": {"method": "eagle3", "num_speculative_tokens": 4, "policy": "fixed"},
    "tree of 16": {"method": "eagle3", "num_speculative_tokens": 16, "tree_width": 4, "policy": "fixed"},
    "beam of 1": {"method": "eagle3", **BEAM, "policy": "fixed"},
    "n-gram + chain, goodput": {"method": "ngram+eagle3"},
    "n-gram + beam, goodput": {"method": "ngram+eagle3", **BEAM},
}


def main(options: argparse.Namespace) -> None:
    llm = LLM(options.model, max_num_seqs=1, enable_prefix_caching=False)
    engines = {
        name: llm.new_engine(SpeculativeConfig(**arm, **({} if name == "plain" else {"model": options.head})))
        for name, arm in ARMS.items()
    }
    totals: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])  # tokens, passes, seconds
    num_different = 0
    for workload in dataset_workloads(PROMPTS, llm.tokenizer, options.limit, 1024):
        for engine in engines.values():
            answer(engine, workload.prompts[0], 16)  # warm up
        for number, prompt in enumerate(workload.prompts):
            texts = {}
            names = list(engines)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                began = time.perf_counter()
                texts[name], num_passes = answer(engines[name], prompt, options.max_tokens)
                seconds = time.perf_counter() - began
                for category in (workload.name, "all"):
                    counted = totals[category, name]
                    counted[:] = [a + b for a, b in zip(counted, (len(texts[name]), num_passes, seconds), strict=True)]
            num_different += sum(text != texts["plain"] for text in texts.values())
        show(workload.name, totals)
    show("all", totals)
    rows = [
        {"category": category, "arm": name, "num_tokens": tokens, "num_target_passes": passes, "seconds": round(s, 3)}
        for (category, name), (tokens, passes, s) in totals.items()
    ]
    contract = engines["chain of 4"].contract
    print(json.dumps({"model": options.model, "contract": contract, "different": num_different, "arms": rows}))


def answer(engine: Engine, prompt: tuple[int, ...], max_tokens: int) -> tuple[list[int], int]:
    """Output tokens, and passes of the target that emitted some."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    sequence = engine.add_request(Request("held-out", list(prompt), params))
    while engine.has_unfinished_requests:
        engine.step()
    return sequence.output_token_ids, sequence.metrics.num_target_passes


def show(category: str, totals: dict[tuple[str, str], list[float]]) -> None:
    plain = totals[category, "plain"]
    for name in ARMS:
        tokens, passes, seconds = totals[category, name]
        ratio = plain[2] / seconds
        print(f"{category:10} {name:24} {tokens / passes:5.2f} tokens a pass {tokens / seconds:7.1f}/s {ratio:5.2f} x")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--head", default="smollm2-135m-instruct-eagle3")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--limit", type=int, help="prompts of each category")
    main(parser.parse_args())
