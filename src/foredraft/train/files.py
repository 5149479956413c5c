"""Texts of the user's own: chats as JSONL, which the target answers anew or which are taken as they stand, and plain
text. A head that has learnt from the traffic it will meet drafts best."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from foredraft.errors import InvalidOptionError
from foredraft.measure.workloads import encode, read_jsonl
from foredraft.train.dataset import origin_of
from foredraft.train.own_words import task_draws
from foredraft.train.writer import AS_IT_STANDS, Ask, Task
from foredraft.types import SamplingParams

logger = logging.getLogger(__name__)

ANEW, GIVEN = "anew", "given"
PIECE = 48
WINDOW = 512
"""Tokens of a piece of plain text that is read as it stands."""
_ROLES = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True, slots=True)
class _Item:
    """A prompt to answer, or a text to read of which an answer begins at ``num_prompt_tokens``."""

    token_ids: list[int]
    route: str
    num_prompt_tokens: int | None


class FromFiles:
    """A source of tasks, one for each different prompt of some files.

    A line of a ``.jsonl`` file is an object with ``messages`` (OpenAI), ``conversations`` (ShareGPT), ``prompt`` or
    ``turns``, or with a ``text`` that is read as it stands; a ``category`` names its route. Other files are plain text,
    read in windows of 512 tokens.

    Args:
        files: their paths.
        tokenizer: of the target.
        max_model_len: of the target; longer texts are left out, with a warning that counts them.
        answers: ``anew`` lets the target answer the last request of each chat, which is what a draft has to guess;
            ``given`` takes the answers that are there.
        seed, max_tokens, temperatures: see :class:`~foredraft.train.own_words.OwnWords`.

    Raises:
        InvalidOptionError: a file or a line cannot be used (the line is named), or nothing is left.
    """

    def __init__(
        self,
        files: Sequence[Path],
        tokenizer: Any,
        max_model_len: int,
        *,
        answers: str = ANEW,
        seed: int = 0,
        max_tokens: int = 192,
        temperatures: Sequence[float] = (0.0, 0.8),
    ):
        if answers not in (ANEW, GIVEN):
            raise InvalidOptionError(f"answers={answers!r} is not one of {ANEW}, {GIVEN}")
        self.seed, self.max_tokens, self.temperatures = seed, max_tokens, tuple(temperatures)
        self._items = _read(files, tokenizer, answers)
        longest = max_model_len - 1, max_model_len - max_tokens
        fitting = [item for item in self._items if len(item.token_ids) <= longest[item.num_prompt_tokens is None]]
        if len(fitting) < len(self._items):
            logger.warning(
                "%d of %d texts are left out: with an answer of %d tokens they are longer than the model's %d",
                len(self._items) - len(fitting),
                len(self._items),
                max_tokens,
                max_model_len,
            )
        self._items = fitting
        if not fitting:
            raise InvalidOptionError(f"{', '.join(map(str, files))} hold no text to train on")
        content = sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
        self.recipe = f"files {content}, {answers=}, {seed=}, {max_tokens=}, temperatures={self.temperatures}"

    @property
    def num_pieces(self) -> int:
        return -(-len(self._items) // PIECE)

    def tasks(self, piece: int, seen: set[int]) -> list[Task]:
        """The tasks of a piece; the files were freed of duplicates, so nothing needs to be in ``seen``."""
        first = piece * PIECE
        return [self._task(item, piece, place) for place, item in enumerate(self._items[first : first + PIECE])]

    def _task(self, item: _Item, piece: int, place: int) -> Task:
        params = AS_IT_STANDS
        if item.num_prompt_tokens is None:
            draws = task_draws(self.seed, piece, place)
            params = SamplingParams(
                temperature=draws.choice(self.temperatures), max_tokens=self.max_tokens, seed=draws.getrandbits(63)
            )
        is_read = item.num_prompt_tokens == 1  # a text without a prompt, told by all of it
        origin = origin_of(item.token_ids if is_read else item.token_ids[: item.num_prompt_tokens])
        yield Ask(item.token_ids, params, item.route, origin, item.num_prompt_tokens)


def _read(files: Sequence[Path], tokenizer: Any, answers: str) -> list[_Item]:
    different: dict[tuple[int, ...], _Item] = {}
    for file in files:
        for item in _items(file, tokenizer, answers):
            different.setdefault(tuple(item.token_ids), item)
    return list(different.values())


def _items(file: Path, tokenizer: Any, answers: str) -> Iterator[_Item]:
    if file.suffix != ".jsonl":
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidOptionError(f"the text {file} cannot be read: {error}") from error
        yield from _windows(text, "text", tokenizer)
        return
    for number, record in read_jsonl(file):
        where, route = f"{file}, line {number}", str(record.get("category", "chat"))
        if isinstance(record.get("text"), str):
            yield from _windows(record["text"], str(record.get("category", "text")), tokenizer)
        else:
            yield _chat(messages_of(record, where), route, tokenizer, answers, where)


def _windows(text: str, route: str, tokenizer: Any) -> Iterator[_Item]:
    """Every token but the first has a label."""
    token_ids = list(tokenizer(text)["input_ids"])
    for start in range(0, len(token_ids), WINDOW):
        window = token_ids[start : start + WINDOW]
        if len(window) > 1:
            yield _Item(window, route, 1)


def _chat(messages: list[dict[str, str]], route: str, tokenizer: Any, answers: str, where: str) -> _Item:
    """Up to the last request, and with the answer to it if that is to be taken."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise InvalidOptionError(f"{where} has no message of the role 'user'")
    prompt = encode(tokenizer, messages[: last + 1])
    if answers == ANEW:
        return _Item(prompt, route, None)
    if last + 1 == len(messages):
        raise InvalidOptionError(f"{where} ends with a request and answers={GIVEN!r} takes what follows; use {ANEW!r}")
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    answer = tokenizer(messages[last + 1]["content"], add_special_tokens=False)["input_ids"]
    return _Item([*prompt, *answer, *end], route, len(prompt))


def messages_of(record: Mapping[str, Any], where: str) -> list[dict[str, str]]:
    """The conversation of a line, in OpenAI's form.

    Raises:
        InvalidOptionError: there is none.
    """
    turns = record.get("messages") or record.get("conversations") or record.get("turns") or record.get("prompt")
    if isinstance(turns, str):
        turns = [turns]
    elif isinstance(turns, list) and turns and isinstance(turns[0], str):
        turns = turns[:1]  # Spec-Bench: the requests of a chat without its answers
    try:
        messages = [_message(turn, i) for i, turn in enumerate(turns or ())]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidOptionError(f"{where} has a message that is none: {error!r}") from error
    if not messages:
        raise InvalidOptionError(
            f"{where} has none of 'messages', 'conversations', 'turns', 'prompt' and 'text' with something in it; it "
            f"has {', '.join(map(repr, record)) or 'nothing'}"
        )
    return messages


def _message(turn: Any, place: int) -> dict[str, str]:
    """Of OpenAI, of ShareGPT, or a bare request."""
    if isinstance(turn, str):
        return {"role": "user", "content": turn}
    role, content = (turn["from"], turn["value"]) if "from" in turn else (turn["role"], turn["content"])
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content if part["type"] == "text")
    return {"role": _ROLES.get(role, role), "content": content}
