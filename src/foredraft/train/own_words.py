"""Texts from nothing: the target writes requests from the bare frame of its chat template, and answers them.

    opening     "Write an article about tea"            drawn from a list, so that requests differ
    request     "... and its place in British life."    by the target, temperature 1
    answer      "Tea came to ..."                       by the target; kept
    follow-up   "Summarise the following text ..."      the answer in a template; its answer is kept too

The idea of drawing a request from the bare template is Magpie's (Xu et al., 2406.08464).
"""

from __future__ import annotations

import random
import re
from collections.abc import Generator, Sequence
from hashlib import sha256
from typing import Any

from foredraft.measure.workloads import encode
from foredraft.train import openings
from foredraft.train.dataset import origin_of
from foredraft.train.writer import Ask, Task, Written
from foredraft.types import SamplingParams

PIECE = {"summary": 16, "code": 8, "general": 10, "chat": 14}
"""Requests of a piece; those with a follow-up come first, because they take longest."""
CONTINUATIONS = {"general": 48}
"""Texts of a piece of a model that knows no chats."""
QUESTION_TOKENS = 64
_CONTINUED = "continued"
_MARK = "|the request|"
_CODE_BLOCK = re.compile(r"```\w*\n(.*?)(?:```|\Z)", re.DOTALL)

Asking = Generator[Ask, Written | None, str | None]


class OwnWords:
    """A source of tasks without end; a piece depends on nothing but the seed and what was asked before.

    Args:
        tokenizer: of the target.
        max_model_len: of the target; requests that leave no room for an answer are left out.
        seed: of all draws.
        max_tokens: longest answer.
        temperatures: an answer is written at one of them.

    Attributes:
        recipe: what the texts depend on, besides the target.
        num_pieces: None; there is no last one.
    """

    num_pieces: int | None = None

    def __init__(
        self,
        tokenizer: Any,
        max_model_len: int,
        *,
        seed: int = 0,
        max_tokens: int = 192,
        temperatures: Sequence[float] = (0.0, 0.8),
    ):
        self.tokenizer, self.max_model_len = tokenizer, max_model_len
        self.seed, self.max_tokens, self.temperatures = seed, max_tokens, tuple(temperatures)
        self.knows_chats = bool(getattr(tokenizer, "chat_template", None))
        self.recipe = f"own words, {seed=}, {max_tokens=}, temperatures={self.temperatures}"
        head, self._end_of_request = _frame(tokenizer)
        self._head: list[int] = _ids(tokenizer, head)

    def tasks(self, piece: int, seen: set[int]) -> list[Task]:
        """The tasks of a piece; requests whose :func:`origin_of` is in ``seen`` are dropped, new ones are added."""
        kinds = PIECE if self.knows_chats else CONTINUATIONS
        places = [kind for kind, count in kinds.items() for _ in range(count)]
        return [self._task(kind, task_draws(self.seed, piece, place), seen) for place, kind in enumerate(places)]

    def _task(self, kind: str, draws: random.Random, seen: set[int]) -> Task:
        opening = _opening(kind if self.knows_chats else _CONTINUED, draws)
        question = yield from self._question(opening, draws)
        if question is None:
            return
        origin = origin_of(self._prompt(question))
        route = "general" if kind == "summary" else kind
        answer = yield from self._answer(question, draws, seen, route, origin)
        if answer is not None and kind in ("summary", "code"):
            yield from self._answer(follow_up(kind, answer, draws), draws, seen, kind, origin)

    def _question(self, opening: str, draws: random.Random) -> Asking:
        """A request of one line that begins with ``opening``; None if nothing sensible came."""
        params = SamplingParams(
            temperature=1.0,
            top_p=0.95,
            max_tokens=QUESTION_TOKENS,
            seed=draws.getrandbits(63),
            stop="\n",
            stop_token_ids=self._end_of_request,
        )
        written = yield Ask([*self._head, *_ids(self.tokenizer, opening)], params)
        assert written is not None
        text = opening + written.text
        return whole_question(text, written.is_cut) if self.knows_chats else text

    def _answer(
        self, question: str, draws: random.Random, seen: set[int], route: str = "general", origin: int | None = None
    ) -> Asking:
        prompt = self._prompt(question)
        params = SamplingParams(
            temperature=draws.choice(self.temperatures), max_tokens=self.max_tokens, seed=draws.getrandbits(63)
        )
        name = origin_of(prompt)
        if name in seen or len(prompt) + self.max_tokens > self.max_model_len:
            return None
        seen.add(name)
        written = yield Ask(prompt, params, route, name if origin is None else origin)
        assert written is not None
        return written.text

    def _prompt(self, question: str) -> list[int]:
        return encode(self.tokenizer, [{"role": "user", "content": question}])


def whole_question(text: str, is_cut: bool) -> str | None:
    """A request as it came, or up to its last whole sentence; None if it is nothing, or speaks of what is not there."""
    text = " ".join(text.split())
    if is_cut:
        text = text[: max(text.rfind(mark) for mark in ".?!") + 1]
    refers = text.endswith((":", ",")) or re.search(r"\b(following|below|above|attached)\b", text)
    return None if len(text.split()) < 4 or refers else text


def follow_up(kind: str, answer: str, draws: random.Random) -> str:
    """A request about an answer: to edit its code, or to summarise it."""
    if kind == "summary":
        return draws.choice(openings.SUMMARIES).format(draws.choice(("two", "three", "four"))) + "\n\n" + answer.strip()
    block = _CODE_BLOCK.search(answer)
    code = block[1] if block else answer
    return f"{draws.choice(openings.EDITS)}\n\n{code.rstrip()}\n"


def _opening(kind: str, draws: random.Random) -> str:
    if kind == "chat":
        return draws.choice(openings.CHAT)
    if kind == "code":
        return f"{draws.choice(openings.CODE)} {draws.choice(openings.TASKS)}".rstrip()
    forms = {"summary": openings.PASSAGE, _CONTINUED: openings.CONTINUED}.get(kind, openings.ABOUT)
    return draws.choice(forms).format(draws.choice(openings.SUBJECTS))


def _frame(tokenizer: Any) -> tuple[str, tuple[int, ...]]:
    """What stands before a request, and the token that ends one."""
    if not getattr(tokenizer, "chat_template", None):
        return getattr(tokenizer, "bos_token", None) or "", ()
    text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    head, _, tail = text.partition(_MARK)
    return head, tuple(_ids(tokenizer, tail)[:1])


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def task_draws(seed: int, piece: int, place: int) -> random.Random:
    """Random numbers of one task."""
    digest = sha256(f"{seed} {piece} {place}".encode()).digest()
    return random.Random(int.from_bytes(digest[:8]))
