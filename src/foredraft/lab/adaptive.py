"""The exact law of texts whose draft lengths are chosen by a policy, over rounds: every branch is enumerated.

The policy is the real one. It is copied for every way that a round can end, and told what the engine would tell it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from foredraft.lab.chains import BLOCK, REJECTION, RatioRule, every_draft, match_emissions, ratio_emissions
from foredraft.lab.enumeration import Emissions, Instance
from foredraft.lab.toy import Floats
from foredraft.policy import PlanRow, Policy, RowOutcome, StepOutcome

Cut = Callable[[tuple[int, ...]], int]
"""How many tokens of a draft are verified, by its tokens."""


def round_emissions(instance: Instance, rule: str, cut: Cut | None = None) -> Emissions:
    """What a round emits that drafts ``instance.num_draft_tokens`` tokens.

    Args:
        rule: ``rejection``, ``block``, ``coupled``, or ``greedy`` for a target that has one token with probability 1.
        cut: shortens the draft after it was drawn; for the first two rules only.
    """
    if not instance.num_draft_tokens:
        return (instance.target[0],)
    if rule in ("coupled", "greedy"):
        return match_emissions(instance, coupled=rule == "coupled")
    ratio: RatioRule = {"rejection": REJECTION, "block": BLOCK}[rule]
    drafts = every_draft(instance)
    if cut is not None:
        drafts = replace(drafts, num_draft_tokens=torch.tensor([cut(tuple(t)) for t in drafts.token_ids.tolist()]))
    return ratio_emissions(ratio, drafts)


def adaptive_law(
    instance: Instance, policy: Policy, rule: str, *, limit: int, cut: Cut | None = None
) -> tuple[Floats, set[tuple[int, ...]]]:
    """The law of texts of as many tokens as the target has tables, ``[V] * L``, and the plans that lead to them.

    Args:
        instance: with as many tables of the drafter as of the target.
        limit: most draft tokens of a round; near the end there is room for fewer.
    """
    length = len(instance.target)
    law: Floats = np.zeros((instance.vocab_size,) * length)
    plans: set[tuple[int, ...]] = set()
    known: dict[tuple[tuple[int, ...], int], Emissions] = {}
    waiting: list[tuple[tuple[int, ...], tuple[int, ...], float, Policy]] = [((), (), 1.0, policy)]
    while waiting:
        text, planned, mass, held = waiting.pop()
        if len(text) == length:
            law[text] += mass
            plans.add(planned)
            continue
        room = 0 if held.rests(1) else min(limit, length - len(text) - 1)
        row = PlanRow(0, room, len(text) + 1, "")
        count = held.plan([row], 0)[0]
        if (text, count) not in known:
            known[text, count] = round_emissions(_after(instance, text, count), rule, cut)
        for part in known[text, count]:
            for emitted in np.argwhere(part > 0.0).tolist():
                twin = copy.deepcopy(held)
                twin.observe(_outcome(row, count, len(emitted) - 1))
                chance = float(part[tuple(emitted)])
                waiting.append(((*text, *emitted), (*planned, count), mass * chance, twin))
    return law, plans


def _after(instance: Instance, text: tuple[int, ...], num_draft_tokens: int) -> Instance:
    """The instance behind a text, with so many draft tokens."""
    start = len(text)
    return Instance(
        tuple(instance.target[start + i][text] for i in range(num_draft_tokens + 1)),
        tuple(instance.draft[start + i][text] for i in range(num_draft_tokens)),
    )


def _outcome(row: PlanRow, planned: int, num_accepted: int) -> StepOutcome:
    fed = planned + 1
    outcome = RowOutcome(row.sequence_id, row.route, planned, planned, range(num_accepted))
    pairs = fed * row.context_len
    return StepOutcome([outcome], 1, fed, row.context_len, pairs, 1e-4 * planned, 0.01 + 1e-3 * planned, 1e-4, 1e-4)
