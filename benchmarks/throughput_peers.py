"""Plain continuous batching: ours, transformers' own (the engine behind ``generate_batch``) and vLLM, arms in turn.

    python benchmarks/throughput_peers.py [MODEL] [--requests 32] [--vllm-python /path/to/its/bin/python]

All arms get the same prompts at once, fresh ones in every round, and make the same number of tokens of each, greedily,
end tokens ignored, prefix caches off. Seconds run from the first request to the last token; loading and one warm-up
round are left out. vLLM runs in a process of its own (vllm_batches.py). The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import IO, Any, Protocol

import torch
from peers.environments import vllm_environment
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from foredraft import LLM, SpeculativeConfig
from foredraft.measure.arms import ForedraftArm
from foredraft.measure.load_prompts import ROUTES, built_in_stream
from foredraft.target.loader import load_model

OURS = "foredraft"
ROOM = 1024
"""Most tokens of a prompt with its output, for arms that must know."""


class Arm(Protocol):
    def run(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Seconds to complete all prompts at once with exactly ``max_tokens`` tokens each."""
        ...


class OurArm:
    def __init__(self, llm: LLM):
        self._arm = ForedraftArm(llm, SpeculativeConfig())

    def run(self, prompts: list[list[int]], max_tokens: int) -> float:
        outputs, seconds = self._arm.run_together(prompts, temperature=0.0, seed=0, max_tokens=max_tokens)
        check_lengths(OURS, map(len, outputs), max_tokens)
        return seconds


class TransformersArm:
    """The manager is made before the clock starts, and ended after it: idle, its thread would take time from others.

    On a CPU it would take most of the memory for its cache, so the number of blocks is given: two a request.
    """

    def __init__(self, model: str):
        self._model = load_model(model, dtype="auto", device="auto", trust_remote_code=False, cache_dir=None).model
        self.attention = self._model.config._attn_implementation

    def run(self, prompts: list[list[int]], max_tokens: int) -> float:
        generation = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        config = ContinuousBatchingConfig(
            num_blocks=2 * len(prompts) + 2, max_batch_tokens=ROOM, allow_block_sharing=False
        )
        hints = WorkloadHints(max(map(len, prompts)), max_tokens, len(prompts))
        with self._model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config, workload_hints=hints, timeout=10
        ) as manager:
            began = time.perf_counter()
            manager.add_requests(prompts, max_new_tokens=max_tokens)
            lengths = []
            while len(lengths) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("the generation thread of transformers ended before its requests did")
                if result is not None and result.error is not None:
                    raise RuntimeError(f"transformers failed: {result.error}")
                if result is not None and result.is_finished():
                    lengths.append(len(result.generated_tokens))
            seconds = time.perf_counter() - began
        check_lengths("transformers", lengths, max_tokens)
        return seconds


class VllmArm:
    """A process with the other environment's Python."""

    def __init__(self, python: str, folder: str, threads: int, num_requests: int):
        runner = Path(__file__).with_name("vllm_batches.py")
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        self._process = subprocess.Popen(
            [python, str(runner), folder, str(num_requests), str(ROOM)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=os.environ | vllm_environment(python, threads),
        )  # fmt: skip
        self._answer()

    def run(self, prompts: list[list[int]], max_tokens: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        check_lengths("vllm", answer["lengths"], max_tokens)
        return float(answer["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _answer(self) -> dict[str, Any]:
        """The next answer; what vLLM itself writes to stdout is passed over."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                return dict(json.loads(line.removeprefix("RESULT ")))
        self._log.seek(0)
        tail = self._log.read().decode(errors="replace")[-3000:]
        raise RuntimeError(f"vLLM ended with status {self._process.wait()}:\n{tail}")


def check_lengths(arm: str, lengths: Any, wanted: int) -> None:
    """All arms must have done the same work."""
    found = sorted(set(lengths))
    if found != [wanted]:
        raise RuntimeError(f"{arm} made outputs of {found} tokens instead of {wanted}")


def measure(options: argparse.Namespace, llm: LLM, arms: dict[str, Arm]) -> dict[str, list[float]]:
    """Tokens per second of each arm and round; the first round is a warm-up with few tokens."""
    stream = built_in_stream(ROUTES, llm.tokenizer, max_tokens=options.max_tokens, seed=0, max_model_len=ROOM)
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(options.repeats + 1):
        first = repeat * options.requests
        prompts = [list(stream[first + index].prompt_token_ids) for index in range(options.requests)]
        max_tokens = options.max_tokens if repeat else 8
        names = list(arms)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            seconds = arms[name].run(prompts, max_tokens)
            if repeat:
                rates[name].append(options.requests * max_tokens / seconds)
                print(f"round {repeat}: {name:14} {rates[name][-1]:7.1f} tokens/s", file=sys.stderr)
    return rates


def main(options: argparse.Namespace) -> None:
    threads = options.threads or torch.get_num_threads()
    llm = LLM(options.model, num_threads=threads, max_num_seqs=options.requests, enable_prefix_caching=False)
    arms: dict[str, Arm] = {OURS: OurArm(llm), "transformers": TransformersArm(options.model)}
    vllm = None
    if options.vllm_python:
        vllm = arms["vllm"] = VllmArm(options.vllm_python, str(llm.loaded.path), threads, options.requests)
    try:
        rates = measure(options, llm, arms)
    finally:
        if vllm is not None:
            vllm.close()
    ratios = {
        name: median(ours / theirs for ours, theirs in zip(rates[OURS], rates[name], strict=True))
        for name in arms
        if name != OURS
    }
    for name, found in rates.items():
        against = f"   ours / theirs {ratios[name]:.2f}" if name in ratios else ""
        print(f"{name:14} {median(found):7.1f} tokens/s{against}")
    print(
        json.dumps(
            {
                "model": options.model,
                "requests": options.requests,
                "max_tokens": options.max_tokens,
                "rounds": options.repeats,
                "threads": threads,
                "contract": llm.numerics.contract,
                "transformers_attention": arms["transformers"].attention,
                "tokens_per_s": {name: round(median(found), 1) for name, found in rates.items()},
                "ours_against": {name: round(value, 3) for name, value in ratios.items()},
                "holds": all(value >= 0.9 for value in ratios.values()),
            }
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of every arm; torch's own if left out")
    parser.add_argument("--vllm-python", help="also run vLLM: the Python of the environment that it is installed in")
    main(parser.parse_args())
