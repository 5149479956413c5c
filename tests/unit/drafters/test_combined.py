"""Which of several sources drafts a row, and that the choice changes nothing but speed."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from foredraft.drafters import Drafter, DraftRow, JudgedDraft, Offer
from foredraft.drafters.base import chain_draft, tree_draft
from foredraft.drafters.combined import CombinedDrafter, Proposal, Record, prior_path_probs
from foredraft.drafters.ngram import NGramDrafter
from foredraft.sampling import SamplingRow
from foredraft.types import SamplingParams
from foredraft.verify import rejection

PARAMS = SamplingParams(temperature=0)


class Fixed(Drafter):
    """Always says the same, and writes down what it was asked and told."""

    def __init__(self, tokens, path_probs=None, *, stochastic=False, cost=0.0, probs=None):
        self.tokens, self.path_probs, self.probs = tokens, path_probs, probs
        self.stochastic, self.cost = stochastic, cost
        self.asked, self.told = [], []

    def propose(self, rows):
        self.asked.append([(row.sequence_id, row.num_draft_tokens) for row in rows])
        tokens = [self.tokens[: row.num_draft_tokens] for row in rows]
        width = max(map(len, tokens))
        probs = None if self.probs is None else self.probs.expand(len(rows), width, -1)
        estimates = None if self.path_probs is None else [self.path_probs[: len(row)] for row in tokens]
        return chain_draft(tokens, probs, estimates)

    def observe(self, sequence_id, token_ids):
        self.told.append(("observe", sequence_id, len(token_ids)))

    def forget(self, sequence_id):
        self.told.append(("forget", sequence_id))

    def close(self):
        self.told.append(("close",))


def row(tokens, k, sequence_id=0):
    return DraftRow(sequence_id, list(tokens), k, 0, "greedy", lambda _: SamplingRow(PARAMS))


def combined(*sources, limits=None):
    return CombinedDrafter(sources, limits or [16] * len(sources))


def first_row(draft):
    return draft.token_ids[0, : draft.num_draft_tokens[0]].tolist()


def test_the_first_source_drafts_and_the_model_when_it_finds_nothing():
    """Lookup costs nothing; the model isn't asked while lookup has something."""
    lookup, model = Fixed([1, 2, 3]), Fixed([7, 8, 9], stochastic=True, cost=0.1)
    drafter = combined(lookup, model)
    assert first_row(drafter.propose([row([5], 3)])) == [1, 2, 3]
    assert model.asked == []
    lookup.tokens = []
    assert first_row(drafter.propose([row([5], 3)])) == [7, 8, 9]
    assert model.asked == [[(0, 3)]]


def test_of_two_estimates_the_higher_sum_wins():
    """Three tokens at a half against two that are nearly sure; a source without estimates stands between."""
    unsure, sure = Fixed([1, 2, 3], [0.5, 0.25, 0.125]), Fixed([4, 5], [0.9, 0.81])
    assert first_row(combined(unsure, sure).propose([row([5], 3)])) == [4, 5]
    assert first_row(combined(unsure, Fixed([6, 7, 8])).propose([row([5], 3)])) == [6, 7, 8]
    assert first_row(combined(sure, Fixed([6, 7, 8])).propose([row([5], 3)])) == [4, 5]
    assert first_row(combined(sure, Fixed([6, 7], [0.9, 0.81])).propose([row([5], 3)])) == [4, 5]


def test_a_source_that_is_wrong_gives_way_and_comes_back():
    """Both are judged by the text at every step, chosen or not."""
    first, second = Fixed([1, 2, 3]), Fixed([4, 5, 6])
    drafter, text, chosen = combined(first, second), [9], []
    for emitted in [[4, 5, 6, 0]] * 3 + [[1, 2, 3, 0]] * 8:
        chosen.append(first_row(drafter.propose([row(text, 3)]))[0])
        text += emitted
        drafter.observe(0, text)
    assert chosen[:3] == [1, 4, 4]
    assert chosen[-1] == 1


def test_each_sequence_has_its_own_record():
    """What a source got wrong in one text says nothing of another."""
    drafter, text = combined(Fixed([1, 2, 3]), Fixed([4, 5, 6])), [9]
    for _ in range(3):
        drafter.propose([row(text, 3)])
        text += [4, 5, 6, 0]
        drafter.observe(0, text)
    draft = drafter.propose([row(text, 3), row([9], 3, sequence_id=1)])
    assert draft.token_ids.tolist() == [[4, 5, 6], [1, 2, 3]]
    drafter.forget(0)
    assert first_row(drafter.propose([row(text, 3)])) == [1, 2, 3]


def test_upkeep_goes_to_every_source_and_limits_to_each():
    sources = Fixed([1] * 9), Fixed([2] * 9, stochastic=True)
    drafter = combined(*sources, limits=[7, 4])
    drafter.propose([row([5], 9)])
    assert sources[0].asked == [[(0, 7)]]
    sources[0].tokens = []
    drafter.propose([row([5], 9)])
    assert sources[1].asked == [[(0, 4)]]
    drafter.observe(0, [5, 1])
    drafter.forget(0)
    drafter.close()
    for source in sources:
        assert source.told == [("observe", 0, 2), ("forget", 0), ("close",)]


def test_rows_of_different_sources_share_one_draft():
    """Tokens that were not drawn get a law with one token; rows without tokens get none."""
    law = torch.tensor([0.25, 0.25, 0.5])
    model = Fixed([2, 0], stochastic=True, probs=law)
    lookup = Fixed([1, 1, 1])
    drafter = combined(lookup, model)

    def lookup_for_row_1(rows):
        return chain_draft([[1, 1, 1] if r.sequence_id == 1 and r.num_draft_tokens else [] for r in rows])

    lookup.propose = lookup_for_row_1
    draft = drafter.propose([row([5], 3, 0), row([5], 3, 1), row([5], 0, 2)])
    assert draft.token_ids.tolist() == [[2, 0, 0], [1, 1, 1], [0, 0, 0]]
    assert draft.num_draft_tokens == [2, 3, 0]
    assert draft.probs[0, :2].tolist() == [law.tolist()] * 2
    assert draft.probs[1].tolist() == [[0, 1, 0]] * 3
    assert drafter.propose([row([5], 3, 1)]).probs is None


def test_capabilities_are_those_of_all_sources():
    plain, special = Fixed([1]), Fixed([1], stochastic=True)
    special.makes_trees, special.feature_layers, special.num_top_tokens, special.rolls_back = True, (2,), 4, False
    both = combined(plain, special)
    assert (both.makes_trees, both.feature_layers, both.num_top_tokens, both.stochastic) == (True, (2,), 4, True)
    assert not both.rolls_back
    assert combined(plain, plain).rolls_back


def test_a_judged_draft_is_shown_to_all_that_ask_for_it():
    """Whosever it was, with as many of the likeliest tokens as each asks for."""
    seen = []
    first, second, third = Fixed([1], [0.1]), Fixed([2], [0.9]), Fixed([3], [0.2])
    for source, top in ((first, 3), (second, 2), (third, 0)):
        source.num_top_tokens = top
        source.observe_pass = lambda judged, source=source: seen.append((source, judged.top_token_ids.tolist()))
    drafter = combined(first, second, third)
    assert drafter.num_top_tokens == 3
    drafter.propose([row([5], 1)])
    drafter.observe_pass(JudgedDraft(0, [5, 2], [-1], [0], torch.tensor([[2, 7, 8], [4, 5, 6]])))
    assert seen == [(first, [[2, 7, 8], [4, 5, 6]]), (second, [[2, 7], [4, 5]])]


def test_a_proposal_is_compared_with_what_was_emitted():
    """A tree: its path; expectations only of tokens that could be seen."""
    tree = Proposal([1, 2, 3, 4], [-1, -1, 1, 2], [0.5, 0.4, 0.3, 0.2])
    assert [tree.accepted(emitted) for emitted in ([2, 3, 4, 9], [2, 3], [1, 3], [9], [])] == [3, 2, 1, 0, 0]
    assert [tree.expected(n) for n in range(5)] == pytest.approx([0.0, 0.9, 1.2, 1.4, 1.4])


def test_prior_estimates_share_what_a_token_leaves():
    """A chain: powers; siblings: of the rest; all children together never exceed their parent."""
    assert prior_path_probs([-1, 0, 1]) == pytest.approx([0.6, 0.36, 0.216])
    assert prior_path_probs([-1, -1, 0]) == pytest.approx([0.6, 0.24, 0.36])


def test_records_forget():
    """A perfect record after a bad one: the correction comes back above a half."""
    record = Record()
    for _ in range(10):
        record.add(2.0, 0)
    assert record.correction < 0.2
    for _ in range(20):
        record.add(2.0, 2)
    assert 0.7 < record.correction <= 1.0


def test_trees_and_chains_share_one_draft():
    """Parents are kept a row."""

    class Tree(Fixed):
        def propose(self, rows):
            return tree_draft([[1, 2, 3]] * len(rows), [[-1, -1, 0]] * len(rows))

    draft = combined(Tree([]), Fixed([])).propose([row([5], 3)])
    assert draft.parents.tolist() == [[-1, -1, 0]]


TARGET = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.1, 0.7, 0.2]], dtype=torch.float64)
LAW = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1], [0.3, 0.3, 0.4]], dtype=torch.float64)
"""Next token after token i: of the target, and of the source that draws."""
NUM_ROUNDS, LENGTH = 2, 4


class Drawing(Fixed):
    """Draws from LAW, as told by the enumeration."""

    stochastic = True

    def propose(self, rows):
        tokens = [self.tokens[: r.num_draft_tokens] for r in rows]
        laws = [LAW[[r.token_ids[-1], *t[:-1]]] for r, t in zip(rows, tokens, strict=True)]
        return chain_draft(tokens, torch.stack(laws))


class Lookup(Fixed):
    """A function of the text: after an even number of 1s it has something to say."""

    def propose(self, rows):
        return chain_draft([[r.token_ids[-1], 2] if r.token_ids.count(1) % 2 == 0 else [] for r in rows])


def after(text, steps):
    """A drafter that has been through the steps that led to a text."""
    drawing, lookup = Drawing([], stochastic=True), Lookup([])
    drafter = combined(lookup, drawing)
    for at, drawn, emitted in steps:
        drawing.tokens = drawn
        drafter.propose([row(text[:at], 2)])
        drafter.observe(0, text[: at + len(emitted)])
    return drafter, drawing


def emitted_law(text, steps, used):
    """Exactly what a step may emit after a text: (drawn tokens, emitted tokens) -> probability."""
    law = {}
    for drawn in itertools.product(range(3), repeat=2):
        drafter, drawing = after(text, steps)
        drawing.tokens = list(drawn)
        draft = drafter.propose([row(text, 2)])
        used.add((len(steps), "lookup" if draft.probs is None else "drawing"))
        weight = float(LAW[text[-1], drawn[0]] * LAW[drawn[0], drawn[1]])
        tokens, count = draft.token_ids[0].tolist(), draft.num_draft_tokens[0]
        rows = TARGET[[text[-1], *tokens[:count]]][None]
        inputs = (draft.token_ids, torch.tensor(draft.num_draft_tokens), rows, draft.probs)
        passes = rejection.accept_probs(*inputs)[0].tolist()
        for n in range(count + 1):
            stop = math.prod(passes[:n]) * (1 - passes[n] if n < count else 1.0)
            following = rejection.next_token_probs(*inputs, torch.tensor([n]))[0]
            for token in range(3):
                key = drawn, (*tokens[:n], token)
                law[key] = law.get(key, 0.0) + weight * stop * float(following[token])
    return law


def joint_law(text, steps, prob, out, used):
    """Follow every way in which the next rounds may go, and add up texts of LENGTH tokens."""
    if len(text) > LENGTH or len(steps) == NUM_ROUNDS:
        tail = text[1:]
        for more in itertools.product(range(3), repeat=max(0, LENGTH - len(tail))):
            full, p = [text[0], *tail, *more], prob
            for a, b in itertools.pairwise([text[-1], *more]):
                p *= float(TARGET[a, b])
            key = tuple(full[1 : LENGTH + 1])
            out[key] = out.get(key, 0.0) + p
        return
    for (drawn, emitted), p in emitted_law(text, steps, used).items():
        if p > 0.0:
            joint_law([*text, *emitted], [*steps, (len(text), list(drawn), emitted)], prob * p, out, used)


def test_the_choice_leaves_the_target_s_law():
    """Two rounds by enumeration, the second chosen by the record of the first: the joint law of four tokens."""
    out: dict[tuple[int, ...], float] = {}
    used: set[tuple[int, str]] = set()
    joint_law([0], [], 1.0, out, used)
    assert {(1, "lookup"), (1, "drawing")} <= used
    for key in itertools.product(range(3), repeat=LENGTH):
        exact = 1.0
        for a, b in itertools.pairwise([0, *key]):
            exact *= float(TARGET[a, b])
        assert out[key] == pytest.approx(exact, abs=1e-12)


def test_the_enumeration_convicts_a_choice_that_looks_at_drawn_tokens():
    """The same, but a draw of 2 is passed over for the lookup's tokens."""

    class Peeking(CombinedDrafter):
        def propose(self, rows):
            drawn = self.sources[1].propose([replace(r) for r in rows])
            if 2 in drawn.token_ids[0].tolist():
                return chain_draft([[0]] * len(rows))
            return drawn

    law: dict[tuple[int, ...], float] = {}
    for drawn in itertools.product(range(3), repeat=2):
        drafter = Peeking([Lookup([]), Drawing(list(drawn), stochastic=True)], [2, 2])
        draft = drafter.propose([row([0], 2)])
        weight = float(LAW[0, drawn[0]] * LAW[drawn[0], drawn[1]])
        tokens, count = draft.token_ids[0].tolist(), draft.num_draft_tokens[0]
        rows = TARGET[[0, *tokens[:count]]][None]
        inputs = (draft.token_ids, torch.tensor(draft.num_draft_tokens), rows, draft.probs)
        first = rejection.accept_probs(*inputs)[0, 0].item()
        residual = rejection.next_token_probs(*inputs, torch.tensor([0]))[0]
        for token in range(3):
            law[token,] = law.get((token,), 0.0) + weight * (
                first * (token == tokens[0]) + (1 - first) * float(residual[token])
            )
    assert max(abs(law[token,] - float(TARGET[0, token])) for token in range(3)) > 0.01


def test_a_row_may_name_who_drafts_for_it():
    """In one batch: one source only, the other only, and both; the one that draws is asked for no other rows."""
    lookup, model = Fixed([1, 2, 3]), Fixed([7, 8, 9], stochastic=True, cost=0.1)
    drafter = CombinedDrafter([lookup, model], [16, 16], ["ngram", "draft_model"])
    rows = [row([5], 3, 0), row([5], 3, 1), row([5], 3, 2)]
    wanted = [("ngram",), ("draft_model",), ("draft_model", "ngram")]
    draft = drafter.propose([replace(each, methods=names) for each, names in zip(rows, wanted, strict=True)])
    assert draft.token_ids.tolist() == [[1, 2, 3], [7, 8, 9], [1, 2, 3]]
    assert lookup.asked == [[(0, 3), (2, 3)]]
    assert model.asked == [[(1, 3)]]
    assert drafter.cost == 0.1


def test_offers_say_who_would_draft_before_anything_is_drawn():
    """What was found to copy is offered, else the model's draft; a shorter draft than offered is cut from it, and the
    next one is looked for anew."""
    lookup, model = NGramDrafter(1, 4), Fixed([7, 8, 9], stochastic=True, cost=0.1)
    drafter = CombinedDrafter([lookup, model], [16, 2], ["ngram", "draft_model"])
    copied, new = [1, 2, 3, 4, 5, 9, 1, 2, 3, 4], [1, 2, 3]
    rows = [row(copied, 4, 0), row(new, 4, 1)]
    assert drafter.offers(rows) == [Offer(4, 4, "ngram", is_free=True), Offer(2, 0, "draft_model")]
    assert model.asked == []
    draft = drafter.propose([row(copied, 1, 0), row(new, 0, 1)])
    assert draft.token_ids.tolist() == [[5], [0]]
    assert draft.num_draft_tokens == [1, 0]
    assert model.asked in ([], [[]])
    assert drafter.propose([row([*copied, 5], 2, 0), row([*new, 6], 2, 1)]).token_ids.tolist() == [[9, 1], [7, 8]]


def test_offers_say_whose_draft_may_branch():
    """A copy is a chain, whatever the other source grows; what drafts cost is limited as that of the other source."""
    lookup, model = NGramDrafter(1, 4), Fixed([7, 8, 9], stochastic=True, cost=0.1)
    model.makes_trees, model.max_passes = True, 2
    drafter = CombinedDrafter([lookup, model], [16, 16])
    offers = drafter.offers([row([1, 2, 3, 4, 5, 9, 1, 2, 3, 4], 4, 0), row([1, 2, 3], 4, 1)])
    assert [offer.branches for offer in offers] == [False, True]
    assert drafter.makes_trees
    assert drafter.max_passes == 2
    unlimited = Fixed([7], cost=0.1)
    assert CombinedDrafter([model, unlimited], [16, 16]).max_passes is None


@pytest.mark.parametrize(("max_passes", "expected"), [(None, [1, 2]), (1, [7, 8, 9, 6, 5])])
def test_a_source_costs_no_more_than_its_passes(max_passes, expected):
    """Five tokens of half a target pass each are not worth it beside a poor copy; all five in one pass are."""
    lookup = Fixed([1, 2], [0.15, 0.05])
    model = Fixed([7, 8, 9, 6, 5], stochastic=True, cost=0.5)
    model.max_passes = max_passes
    draft = CombinedDrafter([lookup, model], [16, 16]).propose([row([1, 2, 3], 5, 0)])
    assert draft.token_ids[0, : draft.num_draft_tokens[0]].tolist() == expected
