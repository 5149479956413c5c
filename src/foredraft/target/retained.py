"""The texts of ended sequences whose cache entries are still there, and the longest prefix among them. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

SHORTEST = 8
"""A shorter prefix is not worth a copy."""


class RetainedTexts:
    """Which slot holds the entries of which text, from the one that was used longest ago to the latest."""

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def __contains__(self, slot: int) -> bool:
        return slot in self._texts

    def __iter__(self) -> Iterator[int]:
        """The slots, that of the oldest text first; texts may be dropped meanwhile."""
        return iter(list(self._texts))

    def __getitem__(self, slot: int) -> list[int]:
        return self._texts[slot]

    def add(self, slot: int, text: list[int]) -> None:
        self._texts[slot] = text

    def drop(self, slot: int) -> list[int]:
        return self._texts.pop(slot)

    def touch(self, slot: int) -> None:
        """It has been used just now."""
        self._texts[slot] = self._texts.pop(slot)

    def rename(self, old: int, new: int) -> None:
        """A text was moved to another slot; its age stays."""
        self._texts = {new if slot == old else slot: text for slot, text in self._texts.items()}

    @property
    def oldest(self) -> int:
        """The slot of the text that was used longest ago."""
        return next(iter(self._texts))

    def slot_of(self, text: list[int]) -> int:
        """Where this very object is held."""
        return next(slot for slot, held in self._texts.items() if held is text)

    def longest_match(self, text: Sequence[int]) -> tuple[int, int]:
        """The slot whose text has the longest prefix in common with ``text``, and its length; (-1, 0) if none has."""
        best, longest = -1, 0
        for slot, held in self._texts.items():
            if held[: longest + 1] == text[: longest + 1]:
                best, longest = slot, max(longest, common_prefix(held, text))
        return best if longest else -1, longest


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first tokens two lists have in common."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
