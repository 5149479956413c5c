"""Log-probabilities of tokens that came without them: asked for afterwards, one token after each prefix.

llama.cpp, for one, reports none for the tokens of a draft round. The distribution after a prefix can be had all the
same: the prompt and the tokens so far, as ids, with one new token. It comes from a pass of another shape, so rounding
makes it differ a little; how much is measured on the way, and allowed for in every test.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from foredraft.lab.audit.remote.answers import Ask
from foredraft.lab.audit.remote.client import Client, Completion
from foredraft.lab.audit.remote.logprobs import Key, Position
from foredraft.lab.audit.remote.probe import Abilities

ALLOWED_DIFFERENCES = 2.0
_WHOLE_PROMPT = {"cache_prompt": False}
"""llama.cpp then computes the last token in one pass with all before it."""


class Scorer:
    """Answers requests and fills in what the answers lack; may be called from several threads.

    Attributes:
        num_scored: tokens filled in.
        difference: mean total variation, over the listed tokens, between two passes of other shapes.
    """

    def __init__(self, client: Client, abilities: Abilities):
        self._client, self._abilities = client, abilities
        self._prompts: dict[str, list[int]] = {}
        self._differences: list[float] = []
        self._lock = threading.Lock()
        self.num_scored = 0

    @property
    def difference(self) -> float:
        return float(np.mean(self._differences)) if self._differences else 0.0

    def __call__(self, ask: Ask) -> Completion:
        """The answer with all its log-probabilities.

        Where the server keeps tokens to itself no prefix is sure; the tokens without log-probabilities then count
        as hidden too.

        Raises:
            ServerRefusedError: the server has no ``/tokenize``, or takes no token ids.
        """
        prompt = self._ids(ask.prompt)
        answer = self._client.complete(prompt, ask.options)
        missing = [index for index, position in enumerate(answer.positions) if not position.top]
        keys = [position.key for position in answer.positions]
        if answer.num_hidden or not all(isinstance(key, int) for key in keys):
            return replace(answer, num_hidden=answer.num_hidden + len(missing))
        found = list(answer.positions)
        for index in missing:
            prefix = [*prompt, *(key for key in keys[:index] if isinstance(key, int))]
            top = self._top(prefix, ask.options, {})
            if index == missing[0]:
                self._note(total_variation(top, self._top(prefix, ask.options, _WHOLE_PROMPT)))
            allowed = ALLOWED_DIFFERENCES * self.difference
            found[index] = Position(keys[index], found[index].text, top.get(keys[index]), top, total_variation=allowed)
        with self._lock:
            self.num_scored += len(missing)
        return replace(answer, positions=tuple(found))

    def _top(self, prefix: Sequence[int], options: Mapping[str, Any], more: Mapping[str, Any]) -> Mapping[Key, float]:
        answer = self._client.complete(prefix, {**options, **more, "max_tokens": 1})
        return answer.positions[0].top if answer.positions else {}

    def _ids(self, prompt: str) -> list[int]:
        with self._lock:
            if prompt not in self._prompts:
                self._prompts[prompt] = self._client.tokenize(prompt)
            return self._prompts[prompt]

    def _note(self, difference: float) -> None:
        with self._lock:
            self._differences.append(difference)


def total_variation(one: Mapping[Key, float], other: Mapping[Key, float]) -> float:
    """Between two lists of log-probabilities, over the tokens that both have."""
    return 0.5 * sum(abs(float(np.exp(one[key]) - np.exp(other[key]))) for key in one if key in other)
