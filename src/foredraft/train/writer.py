"""The target writes, and the hidden states of its passes are kept; no pass is run for them.

A task is a generator: it yields what it asks for and is sent what the target wrote, so that a question can lead to an
answer and that to a follow-up. All tasks of a piece run side by side in one engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.config import SpeculativeConfig
from foredraft.drafters.none import NoDrafter
from foredraft.engine.engine import Engine
from foredraft.engine.llm import LLM
from foredraft.engine.sequence import Sequence as Running
from foredraft.train.dataset import Text
from foredraft.types import FinishReason, Request, SamplingParams

AS_IT_STANDS = SamplingParams(temperature=0.0, max_tokens=1)


@dataclass(frozen=True, slots=True)
class Ask:
    """What a task wants written or read.

    Attributes:
        token_ids: the prompt, or a whole text that is only to be read.
        route: label of the text in the store; None keeps nothing of it.
        origin: see :class:`~foredraft.train.dataset.Text`.
        num_prompt_tokens: where the answer begins in a text that is only read; None lets the target write one.
    """

    token_ids: list[int]
    params: SamplingParams
    route: str | None = None
    origin: int = 0
    num_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """What became of an :class:`Ask`; ``is_cut`` is set where the limit of tokens ended it."""

    text: str
    is_cut: bool


Task = Generator[Ask, Written | None, None]


class Recorder(NoDrafter):
    """Drafts nothing and keeps the target's states of some layers, in bfloat16 on the CPU."""

    def __init__(self, layers: tuple[int, ...]):
        self.feature_layers = layers
        self._parts: dict[int, list[Tensor]] = {}

    def observe_features(self, sequence_id: int, token_ids: list[int], start: int, features: Tensor) -> None:
        if start == 0:  # of a preempted sequence for the second time
            self._parts[sequence_id] = []
        parts = self._parts.get(sequence_id, [])
        assert sum(map(len, parts)) == start
        parts.append(features.flatten(1).to("cpu", torch.bfloat16))

    def take(self, sequence_id: int) -> Tensor:
        """``[tokens fed, layers * hidden]`` of a sequence, which are kept no longer."""
        return torch.cat(self._parts.pop(sequence_id))


class Writer:
    """Runs tasks on a target.

    Args:
        engine: its drafter is a :class:`Recorder`.
    """

    def __init__(self, engine: Engine, tokenizer: Any):
        assert isinstance(engine.drafter, Recorder)
        self.engine, self.tokenizer = engine, tokenizer
        self._recorder = engine.drafter
        self._ids = itertools.count()

    @classmethod
    def of(cls, llm: LLM, layers: tuple[int, ...]) -> Writer:
        """A writer on a target that is loaded."""
        # Plain decoding obeys any rule; this one draws all rows of a step from one uniform number each.
        config = SpeculativeConfig(acceptance_rule="rejection")
        return cls(llm.new_engine(config, Recorder(layers)), llm.tokenizer)

    def run(self, tasks: Sequence[Task]) -> list[Text]:
        """Run tasks to their ends; the texts that they keep, in the order of the tasks."""
        made: list[list[Text]] = [[] for _ in tasks]
        running: dict[str, tuple[int, Ask, Running]] = {}

        def go_on(place: int, written: Written | None) -> None:
            try:
                ask = tasks[place].send(written)
            except StopIteration:
                return
            request = Request(f"text-{next(self._ids)}", ask.token_ids, ask.params)
            running[request.request_id] = place, ask, self.engine.add_request(request)

        try:
            for place in range(len(tasks)):
                go_on(place, None)
            while running:
                for out in self.engine.step():
                    if out.finish_reason is not None:
                        place, ask, sequence = running.pop(out.request_id)
                        features = self._recorder.take(sequence.sequence_id)
                        if ask.route is not None:
                            made[place].append(_text(ask, sequence, features))
                        go_on(place, Written(sequence.detokenizer.text, out.finish_reason == FinishReason.LENGTH))
        finally:
            for request_id in running:
                self.engine.abort(request_id)
        return [text for texts in made for text in texts]


def _text(ask: Ask, sequence: Running, features: Tensor) -> Text:
    token_ids, num_prompt_tokens = sequence.token_ids, len(ask.token_ids)
    if ask.num_prompt_tokens is not None:
        token_ids, num_prompt_tokens = ask.token_ids, ask.num_prompt_tokens
    known = features[: len(token_ids) - 1]
    return Text(torch.tensor(token_ids), num_prompt_tokens, known, ask.route or "", ask.origin)
