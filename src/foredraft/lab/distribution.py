"""Does speculative sampling leave the target's distribution alone? Counted, tested and enumerated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from foredraft.errors import InvalidOptionError
from foredraft.lab import chains
from foredraft.lab.enumeration import Emissions, Instance, language_instance, sequence_law
from foredraft.lab.fast_sampling import sample_rule
from foredraft.lab.toy import ToyLanguage, exact_law, fit
from foredraft.lab.toy_sampling import UniformStream, count_plain, count_speculative

SEED_SIZES = (1_000, 10_000, 100_000, 400_000)
MAX_DRAFT_TOKENS = 4
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Sampler:
    """A way to sample the toy language.

    ``promise`` is exact, lossy or wrong; ``rule`` is what :func:`sample_rule` takes; ``emissions`` gives the
    law of a round, None for plain decoding.
    """

    name: str
    promise: str
    rule: chains.RatioRule | str
    emissions: Callable[[Instance], Emissions] | None


def _ratio_sampler(name: str, promise: str, rule: chains.RatioRule) -> Sampler:
    return Sampler(name, promise, rule, lambda instance: chains.ratio_emissions(rule, chains.every_draft(instance)))


SAMPLERS = (
    Sampler("target only", "exact", "plain", None),
    _ratio_sampler("rejection", "exact", chains.REJECTION),
    _ratio_sampler("block", "exact", chains.BLOCK),
    Sampler("match", "exact", "match", lambda instance: chains.match_emissions(instance, coupled=False)),
    Sampler("coupled", "exact", "coupled", lambda instance: chains.match_emissions(instance, coupled=True)),
    _ratio_sampler("typical", "lossy", chains.TYPICAL),
    _ratio_sampler("wrong fallback", "wrong", chains.WRONG_FALLBACK),
)


@dataclass(frozen=True, slots=True)
class SamplerFit:
    """Counts of one sampler against the target's law; fields as in :class:`foredraft.lab.toy.Fit`."""

    sampler: str
    num_samples: int
    total_variation: float
    chi_square_p: float
    tokens_per_target_pass: float | None = None
    num_unlike_plain: int | None = None


def check_draft_len(num_draft_tokens: int) -> None:
    """Enumeration takes V^(2k + 1) cases, so k is limited to 1..4 on the toy language."""
    if not 1 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
        raise InvalidOptionError(
            f"num_draft_tokens={num_draft_tokens} is outside [1, {MAX_DRAFT_TOKENS}]: drafts are enumerated"
        )


def replay_seed(
    language: ToyLanguage,
    num_samples: int,
    num_draft_tokens: int = 3,
    *,
    progress: Progress = lambda done: None,
) -> list[SamplerFit]:
    """The seed document's table for one N: three samplers, one after another from one generator of seed N."""
    law, stream = exact_law(language), UniformStream(np.random.default_rng(num_samples))

    def row(name: str, counts: np.ndarray) -> SamplerFit:
        result = fit(counts, law)
        return SamplerFit(name, num_samples, result.total_variation, result.chi_square_p)

    rows = [row("target only", count_plain(language, stream, num_samples))]
    progress(num_samples)
    for name, wrong in (("speculative", False), ("wrong fallback", True)):
        counts = count_speculative(language, stream, num_samples, num_draft_tokens, wrong=wrong, progress=progress)
        rows.append(row(name, counts))
    return rows


def sample(
    language: ToyLanguage,
    sampler: Sampler,
    num_samples: int,
    num_draft_tokens: int = 3,
    *,
    seed: int = 0,
    progress: Progress = lambda done: None,
) -> SamplerFit:
    """One sampler, vectorised."""
    result = sample_rule(language, sampler.rule, num_samples, num_draft_tokens, seed=seed, progress=progress)
    quality = fit(result.counts, exact_law(language))
    return SamplerFit(
        sampler=sampler.name,
        num_samples=num_samples,
        total_variation=quality.total_variation,
        chi_square_p=quality.chi_square_p,
        tokens_per_target_pass=result.tokens_per_target_pass,
        num_unlike_plain=result.num_unlike_plain,
    )


def exact_total_variation(language: ToyLanguage, sampler: Sampler, num_draft_tokens: int = 3) -> float:
    """Total variation between the law of the sampler's sequences and the target's, with no sampling."""
    emissions = sampler.emissions
    if emissions is None:
        return 0.0
    law = sequence_law(language, lambda token: emissions(language_instance(language, token, num_draft_tokens)))
    return 0.5 * float(np.abs(law - exact_law(language)).sum())


@dataclass(frozen=True, slots=True)
class Uniformity:
    """Chi-square p-values of one sampler over seeds, and the Kolmogorov-Smirnov p-value of uniformity."""

    sampler: str
    promise: str
    p_values: tuple[float, ...]
    kolmogorov_smirnov_p: float


def uniformity(
    language: ToyLanguage,
    sampler: Sampler,
    seeds: Sequence[int],
    num_samples: int,
    num_draft_tokens: int = 3,
    *,
    progress: Progress = lambda done: None,
) -> Uniformity:
    """A correct sampler's p-values are uniform on (0, 1): small ones are no alarm, a heap of them is.

    ``progress`` gets 1 per seed.
    """
    p_values = []
    for seed in seeds:
        p_values.append(sample(language, sampler, num_samples, num_draft_tokens, seed=seed).chi_square_p)
        progress(1)
    test = stats.kstest(p_values, "uniform")
    return Uniformity(sampler.name, sampler.promise, tuple(p_values), float(test.pvalue))
