"""Responses of earlier requests, kept over requests and, in a file, over runs."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from foredraft.drafters.context_tree import ContextTree
from foredraft.errors import InvalidOptionError


class ResponseStore:
    """The latest responses with what followed their contexts. When it is full, the oldest one leaves.

    Anyone who can time answers can tell whether a text is in it; requests that must not know of each other need
    stores of their own.

    Args:
        max_requests: responses kept.
        path: file to begin with, if it exists, and for :meth:`save`.
        vocab: name of the vocabulary, which a file must have too.

    Raises:
        InvalidOptionError: the file is none of this class, or of another vocabulary.
    """

    def __init__(self, max_tree_depth: int, max_requests: int, path: Path | None = None, vocab: str = ""):
        self.tree = ContextTree(max_tree_depth)
        self.max_requests, self.path, self.vocab = max_requests, path, vocab
        if path is not None and path.exists():
            for response in self._read(path)[-max_requests:]:
                self.add(response)

    def __len__(self) -> int:
        return self.tree.num_texts

    def add(self, response: Sequence[int]) -> None:
        """Take in a response; one of fewer than two tokens has nothing to say."""
        if len(response) < 2:
            return
        self.tree.begin_text()
        self.tree.extend(response)
        if len(self) > self.max_requests:
            self.tree.drop_oldest_text()

    def save(self) -> None:
        """Write the responses to the file, whole or not at all."""
        if self.path is None:
            return
        texts = self.tree.texts()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez_compressed(
                    file,
                    token_ids=np.array([token for text in texts for token in text], dtype=np.int32),
                    lengths=np.array([len(text) for text in texts], dtype=np.int64),
                    vocab=np.array(self.vocab),
                )
            os.replace(name, self.path)
        except BaseException:
            os.unlink(name)
            raise

    def _read(self, path: Path) -> list[list[int]]:
        try:
            with np.load(path, allow_pickle=False) as held:
                tokens, lengths, vocab = held["token_ids"], held["lengths"], str(held["vocab"])
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise InvalidOptionError(
                f"suffix_decoding_store={str(path)!r} is not a store of responses ({error}); name another file"
            ) from error
        if vocab != self.vocab:
            raise InvalidOptionError(
                f"suffix_decoding_store={str(path)!r} holds responses in another vocabulary ({vocab!r}, the target's "
                f"is {self.vocab!r}); name another file for this model"
            )
        return [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])] if len(lengths) else []
