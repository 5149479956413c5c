"""A load that jumps from 1 to 32 clients and back: how soon does auto draft the right number of tokens?

    python benchmarks/load_jump.py [MODEL] [--plot load_jump.png]

    clients   1 ........ | 32 ........ | 1 ........       a cycle: --steps steps of the engine in each phase
                         ^ 31 requests arrive
                                       ^ 31 requests are dropped

Every fixed length and auto go through the same cycles, in turn. In each phase, steps 20 to the end are compared: auto's
tokens per second with those of the length that was best there, and auto's chosen length with what it had chosen in the
same regime once settled (the second half of the phases, over all cycles). Draws the chosen lengths step by step; the
last line is one JSON document. Exit status 1 if auto is not within 10 % of the best after 20 steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from foredraft import LLM, SpeculativeConfig
from foredraft.engine import Engine
from foredraft.lab.plots import BLUE, GREY, ORANGE, check_path, save
from foredraft.measure.arms import exact_length_params
from foredraft.measure.load_prompts import RequestStream, built_in_stream
from foredraft.measure.load_record import PlanRecorder
from foredraft.types import Request

PHASES = ("one", "many", "one again")
AUTO = "auto"
GRACE = 20
"""Steps after a jump in which auto may still be finding its length."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the engine: seconds, tokens delivered, and the mean draft length chosen (None: only prompts ran)."""

    seconds: float
    num_tokens: int
    draft_len: float | None


class Clients:
    """Keeps so many requests of a stream in flight, whose number may jump."""

    def __init__(self, engine: Engine):
        self.engine, self.recorder = engine, PlanRecorder(engine.policy)
        engine.policy = self.recorder
        self._running: deque[str] = deque()
        self._num_sent = 0

    def run(self, stream: RequestStream, indices: deque[int], num_clients: int, num_steps: int) -> list[Step]:
        """Make steps with ``num_clients`` requests in flight; those that are too many are dropped at once."""
        while len(self._running) > num_clients:
            self.engine.abort(self._running.pop())
        steps = []
        for _ in range(num_steps):
            while len(self._running) < num_clients:
                self._send(stream, indices.popleft())
            num_planned = len(self.recorder.steps)
            began = time.perf_counter()
            outputs = self.engine.step()
            seconds = time.perf_counter() - began
            for output in outputs:
                if output.finish_reason is not None:
                    self._running.remove(output.request_id)
            planned = self.recorder.steps[num_planned:]
            length = planned[0].mean_len if planned else None
            steps.append(Step(seconds, sum(len(output.token_ids) for output in outputs), length))
        return steps

    def _send(self, stream: RequestStream, index: int) -> None:
        wanted = stream[index]
        request_id = f"{self._num_sent}"
        self._num_sent += 1
        params = exact_length_params(0.0, 0, wanted.max_tokens)
        self.engine.add_request(Request(request_id, list(wanted.prompt_token_ids), params, route=wanted.route))
        self._running.append(request_id)


def cycle(clients: Clients, stream: RequestStream, first: int, options: argparse.Namespace) -> list[list[Step]]:
    """The steps of the three phases; nothing is left in flight."""
    indices = deque(range(first, first + 100_000))
    levels = (1, options.concurrency, 1)
    phases = [clients.run(stream, indices, level, options.steps) for level in levels]
    clients.run(stream, indices, 0, 0)
    return phases


def rate(steps: Sequence[Step]) -> float:
    """Tokens per second."""
    return sum(step.num_tokens for step in steps) / sum(step.seconds for step in steps)


def mean_len(steps: Sequence[Step]) -> float:
    lengths = [step.draft_len for step in steps if step.draft_len is not None]
    return sum(lengths) / len(lengths)


def judge(phase: int, cycles: dict[str, list[list[list[Step]]]]) -> dict[str, object]:
    """Auto against the best fixed length in one phase, after the grace."""
    rates = {arm: [rate(found[phase][GRACE:]) for found in each] for arm, each in cycles.items()}
    best = max((arm for arm in rates if arm != AUTO), key=lambda arm: median(rates[arm]))
    goodput = median(auto / other for auto, other in zip(rates[AUTO], rates[best], strict=True))
    chosen = [found[phase] for found in cycles[AUTO]]
    same_regime = [found[other] for found in cycles[AUTO] for other in range(3) if (other == 1) == (phase == 1)]
    settled = mean_len([step for steps in same_regime for step in steps[len(steps) // 2 :]])
    after = mean_len([step for steps in chosen for step in steps[GRACE : GRACE + 20]])
    return {
        "tokens_per_s": {arm: round(median(each), 1) for arm, each in rates.items()},
        "best_fixed_len": int(best),
        "auto_against_best": round(goodput, 3),
        "auto_len_settled": round(settled, 2),
        "auto_len_after_grace": round(after, 2),
        "holds": goodput >= 0.9,
    }


def plot(path: Path, cycles: dict[str, list[list[list[Step]]]], found: dict[str, dict[str, object]], most: int) -> None:
    """Auto's chosen lengths by step: each cycle thin, their mean bold, and the best fixed length of each phase."""
    length = len(cycles[AUTO][0][0])

    def draw(figure) -> None:
        axes = figure.subplots()
        rows = [[step.draft_len for phase in each for step in phase] for each in cycles[AUTO]]
        for row in rows:
            axes.plot([float("nan") if value is None else value for value in row], color=BLUE, alpha=0.25, linewidth=1)
        columns = [[value for value in column if value is not None] for column in zip(*rows, strict=True)]
        means = [sum(column) / len(column) if column else float("nan") for column in columns]
        axes.plot(means, color=BLUE, label="chosen by auto (mean of the cycles bold)")
        for at, name in enumerate(PHASES):
            label = "best fixed length" if at == 0 else None
            axes.hlines(found[name]["best_fixed_len"], at * length, (at + 1) * length, color=ORANGE, label=label)
            axes.text((at + 0.5) * length, 1.01, f"{most if at == 1 else 1} client(s)", ha="center",
                      transform=axes.get_xaxis_transform())  # fmt: skip
            if at:
                axes.axvline(at * length, color=GREY, linestyle="--", linewidth=1)
                axes.axvspan(at * length, at * length + GRACE, color=GREY, alpha=0.12, linewidth=0)
        axes.set_xlabel("step")
        axes.set_ylabel("draft tokens a row")
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.06), ncols=2)

    save(path, draw, width=9.0, height=4.2)


def main(options: argparse.Namespace) -> int:
    check_path(options.plot)
    llm = LLM(
        options.model,
        num_threads=options.threads,
        max_num_seqs=max(64, options.concurrency),
        enable_prefix_caching=False,
    )
    routes, room = options.routes.split(","), llm.engine.target.max_model_len
    stream = built_in_stream(routes, llm.tokenizer, max_tokens=options.max_tokens, seed=0, max_model_len=room)
    arms = {"0": SpeculativeConfig()}
    for length in (1, 3, 5, 7):
        arms[str(length)] = SpeculativeConfig(method=options.method, num_speculative_tokens=length)
    arms[AUTO] = SpeculativeConfig(method=options.method, policy="goodput")
    clients = {name: Clients(llm.new_engine(config)) for name, config in arms.items()}
    cycles: dict[str, list[list[list[Step]]]] = {name: [] for name in arms}
    for repeat in range(options.repeats + 1):  # the first cycle is a warm-up
        names = list(arms)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            phases = cycle(clients[name], stream, repeat * 1200, options)
            if repeat:
                cycles[name].append(phases)
        print(f"cycle {repeat} of {options.repeats}", file=sys.stderr)
    found = {name: judge(phase, cycles) for phase, name in enumerate(PHASES)}
    for name, each in found.items():
        print(f"{name:10}", *(f"{what} {value}" for what, value in each.items()), sep="   ")
    plot(options.plot, cycles, found, options.concurrency)
    document = {"model": options.model, "method": options.method, "steps": options.steps, "cycles": options.repeats}
    print(json.dumps(document | {"concurrency": options.concurrency, "grace_steps": GRACE, "phases": found}))
    return 0 if all(each["holds"] for each in found.values()) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--routes", default="code", help="of code, summary and story, in turn")
    parser.add_argument("--steps", type=int, default=120, help=f"of each phase, above {GRACE}")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--plot", type=Path, default=Path("load_jump.png"))
    sys.exit(main(parser.parse_args()))
