"""Whether what an engine emits follows the target's law: joint frequencies of short texts against exact values.

The target is a model of three words whose every probability is enumerated: two layers, in which the whole text
matters, so that drafts from a part of its layers or of its cache are put to the test too. What several steps emit in a
row is judged jointly, because noise that is used twice shows only there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from scipy.stats import chi2
from transformers import LlamaForCausalLM

from foredraft.drafters import Drafter
from foredraft.sampling import probs_from_logits
from foredraft.target.forward import TargetModel
from foredraft.testing.engines import engine_for, run
from foredraft.testing.models import IMPOSSIBLE, bigram_model, random_model, target_for, tiny_config
from foredraft.types import SamplingParams

NUM_WORDS = 3
DRAFT_PROBS = ((0.33, 0.12, 0.55), (0.62, 0.05, 0.33), (0.40, 0.17, 0.43))
PROMPT = (0, 1, 2, 2, 1, 0, 0, 1, 2, 1, 0, 2)
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
    """Assert that texts of four tokens have the target's joint law, and so have pairs of neighbours.

    5,000 texts, 20,000 tokens, with fixed seeds, so that a result does not change from run to run. Another
    choice of seeds would fail a right drafter by chance once in a million (chi-square over the 81 texts);
    the total variation of the pairs, pooled over places, stays below 0.02 but for once in 10^6 too (fewer texts
    widen that by the root).

    Args:
        rule: any lossless one.
        options: of :class:`SamplingParams`, for instance a filter.

    Returns:
        The acceptance rate of the drafts; 0.0 if there were none.
    """
    model = three_words()
    target = target_for(model)
    drafter = make_drafter(target, bigram_model(torch.tensor(DRAFT_PROBS).log()))
    engine = engine_for(
        target,
        drafter,
        num_speculative_tokens=num_draft_tokens,
        acceptance_rule=rule,
        max_num_seqs=BATCH,
        max_num_batched_tokens=len(PROMPT) * BATCH,
    )
    texts, drafted, accepted = [], 0, 0
    for start in range(0, num_texts, BATCH):
        params = [SamplingParams(seed=start + i, max_tokens=NUM_TOKENS, **options) for i in range(BATCH)]
        for sequence in run(engine, [PROMPT] * BATCH, params):
            texts.append(tuple(sequence.output_token_ids))
            drafted += sequence.metrics.num_draft_tokens
            accepted += sequence.metrics.num_accepted_tokens
    expected = _law(model, SamplingParams(**options))
    _check_joint(texts, expected, rule)
    _check_pairs(texts, expected, rule)
    return accepted / drafted if drafted else 0.0


@functools.cache
def three_words() -> LlamaForCausalLM:
    """A random Llama that never says a word but the first three: one hidden coordinate is constant and forbids it."""
    model = random_model(LlamaForCausalLM, tiny_config(max_position_embeddings=64), seed=4)
    model.model.embed_tokens.weight[:, 0] = 4.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
    model.lm_head.weight *= 0.3
    model.lm_head.weight[NUM_WORDS:] = 0.0
    model.lm_head.weight[NUM_WORDS:, 0] = IMPOSSIBLE
    return model


def _law(model: Any, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of each text of :data:`NUM_TOKENS` words, by one pass over all of them."""
    texts = list(itertools.product(range(NUM_WORDS), repeat=NUM_TOKENS))
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*PROMPT, *text] for text in texts])).logits[:, len(PROMPT) - 1 : -1]
    probs = probs_from_logits(logits.flatten(0, 1), [params] * (len(texts) * NUM_TOKENS)).double()
    taken = probs.gather(1, torch.tensor(texts).flatten()[:, None]).view(len(texts), NUM_TOKENS)
    return dict(zip(texts, taken.prod(1).tolist(), strict=True))


def _check_joint(texts: list[tuple[int, ...]], law: dict[tuple[int, ...], float], rule: str) -> None:
    counts = dict.fromkeys(law, 0)
    for text in texts:
        assert text in counts, f"an impossible token in {text}"
        counts[text] += 1
    impossible = [text for text, probability in law.items() if not probability and counts[text]]
    assert not impossible, f"texts of probability 0 were emitted: {impossible[:3]}"
    statistic, cells = 0.0, 0
    for text, probability in law.items():
        if probability:
            statistic += (counts[text] - len(texts) * probability) ** 2 / (len(texts) * probability)
            cells += 1
    assert chi2.sf(statistic, cells - 1) > FALSE_ALARM, (
        f"rule {rule}: chi-square {statistic:.0f} with {cells - 1} degrees of freedom; the emitted texts do not "
        "have the target's joint law"
    )


def _check_pairs(texts: list[tuple[int, ...]], law: dict[tuple[int, ...], float], rule: str) -> None:
    emitted, expected = torch.zeros(2, NUM_WORDS, NUM_WORDS, dtype=torch.float64)
    for pairs, weighted in ((emitted, [(text, 1 / len(texts)) for text in texts]), (expected, law.items())):
        for text, weight in weighted:
            for before, token in itertools.pairwise((PROMPT[-1], *text)):
                pairs[before, token] += weight / NUM_TOKENS
    distance = 0.5 * (emitted - expected).abs().sum()
    bound = LARGEST_TV * (NUM_TEXTS / len(texts)) ** 0.5
    assert distance < bound, f"rule {rule}: total variation {distance:.3f} of neighbouring tokens"
