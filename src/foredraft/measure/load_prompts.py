"""What arrives under load: a stream of requests of several kinds in turn, the same for every arm.

Code edits have answers that are mostly in the prompt already, summaries take words from it, stories have nothing to
copy. The built-in requests are put together from parts, so that hardly any two of a run are the same.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from foredraft.errors import InvalidOptionError
from foredraft.measure.workloads import STORY_SUBJECTS, Workload, encode

_FUNCTIONS = (
    """def load_{noun}s(path):
    {noun}s = []
    with open(path) as file:
        for line in file:
            name, {field} = line.strip().split(",")
            if {field}:
                {noun}s.append({{"name": name, "{field}": float({field})}})
    return {noun}s
""",
    """def total_{field}({noun}s, limit):
    total = 0
    for {noun} in {noun}s:
        {field} = {noun}["{field}"]
        if {field} > limit:
            {field} = limit
        total += {field}
    return total
""",
    """def {noun}s_by_{field}({noun}s):
    groups = {{}}
    for {noun} in {noun}s:
        key = {noun}["{field}"]
        if key not in groups:
            groups[key] = []
        groups[key].append({noun})
    return groups
""",
)
_NOUNS = ("order", "invoice", "parcel", "ticket", "student", "sensor", "recipe", "vessel", "member", "flight")
_FIELDS = ("amount", "weight", "price", "score", "duration", "distance", "rating", "height")
_EDITS = (
    "Add type hints to this function.",
    "Add a docstring to this function.",
    "Rename this function to `process`.",
    "Add a comment above the return statement.",
    "Let this function print the number of {noun}s before it returns.",
)
_PLACES = (
    "by the sea", "in the mountains", "in a city that never sleeps", "on an island", "at the edge of a desert",
    "on a river", "in the far north", "in an old forest", "on a moon of Jupiter", "in a valley", "under a dam",
    "in a harbour", "on a farm", "behind a railway station",
)  # fmt: skip
_TIMES = ("long ago", "in winter", "a hundred years from now", "on a single night", "during a storm", "in summer")


def _code(rng: random.Random) -> str:
    names = {"noun": rng.choice(_NOUNS), "field": rng.choice(_FIELDS)}
    edit, function = rng.choice(_EDITS).format(**names), rng.choice(_FUNCTIONS).format(**names)
    return f"{edit} Return the full function.\n\n{function}"


def _summary(rng: random.Random) -> str:
    page = resources.files("foredraft.measure").joinpath("long_text.txt").read_text(encoding="utf-8")
    sentences = re.findall(r"[^.\n]+\.", page)
    start, count = rng.randrange(len(sentences) - 5), rng.randint(3, 5)
    text = "".join(sentences[start : start + count]).strip()
    return f"Summarise the following text in {rng.choice(('one', 'two', 'three'))} sentences.\n\n{text}"


def _story(rng: random.Random) -> str:
    subject, place, when = rng.choice(STORY_SUBJECTS), rng.choice(_PLACES), rng.choice(_TIMES)
    return f"Write a story about {subject}. It takes place {place}, {when}."


_MAKERS: Mapping[str, Callable[[random.Random], str]] = {"code": _code, "summary": _summary, "story": _story}
ROUTES = tuple(_MAKERS)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of the stream; ``route`` is its kind, ``max_tokens`` the exact number of its new tokens."""

    index: int
    route: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    seed: int


class RequestStream:
    """Endless requests by index, the routes in turn; the same index is always the same request.

    Args:
        prompts: for each route, the prompt of its n-th request.
        max_tokens: mean number of new tokens; a request has half of it to one and a half.
        max_model_len: a prompt with its output may not be longer.
    """

    def __init__(
        self, prompts: Mapping[str, Callable[[int], Sequence[int]]], *, max_tokens: int, seed: int, max_model_len: int
    ):
        self.routes = tuple(prompts)
        self._prompts = prompts
        self._max_tokens, self._seed, self._limit = max_tokens, seed, max_model_len

    def __getitem__(self, index: int) -> LoadRequest:
        """The request of that index.

        Raises:
            InvalidOptionError: it does not fit into the model's context.
        """
        turn, at = divmod(index, len(self.routes))
        route = self.routes[at]
        rng = random.Random(f"{self._seed} {index}")
        new = rng.randint(max(2, self._max_tokens // 2), self._max_tokens + self._max_tokens // 2)
        prompt = tuple(self._prompts[route](turn))
        if len(prompt) + new > self._limit:
            raise InvalidOptionError(
                f"a request of route {route!r} has {len(prompt)} tokens and {new} new ones, and the model has room for "
                f"{self._limit}; lower max_tokens or leave the prompt out"
            )
        return LoadRequest(index, route, prompt, new, rng.randrange(2**31))


def built_in_stream(
    routes: Sequence[str], tokenizer: Any, *, max_tokens: int, seed: int, max_model_len: int
) -> RequestStream:
    """Requests of the built-in routes."""

    def prompts(route: str) -> Callable[[int], Sequence[int]]:
        def prompt(turn: int) -> list[int]:
            text = _MAKERS[route](random.Random(f"{seed} {route} {turn}"))
            return encode(tokenizer, [{"role": "user", "content": text}])

        return prompt

    makers = {route: prompts(route) for route in routes}
    return RequestStream(makers, max_tokens=max_tokens, seed=seed, max_model_len=max_model_len)


def dataset_stream(workloads: Sequence[Workload], *, max_tokens: int, seed: int, max_model_len: int) -> RequestStream:
    """Requests of the user's file: each category is a route, its prompts in turn and then again from the first."""

    def prompts(workload: Workload) -> Callable[[int], Sequence[int]]:
        return lambda turn: workload.prompts[turn % len(workload.prompts)]

    makers = {workload.name: prompts(workload) for workload in workloads}
    return RequestStream(makers, max_tokens=max_tokens, seed=seed, max_model_len=max_model_len)
