"""Whether a model's state is continued and restored rightly: measured on the model at hand before it is used.

Some implementations take the cached state for passes of one token only and begin anew, silently, with longer ones;
some compute another function token by token than in one pass; some keep the state where it cannot be copied. So one
text is fed in many ways, and the logits of each are compared with those of a single pass.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from foredraft.errors import UnsupportedModelError
from foredraft.target.kinds import describe, known_reason
from foredraft.target.layout import PassRow
from foredraft.target.stateful import StatefulModel

logger = logging.getLogger(__name__)

NUM_TOKENS, PROMPT = 24, 12
STEPS = ([1] * NUM_TOKENS, [PROMPT] + [1] * (NUM_TOKENS - PROMPT))
PIECES = ([3, 2, 7, 1, 4, 7], [PROMPT, NUM_TOKENS - PROMPT])
TOLERANCE = 3e-4
"""Of the difference that forgetting the first half of the text makes. Measured in float32 on random models of 26
kinds: up to 4e-5 where the state is continued rightly, from 6e-3 on where it is not."""


def check_states(target: StatefulModel) -> None:
    """Find out how the model can be run, and set ``single_steps``. In float32, whatever the model's dtype.

    Raises:
        UnsupportedModelError: it does not give the same logits token by token, or not after a rejected draft;
            or its code fails when a state is continued.
    """
    try:
        with _in_float32(target):
            steps, pieces = (max(_difference(target, widths) for widths in ways) for ways in (STEPS, PIECES))
            target.single_steps = not pieces <= TOLERANCE
            rejected = _difference_after_rejection(target)
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError, NotImplementedError) as error:
        raise UnsupportedModelError(f"{describe(target.model)} fails when its state is continued: {error}") from error
    if not steps <= TOLERANCE:
        _refuse(target, "other logits token by token than in one pass", steps)
    if not rejected <= TOLERANCE:
        _refuse(target, "other logits when its state is restored from a copy", rejected)
    if target.single_steps:
        logger.warning(
            "%s loses its state in passes of several tokens (difference %.1g), so it is fed token by token: "
            "drafts are verified rightly, but cannot make it faster",
            describe(target.model),
            pieces,
        )


def _refuse(target: StatefulModel, what: str, difference: float) -> None:
    raise UnsupportedModelError(
        f"{describe(target.model)} gives {what}{known_reason(target.model)}: the difference is {difference:.1g} of "
        f"what the text before makes, the limit {TOLERANCE:.0e}. So drafts cannot be verified exactly; use a model of "
        "another kind (foredraft env --models)"
    )


@contextmanager
def _in_float32(target: StatefulModel) -> Iterator[None]:
    """The model in float32 for a while, so that rounding cannot be taken for a fault, nor a fault for rounding."""
    tensors = [t for t in (*target.model.parameters(), *target.model.buffers()) if t.is_floating_point()]
    kept, dtype = [t.data for t in tensors], target.dtype
    try:
        for tensor in tensors:
            tensor.data = tensor.data.float()
        target.dtype = torch.float32
        yield
    finally:
        for tensor, data in zip(tensors, kept, strict=True):
            tensor.data = data
        target.dtype = dtype


def _text(target: StatefulModel, num_tokens: int = NUM_TOKENS, salt: int = 3) -> list[int]:
    return [(i * i * 31 + i * 7 + salt) % target.vocab_size for i in range(num_tokens)]


def _difference(target: StatefulModel, widths: Sequence[int]) -> float:
    text, parts, at = _text(target), [], 0
    target.slots.open(-1)
    try:
        for width in widths:
            parts.append(target.forward([PassRow(-1, text[at : at + width], width)]))
            target.slots.commit(-1, width)
            at += width
    finally:
        target.slots.close(-1)
    return _relative(target, torch.cat(parts)[PROMPT:])


def _difference_after_rejection(target: StatefulModel) -> float:
    """A draft of which nothing is kept, then one of which two tokens are, then the text to its end."""
    text, wrong = _text(target), _text(target, 4, salt=11)
    slots = target.slots
    slots.open(-1)
    try:
        target.prefill(-1, text[:PROMPT])
        for num_right in (0, 2):
            start, end = slots.length(-1), PROMPT + 1 + num_right
            target.forward([PassRow(-1, [*text[start:end], *wrong], 1 + num_right + len(wrong))])
            slots.commit(-1, end - start)
        tail = text[slots.length(-1) :]
        logits = target.forward([PassRow(-1, tail, len(tail))])
    finally:
        slots.close(-1)
    return _relative(target, logits)


def _relative(target: StatefulModel, logits: Tensor) -> float:
    """Distance to one pass over the whole text, in units of what forgetting the first half changes."""
    text, count = _text(target), len(logits)
    with torch.inference_mode():
        whole, _ = target.call(text, 0, None, count)
        forgetful, _ = target.call(text[PROMPT:], 0, None, min(count, NUM_TOKENS - PROMPT))
    tail = len(forgetful)
    return float((logits[-tail:] - whole[-tail:]).norm() / (forgetful - whole[-tail:]).norm())
