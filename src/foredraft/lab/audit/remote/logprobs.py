"""The three shapes in which servers report log-probabilities, as one.

* ``tokens``, ``token_logprobs``, ``top_logprobs`` (a mapping a token): OpenAI's completions, vLLM;
* ``content``, a list of tokens with ``top_logprobs`` lists: chat completions everywhere;
* the same list for completions too, with token ids: llama.cpp.

A token is known by its id where the server tells it, else by its bytes, else by its text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Key = int | bytes | str

_BROKEN = "\ufffd"
_ID_PREFIX = "token_id:"  # vLLM with return_tokens_as_token_ids


@dataclass(frozen=True, slots=True)
class Position:
    """An emitted token and what its distribution was said to be.

    Attributes:
        key: of the emitted token.
        text: of the emitted token, as reported.
        logprob: natural logarithm of its probability; None if not reported.
        top: the most likely tokens with theirs; empty if not reported. Some servers add the emitted token to
            it, some do not.
        ambiguous: two of the tokens in ``top`` cannot be told apart.
        total_variation: by which ``top`` may differ from what the token was drawn with, because it was computed
            in a pass of another shape.
    """

    key: Key
    text: str
    logprob: float | None
    top: Mapping[Key, float]
    ambiguous: bool = False
    total_variation: float = 0.0


def positions(choice: Mapping[str, Any]) -> tuple[Position, ...]:
    """The emitted tokens of one choice of an answer, in order; empty if it has no log-probabilities."""
    found = choice.get("logprobs")
    if not isinstance(found, Mapping):
        return ()
    content = found.get("content")
    if isinstance(content, Sequence):
        return tuple(_from_entry(entry) for entry in content)
    return tuple(_from_columns(found))


def _from_entry(entry: Mapping[str, Any]) -> Position:
    pairs = [(_key(other), float(other["logprob"])) for other in entry.get("top_logprobs") or ()]
    top = dict(pairs)
    doubtful = len(top) < len(pairs) or any(_is_doubtful(key) for key in top)
    logprob = entry.get("logprob") if pairs else None
    return Position(_key(entry), str(entry.get("token", "")), _number(logprob), top, doubtful)


def _from_columns(found: Mapping[str, Any]) -> list[Position]:
    tokens = found.get("tokens") or ()
    logprobs = found.get("token_logprobs") or [None] * len(tokens)
    tops = found.get("top_logprobs") or [None] * len(tokens)
    rows = []
    for token, logprob, top_of_token in zip(tokens, logprobs, tops, strict=True):
        top = {_text_key(text): float(value) for text, value in (top_of_token or {}).items()}
        rows.append(Position(_text_key(token), token, _number(logprob), top, any(map(_is_doubtful, top))))
    return rows


def _key(entry: Mapping[str, Any]) -> Key:
    if isinstance(entry.get("id"), int):
        return int(entry["id"])
    key = _text_key(str(entry.get("token", "")))
    if isinstance(key, str) and entry.get("bytes"):
        return bytes(entry["bytes"])
    return key


def _text_key(text: str) -> Key:
    if text.startswith(_ID_PREFIX) and text[len(_ID_PREFIX) :].isdigit():
        return int(text[len(_ID_PREFIX) :])
    return text


def _is_doubtful(key: Key) -> bool:
    """A replacement character stands for any broken piece of UTF-8."""
    return _BROKEN in key if isinstance(key, str) else isinstance(key, bytes) and _BROKEN.encode() in key


def _number(value: Any) -> float | None:
    return None if value is None or math.isnan(value) else float(value)
