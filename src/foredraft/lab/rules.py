"""Every acceptance rule on random instances: which keep the target's law, and how far off the others are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from foredraft.lab import chains, trees
from foredraft.lab.coupling import coupled_sequence, plain_sequence
from foredraft.lab.enumeration import (
    Emissions,
    Instance,
    distance_to_target,
    mean_emitted_tokens,
    random_instance,
    with_agreement,
)
from foredraft.lab.toy import seed_language

EXACT_LIMIT = 1e-12
_ENGINE = "engine"
_ENGINE_COUPLED = "engine + law of the pair"
_MISTAKE = "engine, misused"
_REFERENCE = "reference"
_REFERENCE_MISTAKE = "reference, mistaken"
HOW_SHOWN = """\
engine: every draft and uniform through the functions of foredraft.verify.
engine + law of the pair: its matching, over the closed-form law of two draws with the same Gumbel noise.
reference: the lab's own version of the rule, written from the paper; the engine's code is not run.
Tokens per target pass compare among chains and among trees (depth 2, 2 children a node)."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule under test: ``promise`` is exact, lossy or wrong; ``shown_by`` says what the enumeration ran."""

    name: str
    shape: str
    promise: str
    shown_by: str
    emissions: Callable[[Instance], Emissions]


def _ratio(
    rule: chains.RatioRule, drafts: Callable[[Instance], chains.Drafts] = chains.every_draft
) -> Callable[[Instance], Emissions]:
    return lambda instance: chains.ratio_emissions(rule, drafts(instance))


def _tree(rule: trees.NodeRule) -> Callable[[Instance], Emissions]:
    return lambda instance: trees.walk(instance, rule, depth=2)


_one_hot = partial(chains.greedy_draft, keep_probs=False)
_soft_greedy = partial(chains.greedy_draft, keep_probs=True)
_stop_after = partial(chains.cut_drafts, threshold=0.45, keep_unsure=True)
_drop_seen = partial(chains.cut_drafts, threshold=0.45, keep_unsure=False)
_drawn = trees.drawn_children

RULES = (
    Rule("rejection", "chain", "exact", _ENGINE, _ratio(chains.REJECTION)),
    Rule("rejection, one-hot draft", "chain", "exact", _ENGINE, _ratio(chains.REJECTION, _one_hot)),
    Rule(
        "rejection, stop after an unsure token",
        "chain",
        "exact",
        _ENGINE,
        _ratio(chains.REJECTION, _stop_after),
    ),
    Rule("block", "chain", "exact", _ENGINE, _ratio(chains.BLOCK)),
    Rule("block, one-hot draft", "chain", "exact", _ENGINE, _ratio(chains.BLOCK, _one_hot)),
    Rule("block, stop after an unsure token", "chain", "exact", _ENGINE, _ratio(chains.BLOCK, _stop_after)),
    Rule("match", "chain", "exact", _ENGINE, partial(chains.match_emissions, coupled=False)),
    Rule("coupled", "chain", "exact", _ENGINE_COUPLED, partial(chains.match_emissions, coupled=True)),
    Rule("deterministic children", "tree", "exact", _REFERENCE, _tree(trees.deterministic_children)),
    Rule("children with replacement", "tree", "exact", _REFERENCE, _tree(partial(_drawn, replace=True))),
    Rule("children without replacement", "tree", "exact", _REFERENCE, _tree(partial(_drawn, replace=False))),
    Rule("tree match", "tree", "exact", _REFERENCE, _tree(trees.tree_match)),
    Rule("typical", "chain", "lossy", _ENGINE, _ratio(chains.TYPICAL)),
    Rule("residual replaced by the target", "chain", "wrong", _MISTAKE, _ratio(chains.WRONG_FALLBACK)),
    Rule("soft ratio for a greedy draft", "chain", "wrong", _MISTAKE, _ratio(chains.REJECTION, _soft_greedy)),
    Rule("unsure token dropped once seen", "chain", "wrong", _MISTAKE, _ratio(chains.REJECTION, _drop_seen)),
    Rule(
        "without replacement, draft not renormalised",
        "tree",
        "wrong",
        _REFERENCE_MISTAKE,
        _tree(partial(_drawn, replace=False, renormalise=False)),
    ),
)


@dataclass(frozen=True, slots=True)
class RuleReport:
    """Distances to the target's law over the instances, and the mean of expected tokens per target pass."""

    rule: Rule
    max_distance: float
    mean_distance: float
    mean_tokens_per_target_pass: float

    @property
    def passed(self) -> bool:
        """An exact rule is exact on every instance; any other one is seen to be off on some."""
        return (self.max_distance <= EXACT_LIMIT) == (self.rule.promise == "exact")


def random_instances(
    num_instances: int, *, vocab_size: int = 3, num_draft_tokens: int = 3, seed: int = 0
) -> list[Instance]:
    """Random instances. Every other one has tokens of probability zero, as filters make them; in every fourth
    the drafter is the target after some prefixes, which makes residuals vanish."""
    rng = np.random.default_rng(seed)
    sizes = {"vocab_size": vocab_size, "num_draft_tokens": num_draft_tokens}
    instances = [random_instance(rng, **sizes, with_zeros=bool(i % 2)) for i in range(num_instances)]
    return [with_agreement(rng, instance) if i % 4 == 3 else instance for i, instance in enumerate(instances)]


def report(rule: Rule, instances: list[Instance]) -> RuleReport:
    """Enumerate one rule on all instances."""
    emissions = [rule.emissions(instance) for instance in instances]
    distances = [distance_to_target(*pair) for pair in zip(instances, emissions, strict=True)]
    return RuleReport(
        rule=rule,
        max_distance=max(distances),
        mean_distance=float(np.mean(distances)),
        mean_tokens_per_target_pass=float(np.mean([mean_emitted_tokens(part) for part in emissions])),
    )


def count_keyed_differences(num_sequences: int, *, num_draft_tokens: int = 3) -> int:
    """Sequences of the toy language for which the coupled rule's tokens differ from plain decoding's, seed by
    seed, run with the engine's keyed noise. Expected: 0."""
    language = seed_language()
    return sum(
        coupled_sequence(language, seed, num_draft_tokens) != plain_sequence(language, seed)
        for seed in range(num_sequences)
    )


def document(report: RuleReport) -> dict[str, Any]:
    """The report as plain data."""
    rule = report.rule
    return {
        "name": rule.name,
        "shape": rule.shape,
        "promise": rule.promise,
        "shown_by": rule.shown_by,
        "max_distance": report.max_distance,
        "mean_distance": report.mean_distance,
        "mean_tokens_per_target_pass": report.mean_tokens_per_target_pass,
        "passed": report.passed,
    }
