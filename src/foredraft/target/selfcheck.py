"""Which shapes give a row the same bits in any pass, measured on the model and machine at hand.

The check feeds one text in many ways: in passes of every width, alone and among neighbours of other lengths
(so with more keys than needed), its prompt in chunks. All must give the same logits, bit for bit. Shapes are
tried from the narrowest up; the answer is kept in the cache folder. Under the shape that is found the text is also
fed as one path of a tree with branches that it does not take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from foredraft.config import EngineConfig
from foredraft.target.forward import TargetModel
from foredraft.target.layout import PassRow, PassShape
from foredraft.target.measurements import measurement_file, read_measurement, write_measurement
from foredraft.target.stateful import StatefulModel

TOKEN_IDENTICAL, NEAR_TIE = "token-identical", "near-tie"
TAIL = 12
CANDIDATES = (
    PassShape(min_tokens=1, min_queries=1),
    PassShape(min_tokens=2, min_queries=1),
    PassShape(),
    PassShape(min_tokens=4, min_queries=4),
    PassShape(min_tokens=8, min_queries=8, short_keys=()),
)
FAST = PassShape(min_tokens=1, min_queries=1, key_block=64, short_keys=())


@dataclass(frozen=True, slots=True)
class Numerics:
    """What was found: the shapes to keep to, and what they guarantee.

    Attributes:
        contract: ``token-identical`` or ``near-tie``.
        tree_contract: the same for drafts that branch.
        shape: of passes.
        max_difference: largest logit difference that narrower shapes or this one showed, 0 if none did.
        seconds: the check took; 0 when it came from the cache.
    """

    contract: str
    tree_contract: str
    shape: PassShape
    max_difference: float
    seconds: float = 0.0

    def for_drafts(self, are_trees: bool) -> str:
        """The contract of drafts that are chains, or of those that may branch."""
        return self.tree_contract if are_trees else self.contract


def settle_numerics(target: TargetModel, fingerprint: str, config: EngineConfig) -> Numerics:
    """Find the shapes for a model, set them on it and say what they guarantee.

    The kernels of a :class:`StatefulModel` are transformers' own: their bits change with a pass's width.

    Args:
        fingerprint: changes with the model's configuration or weights.
    """
    if isinstance(target, StatefulModel):
        return Numerics(NEAR_TIE, NEAR_TIE, target.shape, float("nan"))
    if config.numerics == "fast":
        target.shape = FAST
        return Numerics(NEAR_TIE, NEAR_TIE, FAST, float("nan"))
    file = measurement_file("numerics", target, fingerprint, config)
    found = _read(file)
    if found is None:
        found = find_shape(target)
        write_measurement(file, asdict(found))
    target.shape = found.shape
    return found


def find_shape(target: TargetModel) -> Numerics:
    """The narrowest of the candidate shapes that holds; if none does, contract near-tie."""
    started = time.perf_counter()
    worst = 0.0
    for shape in CANDIDATES:
        difference = largest_difference(target, shape)
        if difference == 0.0:
            trees = TOKEN_IDENTICAL if tree_difference(target, shape) == 0.0 else NEAR_TIE
            return Numerics(TOKEN_IDENTICAL, trees, shape, worst, time.perf_counter() - started)
        worst = max(worst, difference)
    return Numerics(NEAR_TIE, NEAR_TIE, PassShape(), worst, time.perf_counter() - started)


def tree_difference(target: TargetModel, shape: PassShape) -> float:
    """Largest logit difference between a text's end fed as a chain and as one path of a tree, among neighbours."""
    target.shape = shape
    worst = 0.0
    for length in _lengths(target):
        with _Trial(target, _text(target, length), neighbours=3) as crowd:
            worst = max(worst, float((crowd.tree() - crowd.tail([_tail_len(target)])).abs().max()))
    return worst


def largest_difference(target: TargetModel, shape: PassShape) -> float:
    """Largest logit difference between the ways of feeding one text; 0.0 means identical bits.

    Stops at the first way that differs.
    """
    target.shape = shape
    tail = _tail_len(target)
    for length in _lengths(target):
        text = _text(target, length)
        with _Trial(target, text, neighbours=0) as alone:
            reference = alone.tail([tail])
            ways = [partial(alone.tail, [width] * tail) for width in (1, 2, 3, 5, 8)]
            ways += [partial(alone.tail, [tail], chunk=chunk) for chunk in (17, 48)]
            difference = _first_difference(ways, reference)
        if difference:
            return difference
        with _Trial(target, text, neighbours=3) as crowd:
            difference = _first_difference(
                [partial(crowd.tail, w) for w in ([1] * tail, [tail], [4, 1, tail])], reference
            )
        if difference:
            return difference
    return 0.0


def _first_difference(ways: Sequence[Callable[[], Tensor]], reference: Tensor) -> float:
    for way in ways:
        difference = float((way() - reference).abs().max())
        if difference:
            return difference
    return 0.0


def _tail_len(target: TargetModel) -> int:
    """Tokens at the end of the test text whose logits are compared; fewer for a model with few positions."""
    return min(TAIL, max(1, target.max_model_len // 3))


def _lengths(target: TargetModel) -> list[int]:
    """Short, and across the blocks of 512 keys, as far as the model's limit allows."""
    room = max(target.max_model_len - _tail_len(target) - 8, _tail_len(target) + 1)
    return sorted({min(length, room) for length in (40, 530)})


def _text(target: TargetModel, length: int, salt: int = 0) -> list[int]:
    return [(i * i * 31 + i * 7 + salt * 101 + 3) % (target.vocab_size - 1) for i in range(length)]


class _Trial:
    """A text, perhaps among neighbours of other lengths, whose last tokens are fed again and again.

    The text does not sit in slot 0, so that neighbours lie on both sides of it.
    """

    def __init__(self, target: TargetModel, text: list[int], neighbours: int):
        self._target, self._text = target, text
        self._tail = _tail_len(target)
        self._start = len(text) - self._tail
        most = max(1, target.max_model_len - 2 * self._tail)
        lengths = [min(length, most) for length in (9, 700, 31)][:neighbours]
        self._neighbours = [_text(target, length + self._tail * 2, salt=i + 1) for i, length in enumerate(lengths)]
        self._ids = [-2 - i for i in range(neighbours + 1)]
        self._main = self._ids[min(1, neighbours)]

    def __enter__(self) -> _Trial:
        others = iter(self._neighbours)
        for sequence in self._ids:
            self._target.slots.open(sequence)
            text = self._text[: self._start] if sequence == self._main else next(others)[: -self._tail * 2]
            self._target.prefill(sequence, text, 4096)
        return self

    def __exit__(self, *_: object) -> None:
        for sequence in self._ids:
            self._target.slots.close(sequence)

    def tree(self) -> Tensor:
        """Logits ``[tail, V]`` of the text's end, each of its tokens but the first between two siblings."""
        first, *others = self._text[self._start :][: self._tail]
        tokens, parents, at = [first], [], [0]
        for token in others:
            parent = at[-1] - 1
            wrong = [(token + i) % self._target.vocab_size for i in (1, 2)]
            tokens += [wrong[0], token, wrong[1]]
            parents += [parent] * 3
            at.append(len(tokens) - 2)
        self._target.slots.truncate(self._main, self._start)
        rows = [PassRow(self._main, tokens, len(tokens), parents), *self._others(0)]
        return self._target.forward(rows)[at].float()

    def tail(self, widths: list[int], chunk: int = 0) -> Tensor:
        """Logits ``[tail, V]`` of the text's end, fed in passes of ``widths``; ``chunk`` feeds the prompt anew."""
        slots = self._target.slots
        slots.truncate(self._main, 0 if chunk else self._start)
        if chunk:
            self._target.prefill(self._main, self._text[: self._start], chunk)
        parts, at = [], 0
        for step, width in enumerate(widths):
            tokens = self._text[self._start + at : self._start + min(at + width, self._tail)]
            if not tokens:
                break
            rows = [PassRow(self._main, tokens, len(tokens)), *self._others(step)]
            parts.append(self._target.forward(rows)[: len(tokens)].float())
            slots.commit(self._main, len(tokens))
            at += width
        return torch.cat(parts)

    def _others(self, step: int) -> list[PassRow]:
        """The neighbours' rows, of other lengths at each step."""
        ids = [sequence for sequence in self._ids if sequence != self._main]
        return [
            PassRow(sequence, text[-self._tail * 2 :][: 1 + (step + i) % 3], 1)
            for i, (sequence, text) in enumerate(zip(ids, self._neighbours, strict=True))
        ]


def _read(file: Path) -> Numerics | None:
    stored = read_measurement(file)
    try:
        shape = stored["shape"]
        shape["short_keys"] = tuple(shape["short_keys"])
        return Numerics(stored["contract"], stored["tree_contract"], PassShape(**shape), stored["max_difference"])
    except (KeyError, TypeError):
        return None
