"""Exact laws of what a speculative round emits, by adding up every case: no sampling, no noise.

A round that accepts i draft tokens emits i + 1. Its outcome is held as one array per i, of shape
``[V] * (i + 1)``: the probability of emitting exactly these tokens. Whatever the rule, a chain or a tree, the
law of the output follows from these arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from foredraft.lab.toy import Floats, ToyLanguage

Emissions = tuple[Floats, ...]


@dataclass(frozen=True, slots=True)
class Instance:
    """Distributions after every prefix, as random as they come: nothing is shared between two prefixes.

    Attributes:
        target: ``target[i]`` is ``[V] * i + [V]``: next-token probabilities after each prefix of i tokens;
            there are k + 1 of them.
        draft: the same of the drafter, k of them.
    """

    target: tuple[Floats, ...]
    draft: tuple[Floats, ...]

    @property
    def vocab_size(self) -> int:
        return int(self.target[0].shape[-1])

    @property
    def num_draft_tokens(self) -> int:
        return len(self.draft)


def _random_distributions(rng: np.random.Generator, shape: tuple[int, ...], *, with_zeros: bool) -> Floats:
    weights: Floats = rng.random(shape) ** 2 + 0.02
    if with_zeros:
        keep = rng.random(shape) < 0.6
        keep |= weights == weights.max(axis=-1, keepdims=True)
        weights = weights * keep
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def random_instance(
    rng: np.random.Generator, *, vocab_size: int = 3, num_draft_tokens: int = 3, with_zeros: bool = False
) -> Instance:
    """A random instance; ``with_zeros`` strikes about a third of the tokens, as top-k and top-p do."""
    shapes = [(vocab_size,) * (i + 1) for i in range(num_draft_tokens + 1)]
    return Instance(
        target=tuple(_random_distributions(rng, shape, with_zeros=with_zeros) for shape in shapes),
        draft=tuple(_random_distributions(rng, shape, with_zeros=with_zeros) for shape in shapes[:-1]),
    )


def with_agreement(rng: np.random.Generator, instance: Instance) -> Instance:
    """The instance with a drafter that equals the target after about half of the prefixes."""
    draft = [
        np.where(rng.random(probs.shape[:-1])[..., None] < 0.5, target, probs)
        for target, probs in zip(instance.target, instance.draft, strict=False)
    ]
    return Instance(instance.target, tuple(draft))


def language_instance(language: ToyLanguage, last_token: int, num_draft_tokens: int) -> Instance:
    """The toy language after ``last_token`` written as an instance."""

    def after_prefixes(probs: Floats, prefix_len: int) -> Floats:
        shape = (language.vocab_size,) * (prefix_len + 1)
        spread: Floats = np.broadcast_to(probs[last_token] if prefix_len == 0 else probs, shape)
        return spread

    return Instance(
        target=tuple(after_prefixes(language.target_probs, i) for i in range(num_draft_tokens + 1)),
        draft=tuple(after_prefixes(language.draft_probs, i) for i in range(num_draft_tokens)),
    )


def _trailing(values: Floats, num_axes: int) -> Floats:
    return values.reshape(values.shape + (1,) * num_axes)


def continuations(instance: Instance) -> tuple[Floats, ...]:
    """``result[i]`` ``[V] * (k + 1)``: the target's probability of tokens i to k given those before them."""
    length = instance.num_draft_tokens + 1
    laws = [np.ones((instance.vocab_size,) * length)]
    for i in reversed(range(length)):
        laws.append(_trailing(instance.target[i], length - i - 1) * laws[-1])
    return tuple(reversed(laws))


def emitted_law(instance: Instance, emissions: Emissions) -> Floats:
    """``[V] * (k + 1)``: law of k + 1 tokens, those of one round and then the target's own."""
    laws = continuations(instance)
    length = instance.num_draft_tokens + 1
    law = np.zeros((instance.vocab_size,) * length)
    for part in emissions:
        law += _trailing(part, length - part.ndim) * laws[part.ndim]
    return law


def distance_to_target(instance: Instance, emissions: Emissions) -> float:
    """Total variation between the law that a rule emits and the target's; 0 up to rounding if it is exact.

    A rule that loses or invents probability mass shows up too, since the masses are compared as well.
    """
    law = emitted_law(instance, emissions)
    distance = 0.5 * float(np.abs(law - continuations(instance)[0]).sum())
    return max(distance, abs(float(law.sum()) - 1.0))


def mean_emitted_tokens(emissions: Emissions) -> float:
    """Expected tokens per target pass, the recovered or bonus token included."""
    return float(sum(part.ndim * part.sum() for part in emissions))


def sequence_law(language: ToyLanguage, emissions_after: Callable[[int], Emissions]) -> Floats:
    """``[V ** L]``: law of sequences made of rounds one after another and cut to the sequence length.

    ``emissions_after(token)`` is the law of a round that starts after ``token``.
    """

    tokens = range(language.vocab_size)
    emissions = [emissions_after(token) for token in tokens]

    @cache
    def after(token: int, length: int) -> Floats:
        law = np.zeros((language.vocab_size,) * length)
        for part in emissions[token]:
            missing = length - part.ndim
            if missing <= 0:
                law += part.sum(axis=tuple(range(length, part.ndim)))
            else:
                law += _trailing(part, missing) * np.stack([after(last, missing) for last in tokens])
        return law

    return after(language.start_token, language.sequence_len).ravel()
