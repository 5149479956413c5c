"""Ten similar edits of one file, one after the other, as an agent makes them: plain against suffix decoding that keeps
the responses. The last line is one JSON document.

python benchmarks/agent_edits.py [MODEL] [--max-tokens 256]
"""

from __future__ import annotations

import argparse
import json
import time

from foredraft import LLM, SamplingParams, SpeculativeConfig
from foredraft.engine import Engine
from foredraft.types import Request

FILE = '''class Inventory:
    """Items in stock, by name."""

    def __init__(self):
        self.items = {}

    def add(self, name, amount):
        """Put an amount of an item into stock."""
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.items[name] = self.items.get(name, 0) + amount

    def remove(self, name, amount):
        """Take an amount of an item out of stock."""
        if self.items.get(name, 0) < amount:
            raise ValueError("not enough in stock")
        self.items[name] -= amount

    def total(self):
        """Number of items of all kinds."""
        return sum(self.items.values())
'''
EDITS = (
    "Rename the method `add` to `put`.",
    "Rename the method `remove` to `take`.",
    "Rename the method `total` to `count`.",
    "Rename the class to `Stock`.",
    "Rename the attribute `items` to `amounts`.",
    "Rename the parameter `name` to `item`.",
    "Rename the parameter `amount` to `quantity`.",
    "Let `total` return a float.",
    "Change the message `not enough in stock` to `out of stock`.",
    "Change the message `amount must be positive` to `amount must be above zero`.",
)
METHODS = {
    "none": SpeculativeConfig(method="none"),
    "suffix": SpeculativeConfig(method="suffix", suffix_decoding_max_cached_requests=100),
    "suffix, own text only": SpeculativeConfig(method="suffix"),
    "ngram": SpeculativeConfig(method="ngram"),
}


def decode(engine: Engine, name: str, token_ids: list[int], max_tokens: int) -> tuple[list[int], int, float]:
    """Output, target passes and seconds of one request."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    began = time.perf_counter()
    sequence = engine.add_request(Request(name, token_ids, params))
    while engine.has_unfinished_requests:
        engine.step()
    return sequence.output_token_ids, sequence.metrics.num_target_passes, time.perf_counter() - began


def main(model: str, max_tokens: int) -> None:
    llm = LLM(model)
    engines = {method: llm.new_engine(config) for method, config in METHODS.items()}
    warm_up = llm.chat_token_ids([{"role": "user", "content": "Count from one to ten."}])
    for engine in engines.values():
        decode(engine, "warm-up", warm_up, 16)
    tokens = dict.fromkeys(METHODS, 0)
    passes = dict.fromkeys(METHODS, 0)
    seconds = dict.fromkeys(METHODS, 0.0)
    for edit in EDITS:
        prompt = llm.chat_token_ids([{"role": "user", "content": f"{edit} Return the full file.\n\n{FILE}"}])
        outputs = {}
        for method, engine in engines.items():
            outputs[method], num_passes, took_s = decode(engine, edit, prompt, max_tokens)
            tokens[method] += len(outputs[method])
            passes[method] += num_passes
            seconds[method] += took_s
        identical = all(output == outputs["none"] for output in outputs.values())
        print(f"{edit:75} {len(outputs['none']):4} tokens, identical: {identical}")
    found = {
        method: {
            "tokens_per_s": round(tokens[method] / seconds[method], 1),
            "tokens_per_target_pass": round(tokens[method] / passes[method], 2),
            "ratio": round(seconds["none"] / seconds[method], 2),
        }
        for method in METHODS
    }
    for method, figures in found.items():
        print(f"{method:24}", *(f"{name} {value}" for name, value in figures.items()), sep="   ")
    print(json.dumps({"model": model, "contract": engines["suffix"].contract, "methods": found}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--max-tokens", type=int, default=256)
    options = parser.parse_args()
    main(options.model, options.max_tokens)
