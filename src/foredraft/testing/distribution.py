"""Whether what an engine emits follows the target's law: joint frequencies of short texts against exact values.

The target is a language of three words in which every probability is known. What several steps emit in a row is
judged jointly, because noise that is used twice shows only there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from scipy.stats import chi2
from torch import Tensor

from foredraft.drafters import Drafter
from foredraft.sampling import probs_from_logits
from foredraft.target.forward import TargetModel
from foredraft.testing.engines import engine_for, run
from foredraft.testing.models import bigram_model, target_for
from foredraft.types import SamplingParams

TARGET_PROBS = ((0.07, 0.83, 0.10), (0.42, 0.39, 0.19), (0.73, 0.12, 0.15))
DRAFT_PROBS = ((0.33, 0.12, 0.55), (0.62, 0.05, 0.33), (0.40, 0.17, 0.43))
PROMPT = (0, 0)
NUM_TOKENS = 4
NUM_TEXTS = 5000
BATCH = 500
FALSE_ALARM = 1e-6
LARGEST_TV = 0.02


def check_distribution(
    make_drafter: Callable[[TargetModel, Any], Drafter],
    rule: str,
    *,
    num_draft_tokens: int = 3,
    num_texts: int = NUM_TEXTS,
    **options: Any,
) -> float:
    """Assert that texts of four tokens have the target's joint law, and single tokens its conditional one.

    5,000 texts, 20,000 tokens, with fixed seeds, so that a result does not change from run to run. Another
    choice of seeds would fail a right drafter by chance once in a million (chi-square over the 81 texts);
    the total variation of the tokens, pooled over contexts, stays below 0.02 but for once in 10^6 too.

    Args:
        rule: any lossless one.
        options: of :class:`SamplingParams`, for instance a filter.

    Returns:
        The acceptance rate of the drafts; 0.0 if there were none.
    """
    table = torch.tensor(TARGET_PROBS).log()
    target = target_for(bigram_model(table))
    drafter = make_drafter(target, bigram_model(torch.tensor(DRAFT_PROBS).log()))
    engine = engine_for(
        target,
        drafter,
        num_speculative_tokens=num_draft_tokens,
        acceptance_rule=rule,
        max_num_seqs=BATCH,
        max_num_batched_tokens=2 * BATCH,
    )
    texts, drafted, accepted = [], 0, 0
    for start in range(0, num_texts, BATCH):
        params = [SamplingParams(seed=start + i, max_tokens=NUM_TOKENS, **options) for i in range(BATCH)]
        for sequence in run(engine, [PROMPT] * BATCH, params):
            texts.append(tuple(sequence.output_token_ids))
            drafted += sequence.metrics.num_draft_tokens
            accepted += sequence.metrics.num_accepted_tokens
    expected = probs_from_logits(table, [SamplingParams(**options)] * len(table))
    _check_joint(texts, expected, rule)
    _check_tokens(texts, expected, rule)
    return accepted / drafted if drafted else 0.0


def _check_joint(texts: list[tuple[int, ...]], table: Tensor, rule: str) -> None:
    possible = {text: _probability(text, table) for text in itertools.product(range(len(table)), repeat=NUM_TOKENS)}
    counts = dict.fromkeys(possible, 0)
    for text in texts:
        assert text in counts, f"an impossible token in {text}"
        counts[text] += 1
    impossible = [text for text, probability in possible.items() if not probability and counts[text]]
    assert not impossible, f"texts of probability 0 were emitted: {impossible[:3]}"
    statistic, cells = 0.0, 0
    for text, probability in possible.items():
        if probability:
            statistic += (counts[text] - len(texts) * probability) ** 2 / (len(texts) * probability)
            cells += 1
    assert chi2.sf(statistic, cells - 1) > FALSE_ALARM, (
        f"rule {rule}: chi-square {statistic:.0f} with {cells - 1} degrees of freedom; the emitted texts do not "
        "have the target's joint law"
    )


def _check_tokens(texts: list[tuple[int, ...]], table: Tensor, rule: str) -> None:
    counts = torch.zeros_like(table)
    for text in texts:
        for before, token in itertools.pairwise((PROMPT[-1], *text)):
            counts[before, token] += 1
    weights = counts.sum(-1, keepdim=True)
    distance = 0.5 * ((counts / weights.clamp(min=1) - table).abs() * weights / weights.sum()).sum()
    assert distance < LARGEST_TV, f"rule {rule}: total variation {distance:.3f} of the next token"


def _probability(text: tuple[int, ...], table: Tensor) -> float:
    probability = 1.0
    for before, token in itertools.pairwise((PROMPT[-1], *text)):
        probability *= float(table[before, token])
    return probability
