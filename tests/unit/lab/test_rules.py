"""Exact enumeration: chains through the engine's functions, trees and the coupled pair by reference."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from foredraft import theory
from foredraft.lab import chains, trees
from foredraft.lab.coupling import coupled_sequence, gumbel_pair_law, plain_sequence
from foredraft.lab.enumeration import (
    continuations,
    distance_to_target,
    mean_emitted_tokens,
    random_instance,
    sequence_law,
)
from foredraft.lab.rules import RULES, Rule, count_keyed_differences, random_instances, report
from foredraft.lab.toy import exact_law, seed_language

INSTANCES = random_instances(24)


def test_instances_reach_the_trouble_spots():
    zeros = [instance for instance in INSTANCES if any((probs == 0.0).any() for probs in instance.target)]
    agreeing = [i for i in INSTANCES if any((t == d).all(-1).any() for t, d in zip(i.target, i.draft, strict=False))]
    assert len(zeros) >= 8
    assert len(agreeing) >= 4
    for instance in INSTANCES:
        assert continuations(instance)[0].sum() == pytest.approx(1.0)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_does_what_it_promises(rule):
    result = report(rule, INSTANCES)
    assert result.passed
    if rule.promise == "exact":
        assert result.max_distance <= 1e-12
    else:
        assert result.mean_distance > 0.01


def test_all_rules_of_the_product_are_listed():
    assert {rule.promise for rule in RULES} == {"exact", "lossy", "wrong"}
    assert sum(rule.promise == "exact" for rule in RULES) == 12
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("vocab_size", [2, 4])
def test_rejection_and_block_are_exact_on_other_vocabularies(vocab_size):
    for instance in random_instances(8, vocab_size=vocab_size, num_draft_tokens=2, seed=5):
        for rule in (chains.REJECTION, chains.BLOCK):
            emissions = chains.ratio_emissions(rule, chains.every_draft(instance))
            assert distance_to_target(instance, emissions) <= 1e-12


def test_a_rule_that_is_slightly_off_is_caught():
    """A pass probability that is one in a million too high."""
    sloppy = replace(chains.REJECTION, pass_probs=lambda d: (chains.REJECTION.pass_probs(d) * 1.000001).clamp(max=1))
    rule = Rule("sloppy", "chain", "exact", "", lambda i: chains.ratio_emissions(sloppy, chains.every_draft(i)))
    result = report(rule, INSTANCES)
    assert not result.passed
    assert 1e-9 < result.max_distance < 1e-5


def test_lost_probability_is_noticed():
    instance = INSTANCES[0]
    emissions = chains.ratio_emissions(chains.REJECTION, chains.every_draft(instance))
    lossy = (emissions[0] * 0.9, *emissions[1:])
    assert distance_to_target(instance, lossy) > 0.01


def test_engine_rejection_equals_the_node_by_node_reference():
    """min(p, q) goes on, max(p - q, 0) is emitted: the law of a round, part by part."""

    def rejection_node(target, draft):
        return trees.NodeLaw(np.minimum(target, draft), np.maximum(target - draft, 0.0))

    for instance in INSTANCES:
        by_engine = chains.ratio_emissions(chains.REJECTION, chains.every_draft(instance))
        by_node = trees.walk(instance, rejection_node, depth=3)
        for left, right in zip(by_engine, by_node, strict=True):
            assert left == pytest.approx(right, abs=1e-14)


def test_engine_rejection_of_a_one_hot_draft_equals_a_tree_with_one_deterministic_child():
    one_child = partial(trees.deterministic_children, num_children=1)
    for instance in INSTANCES:
        by_engine = chains.ratio_emissions(chains.REJECTION, chains.greedy_draft(instance, keep_probs=False))
        for left, right in zip(by_engine, trees.walk(instance, one_child, depth=3), strict=True):
            assert left == pytest.approx(right, abs=1e-14)


def test_block_accepts_no_less_than_rejection_and_rejection_no_less_than_coupled_and_match():
    for instance in INSTANCES:
        block, rejection = (
            mean_emitted_tokens(chains.ratio_emissions(rule, chains.every_draft(instance)))
            for rule in (chains.BLOCK, chains.REJECTION)
        )
        coupled, match = (mean_emitted_tokens(chains.match_emissions(instance, coupled=flag)) for flag in (True, False))
        assert block >= rejection - 1e-12
        assert rejection >= coupled - 1e-12
        assert coupled >= match - 1e-12


def test_sampled_trees_accept_more_with_more_children_and_all_of_a_full_set():
    target, draft = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    accepted = [trees.drawn_children(target, draft, num_children=n, replace=False).descend.sum() for n in (1, 2, 3)]
    assert accepted[0] == pytest.approx(theory.rejection_acceptance(target, draft))
    assert accepted[0] < accepted[1] < accepted[2]


def test_with_replacement_of_a_filtered_draft_stays_exact():
    law = trees.drawn_children(np.array([0.5, 0.3, 0.2]), np.array([0.0, 0.0, 1.0]), num_children=3, replace=False)
    assert law.descend + law.emit == pytest.approx([0.5, 0.3, 0.2])


@pytest.mark.parametrize("vocab_size", [2, 3, 5])
def test_pair_law_has_the_right_margins_and_diagonal(vocab_size):
    rng = np.random.default_rng(vocab_size)
    for with_zeros in (False, True):
        instance = random_instance(rng, vocab_size=vocab_size, num_draft_tokens=1, with_zeros=with_zeros)
        target, draft = instance.target[0], instance.draft[0]
        law = gumbel_pair_law(target, draft)
        assert law.min() >= 0.0
        assert law.sum(axis=1) == pytest.approx(target, abs=1e-14)
        assert law.sum(axis=0) == pytest.approx(draft, abs=1e-14)
        assert np.trace(law) == pytest.approx(theory.coupled_acceptance(target, draft), abs=1e-14)


def test_pair_law_counts_pairs_of_gumbel_draws():
    """400,000 pairs in 16 cells; five standard errors each, so below 1e-5 for a false alarm (fixed seed)."""
    target, draft = np.random.default_rng(4).dirichlet(np.ones(4), size=2)
    noise = np.random.default_rng(0).gumbel(size=(400_000, 4))
    pairs = (np.log(target) + noise).argmax(1) * 4 + (np.log(draft) + noise).argmax(1)
    shown = np.bincount(pairs, minlength=16).reshape(4, 4) / 400_000
    law = gumbel_pair_law(target, draft)
    assert (np.abs(shown - law) <= 5 * np.sqrt(law * (1 - law) / 400_000) + 1e-12).all()


def test_coupled_runs_equal_plain_ones_and_some_drafts_are_rejected():
    language = seed_language()
    assert count_keyed_differences(60) == 0
    assert len({tuple(plain_sequence(language, seed)) for seed in range(60)}) > 20
    assert coupled_sequence(language, 1, 0) == plain_sequence(language, 1)
    certain = replace(language, draft_probs=np.eye(4)[[3, 3, 3, 3]])
    assert all(coupled_sequence(certain, seed, 3) == plain_sequence(language, seed) for seed in range(20))


def test_sequence_law_of_plain_decoding_is_the_exact_law():
    language = seed_language()
    law = sequence_law(language, lambda token: (language.target_probs[token],))
    assert law == pytest.approx(exact_law(language), abs=1e-15)
