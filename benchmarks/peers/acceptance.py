"""One EAGLE-3 head in vLLM and in foredraft: acceptance by position on the same prompts, greedy.

    python benchmarks/peers/acceptance.py --vllm-python PYTHON --head DIR [--prompts 20] [--max-tokens 128]

The prompts are code edits, summaries and stories of the load generator. A text that differs from the same engine's
plain decoding is reported with the place, and so are those that both engines decode otherwise: in bf16 near-ties fall
either way. ``--dtype float32`` takes them away. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from environments import vllm_environment
from process import Worker
from transformers import AutoTokenizer

from foredraft.measure.load_prompts import ROUTES, built_in_stream
from foredraft.measure.metrics import first_difference
from foredraft.target.zoo import resolve_model

Answers = list[dict[str, Any]]


def run_engine(worker: Worker, modes: Iterable[str], prompts: list[list[int]], max_tokens: int) -> dict[str, Answers]:
    """The answers to all prompts, one by one, of each mode; ends the worker."""
    worker.wake()
    try:
        return {mode: [worker.generate(mode, prompt, max_tokens) for prompt in prompts] for mode in modes}
    finally:
        worker.close()


def places(answers: Answers, others: Answers) -> list[int]:
    """Where texts part, in order; those that never do are left out."""
    found = [first_difference(a["token_ids"], b["token_ids"]) for a, b in zip(answers, others, strict=True)]
    return sorted(place for place in found if place is not None)


def summary(answers: Answers, plain: Answers) -> dict[str, Any]:
    """Acceptance over all prompts, and where texts differ from plain decoding."""
    drafts = sum(answer["num_drafts"] for answer in answers)
    by_position = zip(*(answer["num_accepted_tokens_per_pos"] for answer in answers), strict=True)
    return {
        "acceptance_len": round(1 + sum(answer["num_accepted_tokens"] for answer in answers) / drafts, 3),
        "num_drafts": drafts,
        "accepted_per_position": [round(sum(counts) / drafts, 3) for counts in by_position],
        "differ_from_plain_at": places(answers, plain),
    }


def main(options: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the engines are ended, too
    folder = resolve_model(options.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stream = built_in_stream(ROUTES, tokenizer, max_tokens=options.max_tokens, seed=options.seed, max_model_len=1024)
    prompts = [list(stream[index].prompt_token_ids) for index in range(options.prompts)]
    speculative = {"method": "eagle3", "model": options.head, "num_speculative_tokens": options.num_speculative_tokens}
    modes = {"none": {"method": "none"}, "eagle3": {**speculative, "policy": "fixed"}}
    settings: dict[str, Any] = {"model": str(folder), "threads": options.threads, "dtype": options.dtype}
    threads = str(options.threads)
    environment = vllm_environment(options.vllm_python, options.threads)
    texts = run_engine(
        Worker(sys.executable, "foredraft_worker.py", settings | {"modes": modes}, {"OMP_NUM_THREADS": threads}),
        modes, prompts, options.max_tokens,
    )  # fmt: skip
    our_plain = texts["none"]
    found = {"foredraft": summary(texts["eagle3"], our_plain)}
    for mode in modes:
        config = None if mode == "none" else speculative
        one = settings | {"modes": {mode: config}, "enforce_eager": True}
        worker = Worker(options.vllm_python, "vllm_worker.py", one, environment)
        texts |= run_engine(worker, [mode], prompts, options.max_tokens)
    found["vllm"] = summary(texts["eagle3"], texts["none"])
    for name, row in found.items():
        positions = ", ".join(f"{rate:.3f}" for rate in row["accepted_per_position"])
        print(
            f"{name:10} acceptance length {row['acceptance_len']:.3f}; by position {positions}; "
            f"texts differ from plain at {row['differ_from_plain_at']}"
        )
    parted = places(texts["none"], our_plain)
    print(f"the engines' plain texts part at {parted}")
    ratio = found["vllm"]["acceptance_len"] / found["foredraft"]["acceptance_len"]
    document = {"head": options.head, "dtype": options.dtype, **found, "plain_texts_part_at": parted}
    print(json.dumps(document | {"ratio": round(ratio, 3), "holds": abs(ratio - 1) <= 0.1}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm-python", required=True, help="Python of an environment with vLLM")
    parser.add_argument("--head", required=True, type=lambda text: str(Path(text).resolve()), help="folder of the head")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="folder or short name of the target")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
