"""Texts with the target's hidden states, kept on disk in pieces.

    DIRECTORY/store.json                the target, its layers, and how the texts were made
    DIRECTORY/piece-00000.safetensors   some texts: features of all of them one behind the other, and their tokens

A piece is written under another name and renamed, so a run that is killed leaves whole pieces only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from foredraft.errors import InvalidOptionError

_STORE = "store.json"


@dataclass(frozen=True, slots=True)
class Text:
    """One text that the target has read.

    Attributes:
        token_ids: ``[S]`` int64, prompt and answer.
        num_prompt_tokens: where the model's own answer begins; what lies before is read and has no labels.
        features: ``[S - 1, L * H]`` bfloat16, states of all tokens but the last, the layers side by side.
        route: kind of the request: ``chat``, ``code``, ``summary``, ``general``.
        origin: equal for texts that are built on each other; they are never split.
    """

    token_ids: Tensor
    num_prompt_tokens: int
    features: Tensor
    route: str = "general"
    origin: int = 0


@dataclass(frozen=True, slots=True)
class StoreMeta:
    """What all texts of a store have in common.

    Attributes:
        target: name of the model that they come from.
        fingerprint: of its configuration and weights.
        layers: whose states are kept, in their order, counted as in ``target.features``.
        recipe: how the texts are made, so that a store is never continued in another way.
    """

    target: str
    fingerprint: str
    layers: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    recipe: str = ""


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a text lies: its piece, its tokens there, and its rows among the features."""

    piece: int
    first_token: int
    num_tokens: int
    first_row: int
    num_prompt_tokens: int
    route: str
    origin: int


class TextStore:
    """The texts of a directory; features are read when a text is asked for.

    Args:
        meta: creates the store, or says what is expected of one that is there; None takes what is there.

    Attributes:
        seconds: that making the texts took.

    Raises:
        InvalidOptionError: there is no store and no ``meta``, or it holds texts of another target, of other layers or
            of another recipe; both are named.
    """

    def __init__(self, directory: str | Path, meta: StoreMeta | None = None):
        self.directory = Path(directory)
        file = self.directory / _STORE
        if file.exists():
            self.meta = _read_meta(file)
            if meta is not None:
                _check_same(self.directory, self.meta, meta)
        elif meta is None:
            raise InvalidOptionError(f"{self.directory} holds no texts to train on: there is no {_STORE} in it")
        else:
            self.directory.mkdir(parents=True, exist_ok=True)
            _write(file, lambda path: path.write_text(json.dumps(asdict(meta), indent=1) + "\n", encoding="utf-8"))
            self.meta = meta
        self._entries: list[_Entry] = []
        self._tokens: list[Tensor] = []
        self._files: list[Any] = []
        self.seconds = 0.0
        while self._piece_file(self.num_pieces).exists():
            self._open_piece()

    @property
    def num_pieces(self) -> int:
        return len(self._tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers, which are the ones that have labels."""
        return sum(entry.num_tokens - entry.num_prompt_tokens for entry in self._entries)

    @property
    def tokens_per_second(self) -> float:
        """Answer tokens in a second, over all pieces, or 0 if nothing was made."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Text:
        entry = self._entries[index]
        rows = self._files[entry.piece].get_slice("features")
        features = rows[entry.first_row : entry.first_row + entry.num_tokens - 1]
        return Text(self.token_ids(index), entry.num_prompt_tokens, features, entry.route, entry.origin)

    def __iter__(self) -> Iterator[Text]:
        return (self[i] for i in range(len(self)))

    def token_ids(self, index: int) -> Tensor:
        """``[S]`` int64 of a text, without a look at its features."""
        entry = self._entries[index]
        return self._tokens[entry.piece][entry.first_token : entry.first_token + entry.num_tokens].long()

    def num_prompt_tokens(self, index: int) -> int:
        return self._entries[index].num_prompt_tokens

    def route(self, index: int) -> str:
        return self._entries[index].route

    def prompts(self) -> set[int]:
        """:func:`origin_of` all prompts, by which a prompt is known again."""
        return {origin_of(self.token_ids(i)[: self.num_prompt_tokens(i)].tolist()) for i in range(len(self))}

    def append(self, texts: Sequence[Text], seconds: float = 0.0) -> None:
        """Write some texts as the next piece, whole or not at all; ``seconds`` is what they took to make."""
        width = len(self.meta.layers) * self.meta.hidden_size
        for text in texts:
            assert text.features.shape == (len(text.token_ids) - 1, width), (text.features.shape, width)
            assert 0 < text.num_prompt_tokens <= len(text.token_ids)
        tensors = {
            "token_ids": torch.cat([text.token_ids for text in texts]).to(torch.int32),
            "num_tokens": torch.tensor([len(text.token_ids) for text in texts]),
            "num_prompt_tokens": torch.tensor([text.num_prompt_tokens for text in texts]),
            "origins": torch.tensor([text.origin for text in texts]),
            "features": torch.cat([text.features for text in texts]).to(torch.bfloat16),
        }
        notes = {"routes": json.dumps([text.route for text in texts]), "seconds": f"{seconds:.3f}"}
        _write(self._piece_file(self.num_pieces), lambda path: save_file(tensors, path, notes))
        self._open_piece()

    def join(self, other: TextStore) -> None:
        """Have the texts of another store behind those that are here. Nothing is written, now or later.

        Raises:
            InvalidOptionError: it holds texts of another target or other layers; both are named.
        """
        _check_same(other.directory, other.meta, replace(self.meta, recipe=other.meta.recipe))
        self.meta = replace(self.meta, recipe=f"{self.meta.recipe}; {other.meta.recipe}")
        self._entries += [replace(entry, piece=self.num_pieces + entry.piece) for entry in other._entries]
        self._tokens += other._tokens
        self._files += other._files
        self.seconds += other.seconds

    def split(self, held_out: float) -> tuple[list[int], list[int]]:
        """Indices of the texts to train on, and of those to measure on.

        A text falls on the same side however many others there are, and with it those of the same origin.

        Args:
            held_out: share to measure on, of at least one text.

        Raises:
            InvalidOptionError: the share is outside (0, 1), or nothing would be left to train on.
        """
        if not 0.0 < held_out < 1.0:
            raise InvalidOptionError(f"held_out={held_out} is outside (0, 1); 0.05 keeps one text in twenty to measure")
        places = [_place(entry.origin) for entry in self._entries]
        limit = max(held_out, min(places, default=0.0))
        held = [i for i, place in enumerate(places) if place <= limit]
        kept = [i for i, place in enumerate(places) if place > limit]
        if not kept:
            raise InvalidOptionError(
                f"{self.directory} holds {len(self)} texts, too few to keep a share of {held_out} for measuring; "
                "make more texts"
            )
        return kept, held

    def _piece_file(self, piece: int) -> Path:
        return self.directory / f"piece-{piece:05}.safetensors"

    def _open_piece(self) -> None:
        piece = self.num_pieces
        file: Any = safe_open(self._piece_file(piece), "pt")
        notes = file.metadata()
        routes = json.loads(notes["routes"])
        self.seconds += float(notes["seconds"])
        counts = file.get_tensor("num_tokens").tolist()
        prompts, origins = file.get_tensor("num_prompt_tokens").tolist(), file.get_tensor("origins").tolist()
        for i, start in enumerate(accumulate(counts[:-1], initial=0)):
            self._entries.append(_Entry(piece, start, counts[i], start - i, prompts[i], routes[i], origins[i]))
        self._tokens.append(file.get_tensor("token_ids"))
        self._files.append(file)


def origin_of(token_ids: Sequence[int]) -> int:
    """The origin of a text that is built on no other: 63 bits that follow from its prompt."""
    joined = " ".join(map(str, token_ids))
    return int.from_bytes(sha256(joined.encode()).digest()[:8]) >> 1


def _place(origin: int) -> float:
    """A number in (0, 1] that looks drawn; origins may be small numbers."""
    return (int.from_bytes(sha256(str(origin).encode()).digest()[:8]) + 1) / 2**64


def _write(file: Path, write: Any) -> None:
    unfinished = file.with_name(file.name + ".part")
    write(unfinished)
    os.replace(unfinished, file)


def _read_meta(file: Path) -> StoreMeta:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return StoreMeta(**{**values, "layers": tuple(values["layers"])})
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidOptionError(f"{file} does not describe a store of texts: {error}") from error


def _check_same(directory: Path, found: StoreMeta, wanted: StoreMeta) -> None:
    both = {
        "the target": (f"{found.target} ({found.fingerprint})", f"{wanted.target} ({wanted.fingerprint})"),
        "hidden states of layers": (found.layers, wanted.layers),
        "the recipe": (found.recipe, wanted.recipe),
    }
    same_target = found.fingerprint == wanted.fingerprint
    for what, (there, here) in both.items():
        if there != here and not (what == "the target" and same_target):
            raise InvalidOptionError(
                f"{directory} holds texts with {what} {there}, and {here} is wanted; take another directory"
            )
