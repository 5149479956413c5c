"""Write the prompts that draft heads are measured on: the target's own words, 25 chats, code, summaries, general ones.

    python benchmarks/heldout_prompts.py [MODEL] [--store DIR] [--out FILE]

They are made as training texts are (``foredraft.train.own_words``), from another seed; a prompt that stands in the
store of training texts is left out. For ``foredraft bench --dataset FILE``.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foredraft.target.features import AFTER_NORM
from foredraft.train.collect import load_writer
from foredraft.train.dataset import TextStore
from foredraft.train.own_words import OwnWords
from foredraft.train.writer import Ask, Task

NUM_PIECES = 2
SEED = 1_000_003


def noting(task: Task, asks: list[Ask]) -> Task:
    """A task that asks the same, whose requests are noted."""
    written = None
    while True:
        try:
            ask = task.send(written)
        except StopIteration:
            return
        if ask.route is not None:
            asks.append(ask)
        if ask.route in ("chat", "summary"):  # nothing follows, so the answer is not needed
            return
        written = yield ask


def content_of(ask: Ask, tokenizer: Any) -> str:
    """The user's part of a prompt."""
    mark = "|content|"
    message = [{"role": "user", "content": mark}]
    head, tail = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False).split(mark)
    return str(tokenizer.decode(ask.token_ids)).removeprefix(head).removesuffix(tail)


def prompts(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    llm, writer = load_writer(options.model, (AFTER_NORM,))
    source = OwnWords(llm.tokenizer, writer.engine.target.max_model_len, seed=SEED)
    seen = TextStore(options.store).prompts() if options.store else set()
    by_task: list[list[Ask]] = []
    for piece in range(NUM_PIECES):
        tasks = []
        for task in source.tasks(piece, seen):
            by_task.append([])
            tasks.append(noting(task, by_task[-1]))
        writer.run(tasks)
    draws = random.Random(SEED)
    for route in ("chat", "code", "summary", "general"):
        of_route = [ask for asks in by_task for ask in asks if ask.route == route]
        for ask in draws.sample(of_route, options.per_route):
            yield {"category": route, "prompt": content_of(ask, llm.tokenizer)}


def main(options: argparse.Namespace) -> None:
    lines = [json.dumps(prompt, ensure_ascii=False) for prompt in prompts(options)]
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} prompts in {options.out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--store", help="directory of training texts, none of whose prompts is taken")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("heldout_prompts.jsonl"))
    parser.add_argument("--per-route", type=int, default=25)
    main(parser.parse_args())
