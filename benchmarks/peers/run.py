"""foredraft against transformers, vLLM, OpenVINO and llama.cpp: the same weights, bf16, one stream, arms in turn.

    python benchmarks/peers/run.py --vllm-python PYTHON --openvino-python PYTHON \
        --llama-server BINARY --llama-source FOLDER --llama-python PYTHON [--head DIR] [--arm '{"method": ..., ...}']

README.md beside this file says how the environments are made. A peer whose environment is not given is left out.
Each engine runs in a process of its own, which is stopped while another one is measured. Greedy, end tokens ignored,
192 new tokens, medians over the rounds; the first round, a short one, is a warm-up. Before each timed run the machine
must be idle. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from engines import NEEDED, OURS, Engine, engines, left_out
from process import Worker, wait_until_idle
from transformers import AutoTokenizer

from foredraft.measure.machine import cpu
from foredraft.measure.metrics import decode_rate, first_difference
from foredraft.measure.workloads import built_in_workload
from foredraft.target.zoo import cache_folder, resolve_model

WARM_UP_TOKENS = 32
MOST_BUSY = 0.05


@dataclass
class Arm:
    """One mode of one engine, and what it did on each prompt in each counted round."""

    engine: str
    mode: str
    worker: Worker
    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.engine} {self.mode}"

    def run(self, prompt: Sequence[int], max_tokens: int, idle_limit_s: float) -> dict[str, Any]:
        """One completion on an idle machine; ``busy`` is the share of it that others used just before."""
        busy = wait_until_idle(idle_limit_s, MOST_BUSY)
        self.worker.wake()
        try:
            answer = self.worker.generate(self.mode, list(prompt), max_tokens)
        finally:
            self.worker.sleep()
        return answer | {"busy": round(busy, 3)}

    def rates(self, prompt: str) -> list[float]:
        """Tokens per second behind the first delivery, by round."""
        return [
            decode_rate(len(a["token_ids"]), a["first_s"], a["total_s"], a["num_first_tokens"])
            for a in self.answers[prompt]
        ]

    def rate(self, prompt: str) -> float:
        return median(self.rates(prompt))


def start(chosen: Sequence[Engine], threads: int, stack: ExitStack) -> tuple[list[Arm], dict[str, Any], dict[str, str]]:
    """Load the engines, one after the other; the stack ends their processes.

    Returns:
        the arms, what the engines say of themselves, and why an engine could not be loaded, by name and modes.
    """
    arms: list[Arm] = []
    about: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for engine in chosen:
        began = time.monotonic()
        label = f"{engine.name} ({', '.join(engine.modes)})"
        settings = {"model": engine.model, "threads": threads, "dtype": "bfloat16", "modes": dict(engine.modes)}
        try:
            worker = Worker(engine.python, engine.script, settings | dict(engine.more), engine.environment)
        except RuntimeError as error:
            failed[label] = str(error)
            say(f"{label} could not be loaded: {error}")
            continue
        stack.callback(worker.close)
        about[engine.name] = worker.about
        arms += [Arm(engine.name, mode, worker) for mode in engine.modes]
        say(f"{label} loaded in {time.monotonic() - began:.0f} s")
    return arms, about, failed


def measure(arms: Sequence[Arm], prompts: dict[str, Sequence[int]], options: argparse.Namespace) -> None:
    """Every arm on every prompt in turn; each round begins with another arm."""
    for number in range(options.rounds + 1):
        first = number % len(arms)
        for prompt, token_ids in prompts.items():
            for arm in [*arms[first:], *arms[:first]]:
                max_tokens = options.max_tokens if number else min(options.max_tokens, WARM_UP_TOKENS)
                answer = arm.run(token_ids, max_tokens, options.idle_limit if number else 0.0)
                if number:
                    arm.answers.setdefault(prompt, []).append(answer)
                    busy = f"   (the machine was {answer['busy']:.0%} busy)" if answer["busy"] > MOST_BUSY else ""
                    say(f"round {number}, {prompt}: {arm.name:32} {arm.rates(prompt)[-1]:7.1f} tokens/s{busy}")


def best(arms: Sequence[Arm], engine: str, prompt: str) -> Arm:
    return max((arm for arm in arms if arm.engine == engine), key=lambda arm: arm.rate(prompt))


def arm_document(arm: Arm, arms: Sequence[Arm], prompt: str) -> dict[str, Any]:
    """Figures of an arm on a prompt: rates by round and their median, and of its last round what it can tell."""
    last = arm.answers[prompt][-1]
    plain = {a.engine: a.answers[prompt][-1]["token_ids"] for a in arms if a.mode == "none"}
    accepted, drafts = last.get("num_accepted_tokens"), last.get("num_drafts")
    return {
        "engine": arm.engine,
        "mode": arm.mode,
        "prompt": prompt,
        "decode_tokens_per_s": round(arm.rate(prompt), 2),
        "by_round": [round(rate, 2) for rate in arm.rates(prompt)],
        "first_token_s": round(median(a["first_s"] for a in arm.answers[prompt]), 4),
        "tokens_per_s": round(median(len(a["token_ids"]) / a["total_s"] for a in arm.answers[prompt]), 2),
        "acceptance_len": round(1 + accepted / drafts, 3) if drafts else None,
        "num_draft_tokens": last.get("num_draft_tokens"),
        "num_accepted_tokens": accepted,
        "differs_from_plain_at": first_difference(last["token_ids"], plain[arm.engine]),
        "plain_differs_from_ours_at": first_difference(plain[arm.engine], plain.get(OURS, plain[arm.engine])),
        "most_busy": max(a["busy"] for a in arm.answers[prompt]),
        "split_s": {name: round(s, 4) for name, s in last.get("split_s", {}).items()} or None,
    }


def ratio_document(arms: Sequence[Arm], peer: str, prompt: str) -> dict[str, Any]:
    """Our best arm against a peer's best mode: the median over the rounds, whose runs lie side by side."""
    ours, theirs = best(arms, OURS, prompt), best(arms, peer, prompt)
    ratio = median(a / b for a, b in zip(ours.rates(prompt), theirs.rates(prompt), strict=True))
    return {
        "prompt": prompt,
        "peer": peer,
        "our_arm": ours.mode,
        "their_mode": theirs.mode,
        "ratio": round(ratio, 3),
        "needed": NEEDED[peer],
        "holds": ratio >= NEEDED[peer],
    }


def show(figures: Sequence[dict[str, Any]], ratios: Sequence[dict[str, Any]]) -> None:
    """The tables for people; where our best arm falls short, where its time goes."""
    print(
        f"{'arm':38} {'prompt':6} {'tokens/s':>8}  {'first token':>11}  {'acceptance':>10}  differs from its plain at"
    )
    for row in figures:
        length = "" if row["acceptance_len"] is None else f"{row['acceptance_len']:.2f}"
        place = row["differs_from_plain_at"]
        print(
            f"{row['engine'] + ' ' + row['mode']:38} {row['prompt']:6} {row['decode_tokens_per_s']:8.1f}  "
            f"{1000 * row['first_token_s']:8.0f} ms  {length:>10}  {'-' if place is None else place}"
        )
    for row in ratios:
        verdict = "" if row["holds"] else f"   short of {row['needed']}"
        pair = f"foredraft {row['our_arm']} / {row['peer']} {row['their_mode']}"
        print(f"{row['prompt']}: {pair} = {row['ratio']:.2f}{verdict}")
        if not row["holds"]:
            key = (OURS, row["our_arm"], row["prompt"])
            ours = next(f for f in figures if (f["engine"], f["mode"], f["prompt"]) == key)
            total = sum(ours["split_s"].values())
            parts = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in ours["split_s"].items())
            print(f"    our time: {parts}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(options: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the engines are ended, too
    folder = resolve_model(options.model)
    for name in left_out(options):
        say(f"{name} is left out: no environment is given for it")
    chosen = [engine for engine in engines(options, folder) if not options.only or engine.name in options.only]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = {name: built_in_workload(name, tokenizer, 0).prompts[0] for name in options.prompts}
    began = time.monotonic()
    with ExitStack() as stack:
        arms, about, failed = start(chosen, options.threads, stack)
        measure(arms, prompts, options)
    figures = [arm_document(arm, arms, prompt) for prompt in prompts for arm in arms]
    measured = {arm.engine for arm in arms}
    peers = [name for name in NEEDED if {OURS, name} <= measured]
    ratios = [ratio_document(arms, peer, prompt) for prompt in prompts for peer in peers]
    show(figures, ratios)
    document = {
        "model": options.model,
        "prompts": {name: len(token_ids) for name, token_ids in prompts.items()},
        "max_tokens": options.max_tokens,
        "rounds": options.rounds,
        "threads": options.threads,
        "head": options.head,
        "machine": cpu(),
        "engines": about,
        "left_out": left_out(options),
        "failed": failed,
        "arms": figures,
        "ratios": ratios,
        "all_hold": all(row["holds"] for row in ratios),
        "total_s": round(time.monotonic() - began, 1),
    }
    print(json.dumps(document))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="folder or short name")
    parser.add_argument("--head", help="folder of an EAGLE-3 head, for our arms and for vLLM")
    parser.add_argument("--arm", action="append", default=[], help="one more arm of ours: a speculative config in JSON")
    parser.add_argument("--policies", nargs="+", default=["goodput", "fixed"], help="of our arms")
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM")
    parser.add_argument("--openvino-python", help="Python of an environment with OpenVINO GenAI and optimum-intel")
    parser.add_argument("--llama-server", help="llama.cpp's server")
    parser.add_argument("--llama-source", help="llama.cpp's source tree, to convert the weights")
    parser.add_argument("--llama-python", default=sys.executable, help="Python with what the conversion needs")
    parser.add_argument("--only", action="append", choices=[OURS, *NEEDED], help="run these engines only")
    parser.add_argument("--cache", type=Path, default=cache_folder() / "peers", help="converted weights are kept there")
    parser.add_argument("--prompts", nargs="+", default=["code", "story"])
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle-limit", type=float, default=60.0, help="seconds to wait for an idle machine, each run")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
