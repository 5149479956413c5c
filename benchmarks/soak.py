"""A long run with everything at once: random prompts, lengths, parameters and aborts, and nothing may leak or hang.

    python benchmarks/soak.py [MODEL] [--requests 2000] [--minutes 10]

The invariants of slots and scheduler are checked as it goes; memory (VmRSS, Linux) is compared between the first
quarter, once every size has been met, and the end. The last line is one JSON document; exit status 1 if a request got
stuck, something was left behind, memory grew by more than 2 %, or the time did not suffice.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

# oneDNN keeps a compiled kernel for each shape, up to 1,024 of them: it would fill for as long as the run takes.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
os.environ.setdefault("LRU_CACHE_CAPACITY", "64")

from foredraft import LLM, SamplingParams
from foredraft.engine import Engine
from foredraft.engine.sequence import Sequence
from foredraft.measure.load_prompts import ROUTES, built_in_stream
from foredraft.types import Request

ABORTED = 0.15
"""Share of the requests that are aborted, at a random moment from the queue to the last token."""
STUCK_STEPS = 1000
"""A request that is in the engine and gets nothing for so many steps is stuck."""
GROWTH = 0.02
CHECK_EVERY = 25


@dataclass(slots=True)
class Flight:
    """A request in the engine.

    Attributes:
        abort_after: it is aborted after so many steps, if it is not done by then.
        last_step: when it was sent or got its last tokens.
    """

    sequence: Sequence
    abort_after: int | None
    sent_step: int
    last_step: int


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    """Every kind of parameter, most of them left alone most of the time."""

    def maybe(chance: float, value: object, otherwise: object) -> object:
        return value if rng.random() < chance else otherwise

    max_tokens = rng.randint(1, 80)
    return SamplingParams.from_options(
        {
            "temperature": rng.choice((0.0, 0.0, 0.7, 1.0)),
            "top_k": maybe(0.3, rng.randint(1, 50), 0),
            "top_p": maybe(0.3, rng.uniform(0.5, 1.0), 1.0),
            "min_p": maybe(0.1, 0.05, 0.0),
            "repetition_penalty": maybe(0.1, 1.2, 1.0),
            "presence_penalty": maybe(0.1, 0.5, 0.0),
            "frequency_penalty": maybe(0.1, 0.5, 0.0),
            "seed": maybe(0.5, rng.randrange(2**31), None),
            "max_tokens": max_tokens,
            "min_tokens": maybe(0.2, rng.randint(0, max_tokens), 0),
            "stop": maybe(0.2, ("\n\n", "the end"), ()),
            "stop_token_ids": maybe(0.1, (rng.randrange(vocab_size),), ()),
            "ignore_eos": rng.random() < 0.5,
            "logprobs": maybe(0.1, rng.randint(0, 3), None),
        }
    )


def random_requests(llm: LLM, count: int, seed: int) -> Iterator[Request]:
    """Pieces of the built-in prompts, from one token to all of it, each with its own parameters."""
    rng = random.Random(seed)
    target = llm.engine.target
    stream = built_in_stream(ROUTES, llm.tokenizer, max_tokens=16, seed=seed, max_model_len=target.max_model_len)
    for index in range(count):
        whole = stream[index]
        length = rng.randint(1, min(len(whole.prompt_token_ids), 120))
        yield Request(
            f"soak-{index}",
            list(whole.prompt_token_ids[-length:]),
            random_params(rng, target.vocab_size),
            route=whole.route,
            num_speculative_tokens=rng.choice((None, None, None, 0, 2)),
            priority=rng.choice((0, 0, 0, 1, -1)),
        )


class Soak:
    """Keeps a changing number of requests in flight, up to the engine's limit and beyond it, and watches them."""

    def __init__(self, engine: Engine, seed: int, most_in_flight: int):
        self.engine, self.most = engine, most_in_flight
        self.reasons: Counter[str] = Counter()
        self.problems: list[str] = []
        self.rss_bytes: list[int] = []
        self.num_steps = self.num_sent = self.num_tokens = 0
        self._rng = random.Random(f"aborts {seed}")
        self._flights: dict[str, Flight] = {}

    def run(self, requests: Iterator[Request], count: int, deadline_s: float) -> None:
        """Serve all requests, or until the deadline; what is left then is aborted and reported."""
        wanted = self.most
        next_request = next(requests, None)
        while (next_request is not None or self._flights) and not self.problems:
            if time.perf_counter() > deadline_s:
                self.problems.append(f"only {sum(self.reasons.values())} of {count} requests in the time given")
                break
            if self.num_steps % 100 == 0:  # the first quarter reaches the largest batch, so that memory settles
                wanted = self.most if self.num_sent < count // 4 else self._rng.randint(1, self.most)
            while next_request is not None and len(self._flights) < wanted:
                self._send(next_request)
                next_request = next(requests, None)
            self._step()
        for request_id in list(self._flights):
            self._end(request_id, "left over")

    def _send(self, request: Request) -> None:
        abort_after = self._rng.randint(0, 60) if self._rng.random() < ABORTED else None
        sequence = self.engine.add_request(request)
        self._flights[request.request_id] = Flight(sequence, abort_after, self.num_steps, self.num_steps)
        self.num_sent += 1

    def _step(self) -> None:
        for output in self.engine.step():
            flight = self._flights[output.request_id]
            flight.last_step = self.num_steps
            self.num_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                self.reasons[output.finish_reason.value] += 1
                del self._flights[output.request_id]
        self.num_steps += 1
        for request_id, flight in list(self._flights.items()):
            if flight.abort_after is not None and self.num_steps - flight.sent_step > flight.abort_after:
                self._end(request_id, "abort")
            elif self.num_steps - flight.last_step > STUCK_STEPS:
                self.problems.append(f"{request_id} got nothing for {STUCK_STEPS} steps")
        if self.num_steps % CHECK_EVERY == 0:
            self._check()

    def _end(self, request_id: str, reason: str) -> None:
        self.engine.abort(request_id)
        del self._flights[request_id]
        self.reasons[reason] += 1

    def _check(self) -> None:
        self.engine.check_integrity()
        self.engine.preempt(self._rng.choice(list(self.engine.sequences) or [""]))
        known, ours = set(self.engine.sequences), set(self._flights)
        if known != ours:
            self.problems.append(f"the engine and its user disagree about the requests {sorted(known ^ ours)}")
        self.rss_bytes.append(rss_bytes())

    def check_empty(self) -> None:
        """Nothing of any request may be left."""
        engine = self.engine
        engine.check_integrity()
        gc.collect()
        left = {
            "sequences": len(engine.sequences),
            "waiting or running": int(engine.scheduler.has_work),
            "slots in use": engine.target.slots.num_open,
            "Sequence objects": sum(type(each) is Sequence for each in gc.get_objects()),
        }
        self.problems += [f"{what} left at the end: {number}" for what, number in left.items() if number]

    def growth(self) -> float:
        """Memory of the last tenth of the run over that of the tenth behind the first quarter, less 1; medians."""
        tenth = max(1, len(self.rss_bytes) // 10)
        start = len(self.rss_bytes) // 4
        before, after = self.rss_bytes[start : start + tenth], self.rss_bytes[-tenth:]
        return median(after) / median(before) - 1.0 if after else 0.0


def rss_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(options: argparse.Namespace) -> int:
    config = {"method": options.method, "policy": "goodput"}
    llm = LLM(options.model, speculative_config=config, num_threads=options.threads, max_num_seqs=32)
    soak = Soak(llm.engine, options.seed, most_in_flight=40)
    began = time.perf_counter()
    requests = random_requests(llm, options.requests, options.seed)
    soak.run(requests, options.requests, began + 60.0 * options.minutes)
    seconds = time.perf_counter() - began
    soak.check_empty()
    growth = soak.growth()
    if growth > GROWTH:
        soak.problems.append(f"memory grew by {growth:.1%}")
    for problem in soak.problems:
        print(f"FAILED: {problem}")
    document = {
        "model": options.model,
        "method": options.method,
        "requests": sum(soak.reasons.values()),
        "ended": dict(soak.reasons),
        "new_tokens": soak.num_tokens,
        "steps": soak.num_steps,
        "seconds": round(seconds, 1),
        "rss_mb": round(median(soak.rss_bytes) / 1e6) if soak.rss_bytes else None,
        "rss_growth": round(growth, 4),
        "problems": soak.problems,
    }
    print(json.dumps(document))
    return 1 if soak.problems else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    sys.exit(main(parser.parse_args()))
