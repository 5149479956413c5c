"""The text of a sequence in the tokens of another tokenizer, followed as it grows.

source tokens        The| qu|ick| brown| fo|..     their bytes joined, decoded as UTF-8
text                 |-- settled --|-- tail --|..  .. the beginning of a character, held back
destination tokens   The| quick    | brown| fo     settled ones never change, the tail is encoded anew
"""

from __future__ import annotations

import codecs

from foredraft.drafters.token_text import TokenText, shared_special_tokens

CHUNK = 128
"""Characters that are encoded together and settled; the tail has fewer than twice as many."""


class Translation:
    """One sequence's text, read by another tokenizer.

    Where it is settled depends on the text alone, not on the steps by which the text came. It is cut before a space,
    where tokenizers cut too. A special token becomes the one of the same content, or else is left out.

    Attributes:
        token_ids: of the destination, for all of the text; not to be changed.
    """

    def __init__(self, source: TokenText, destination: TokenText):
        self._source, self._destination = source, destination
        self._special = shared_special_tokens(source, destination)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._settled = list(destination.start)
        self._tail = ""
        self._begun = False
        self._num_read = 0
        self.token_ids = list(self._settled)

    @property
    def num_settled(self) -> int:
        """So many of ``token_ids`` stay as they are, whatever follows."""
        return len(self._settled)

    @property
    def ends_in_character(self) -> bool:
        """Whether the text ends with a part of a character, which ``token_ids`` lack."""
        return bool(self._utf8.getstate()[0])

    def extend(self, token_ids: list[int]) -> list[int]:
        """Take in the source tokens beyond those already known; returns all tokens of the destination."""
        if len(token_ids) > self._num_read:
            for token_id in token_ids[self._num_read :]:
                self._read(token_id)
            self._num_read = len(token_ids)
            self.token_ids = [*self._settled, *self._encode(self._tail)]
        return self.token_ids

    def _read(self, token_id: int) -> None:
        piece = self._source.piece(token_id)
        if piece is not None:
            self._tail += self._utf8.decode(piece)
            while len(self._tail) >= 2 * CHUNK:
                space = self._tail.rfind(" ", CHUNK // 2, CHUNK)
                self._settle(space if space > 0 else CHUNK)
            return
        self._tail += self._utf8.decode(b"", final=True)
        special = self._special.get(token_id)
        if special is None or (special in self._destination.start and not self._begun and not self._tail):
            return
        self._settle(len(self._tail))
        self._settled.append(special)

    def _settle(self, num_characters: int) -> None:
        self._settled += self._encode(self._tail[:num_characters])
        self._tail = self._tail[num_characters:]
        self._begun = True

    def _encode(self, text: str) -> list[int]:
        if not text:
            return []
        if self._begun:
            return self._destination.encode(text)
        return self._destination.encode_start(text.removeprefix(" ") if self._source.adds_space else text)
