"""Token ids to text, one token at a time, with stop strings found at the token that completes them."""

from __future__ import annotations

from typing import Any

WINDOW = 6
"""Tokens decoded together, so that spaces and multi-byte characters come out as in the whole text."""


class Detokenizer:
    """Text of one sequence's output.

    Decoding token by token gives the same text whether tokens come singly or in blocks. While the last
    characters may still change (an incomplete UTF-8 sequence), they are held back.

    Args:
        tokenizer: of the model, or None (then there is no text and no stop string).
        stop: strings that end the output.
        keep_stop: keep the stop string in the text.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], keep_stop: bool, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._stop, self._keep_stop, self._skip = stop, keep_stop, skip_special_tokens
        self._ids: list[int] = []
        self._prefix, self._read = 0, 0
        self._delivered = 0
        self.text = ""

    def append(self, token_id: int, may_stop: bool = True) -> str | None:
        """Add one token; returns the stop string that it completes, if any (the text is cut then).

        Without ``may_stop`` stop strings pass as ordinary text.
        """
        if self._tokenizer is None:
            return None
        self._ids.append(token_id)
        before = self._decode(self._prefix, self._read)
        after = self._decode(self._prefix, len(self._ids))
        if after.endswith("\ufffd") and len(self._ids) - self._read < WINDOW:
            return None
        old_len = len(self.text)
        self.text += after[len(before) :]
        self._prefix, self._read = self._read, len(self._ids)
        return self._cut_at_stop(old_len) if self._stop and may_stop else None

    def finish(self) -> None:
        """Deliver what was held back."""
        if self._tokenizer is not None and self._read < len(self._ids):
            before = self._decode(self._prefix, self._read)
            self.text += self._decode(self._prefix, len(self._ids))[len(before) :]
            self._read = len(self._ids)

    def take(self, finished: bool) -> str:
        """Text that was not delivered yet; keeps back what could be the beginning of a stop string."""
        end = len(self.text) if finished else len(self.text) - self._possible_stop_len()
        new, self._delivered = self.text[self._delivered : end], max(self._delivered, end)
        return new

    def _decode(self, start: int, end: int) -> str:
        if start == end:
            return ""
        return str(
            self._tokenizer.decode(
                self._ids[start:end], skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
            )
        )

    def _cut_at_stop(self, old_len: int) -> str | None:
        found: tuple[int, str] | None = None
        for stop in self._stop:
            at = self.text.find(stop, max(0, old_len - len(stop) + 1))
            if at >= 0 and (found is None or at + len(stop) < found[0] + len(found[1])):
                found = (at, stop)
        if found is None:
            return None
        at, stop = found
        self.text = self.text[: at + len(stop)] if self._keep_stop else self.text[:at]
        return stop

    def _possible_stop_len(self) -> int:
        if self._keep_stop:
            return 0
        return max(
            (size for stop in self._stop for size in range(1, len(stop)) if self.text.endswith(stop[:size])),
            default=0,
        )
