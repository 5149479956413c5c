"""The controller against simulated engines: near the best fixed length everywhere, 0 where drafts do not pay."""

from __future__ import annotations

from statistics import mean

import pytest

from foredraft.policy import DraftCost, GoodputPolicy, PassTable, PlanRow, RowOutcome, StepCost, StepOutcome

from .simulation import CONTEXT, LIMIT, TABLE, Kind, World, controller, fixed_rates, simulate

FEW = (0, 1, 3, 5, 8)
"""Fixed lengths to be measured against."""


def mean_length(plans: list[list[int]]) -> float:
    return mean(mean(plan) for plan in plans)


@pytest.mark.parametrize("num_rows", [1, 2, 8, 32])
@pytest.mark.parametrize("kind", [Kind(0.5), Kind(0.9), Kind(0.8, 0.3), Kind(0.05, 0.6)], ids=str)
def test_near_the_best_fixed_length_at_every_load(num_rows: int, kind: Kind):
    """Prompt lookup too, which often finds nothing; requests of 64 tokens, one after the other."""
    world = World(request_len=64, token_s=2e-5)
    rate = simulate(controller(), [kind] * num_rows, steps=300, world=world).rate()
    rates = fixed_rates([kind] * num_rows, FEW, steps=300, world=world)
    assert rate > 0.94 * max(rates)
    assert rate > 0.96 * rates[0]


def test_plain_where_drafts_do_not_pay_and_long_where_they_do():
    for kinds, low, high in (([Kind(0.9)], 6, 8), ([Kind(0.5)] * 32, 0, 0.1), ([Kind(0.2)] * 8, 0, 0.15)):
        assert low <= mean_length(simulate(controller(), kinds).plans[100:]) <= high


def test_an_expensive_drafter_is_asked_for_less():
    """A draft token for a third of a pass (theory.best_num_draft_tokens says 2 or 3 at alpha 0.8)."""
    policy = GoodputPolicy(StepCost(TABLE, DraftCost(step_s=TABLE.seconds[0] / 3)))
    plans = simulate(policy, [Kind(0.8)], world=World(draft_s=0.0046)).plans
    assert mean_length(plans[:3]) <= 5, "the declared cost counts from the first step on"
    assert 1.5 <= mean_length(plans[100:]) <= 3.5


def test_a_slow_host_makes_draft_tokens_dear():
    """Each draft token costs the host 3 ms: at acceptance 0.5 it is hardly worth one, at 0.9 it is."""
    world = World(token_s=3e-3)
    for kind in (Kind(0.5), Kind(0.9)):
        rates = fixed_rates([kind], FEW, world=world)
        assert simulate(controller(), [kind], world=world).rate() > 0.95 * max(rates)


@pytest.mark.parametrize("routes", [("edit", "story"), ("", "")], ids=["labelled", "unlabelled"])
def test_mixed_requests_get_different_lengths_and_beat_every_single_one(routes: tuple[str, str]):
    """Code edits get long drafts while stories get none, in the same batch."""
    kinds = [Kind(0.9, route=routes[0])] * 4 + [Kind(0.15, route=routes[1])] * 4
    result = simulate(controller(), kinds)
    assert result.rate() > 1.08 * max(fixed_rates(kinds, FEW))
    late = result.plans[200:]
    assert mean(mean(plan[:4]) for plan in late) > 3
    assert mean(mean(plan[4:]) for plan in late) < 0.3


def test_a_jump_of_the_load_is_followed_within_twenty_steps():
    """1 to 32 rows and back: the mean length is that of the steady state."""
    world = World(num_running=lambda step: 32 if 100 <= step < 300 else 1)
    plans = simulate(controller(), [Kind(0.8)] * 32, world=world).plans
    assert mean_length(plans[80:100]) > 5.5
    assert mean_length(plans[200:300]) < 0.9
    assert mean_length(plans[120:130]) < 1.1
    assert mean_length(plans[320:330]) > 5.5


WRONG_TABLES = {
    "twice as slow": PassTable(TABLE.num_tokens, tuple(2 * s for s in TABLE.seconds), 0.0, 0.0),
    "flat": PassTable(TABLE.num_tokens, (0.0138,) * 8, 0.0, 0.0),
    "two points doubled": PassTable(
        TABLE.num_tokens, tuple(s * (2 if i in (2, 4) else 1) for i, s in enumerate(TABLE.seconds)), 0.0, 0.0
    ),
    "few points": PassTable((1, 128), (0.0138, 0.12), 0.0, 0.0),
}


@pytest.mark.parametrize("name", WRONG_TABLES)
@pytest.mark.parametrize(("num_rows", "alpha"), [(1, 0.6), (8, 0.9), (32, 0.3)])
def test_a_wrong_table_is_put_right(name: str, num_rows: int, alpha: float):
    """Measured on a busy machine, or with points between which the times do not lie on a line."""
    kinds = [Kind(alpha)] * num_rows
    result = simulate(controller(WRONG_TABLES[name]), kinds)
    rates = fixed_rates(kinds, FEW)
    good = 0.84 if name == "flat" else 0.93  # a table without any shape may leave lengths untried
    assert result.rate(200) > good * max(rates)
    assert result.rate(200) > 0.97 * rates[0]
    assert result.rate() > 0.82 * max(rates)


@pytest.mark.parametrize(("num_rows", "alpha"), [(1, 0.9), (16, 0.6), (32, 0.4)])
@pytest.mark.parametrize(
    "world",
    [World(spikes=0.05, spike=10.0), World(slow=lambda step: 2.0 if 100 <= step < 350 else 1.0)],
    ids=["tenfold outliers", "a neighbour"],
)
def test_noise_does_not_throw_it_off(num_rows: int, alpha: float, world: World):
    """One pass in twenty takes ten times as long; or all takes twice as long for 250 steps, and then no longer."""
    kinds = [Kind(alpha)] * num_rows
    rate = simulate(controller(), kinds, steps=500, world=world).rate()
    rates = fixed_rates(kinds, FEW, steps=500, world=world)
    assert rate > 0.94 * max(rates)
    assert rate > 0.97 * rates[0]


def test_prompts_in_the_same_pass_make_draft_tokens_dear():
    """With 100 prompt tokens beside it a draft token costs a millisecond, without it costs nothing."""
    world = World(prompts=lambda step: 100 if step % 4 == 0 else 0)
    plans = simulate(controller(), [Kind(0.4)] * 2, world=world).plans[100:]
    assert mean_length(plans[::4]) < mean_length(plans[1::4])


def test_a_route_without_drafts_is_probed_now_and_then():
    plans = simulate(controller(), [Kind(0.02)] * 16, steps=600).plans
    probes = [step for step, plan in enumerate(plans) if sum(plan) and step > 20]
    assert 5 <= len(probes) <= 30
    assert all(sum(plans[step]) == 1 for step in probes)
    assert len({plans[step].index(1) for step in probes}) > 3, "one row after the other"


def test_a_route_that_gets_better_is_found_out():
    """Drafts are useless for 100 steps, then nearly always right."""
    policy = controller()
    simulate(policy, [Kind(0.02, route="a")] * 4, steps=100)
    plans = simulate(policy, [Kind(0.95, route="a")] * 4, steps=300).plans
    assert mean_length(plans[200:]) > 4


def test_what_a_route_has_shown_is_the_start_of_its_next_sequence():
    policy = controller()
    simulate(policy, [Kind(0.05, route="a")] * 8, steps=60)
    assert sum(policy.plan([PlanRow(100 + i, LIMIT, CONTEXT, "a") for i in range(8)], 0)) <= 2
    assert sum(policy.plan([PlanRow(200 + i, LIMIT, CONTEXT, "another") for i in range(2)], 0)) > 2


def test_steps_without_drafts_check_the_gain_and_become_rare():
    """With acceptance 0.9, where every step drafts; the forecast of plain decoding is right."""
    policy = controller()
    plans = simulate(policy, [Kind(0.9)], steps=600).plans
    plain = [step for step, plan in enumerate(plans) if not sum(plan)]
    assert 4 <= len(plain) <= 12
    assert policy.forecast is not None
    assert policy.forecast.plain_s == pytest.approx(TABLE.seconds[0] + 5e-4, rel=0.1)
    assert policy.forecast.num_emitted > 3


def tree_step(policy: GoodputPolicy, worth: list[float], step: int) -> int:
    """One step of a row whose nth node is accepted every 1 / worth steps."""
    (planned,) = policy.plan([PlanRow(0, 16, CONTEXT, "a", branches=True)], 0)
    path = [n for n in range(planned) if step % round(1 / worth[n]) == 0]
    target_s = TABLE.pass_s(1, 1 + planned, CONTEXT, CONTEXT * (1 + planned))
    row = RowOutcome(0, "a", planned, planned, path, branches=True)
    policy.observe(StepOutcome([row], 1, 1 + planned, CONTEXT, CONTEXT * (1 + planned), 0.0, target_s, 2e-4, 2e-4))
    return planned


@pytest.mark.parametrize(
    ("worth", "low", "high"),
    [([1.0, 1.0, 0.5, 0.5, *[1 / 40] * 12], 4, 9), ([0.5, 0.25, *[1 / 200] * 14], 1, 6), ([1.0] * 16, 14, 16)],
    ids=["four good nodes", "two fair ones", "all good"],
)
def test_a_tree_is_as_large_as_its_nodes_are_worth(worth: list[float], low: int, high: int):
    """Nodes that are never on the path are left out, wherever the depth of the tree may be."""
    policy = GoodputPolicy(StepCost(TABLE))
    planned = [tree_step(policy, worth, step) for step in range(200)]
    assert low <= mean(planned[100:]) <= high


def test_copies_are_drafted_where_a_model_s_drafts_do_not_pay():
    """Two sources in one batch, all drafts accepted; the model takes longer for a token than the target for a pass."""
    policy = GoodputPolicy(StepCost(TABLE))
    rows = [PlanRow(0, 4, CONTEXT, "a", source="model"), PlanRow(1, 4, CONTEXT, "a", 3, "ngram", is_free=True)]
    made = copied = 0
    for step in range(120):
        plan = policy.plan(rows, 0)
        if step >= 60:
            made, copied = made + plan[0], copied + plan[1]
        outcomes = [
            RowOutcome(row.sequence_id, row.route, count, count, range(count), row.match_len, row.source, row.is_free)
            for row, count in zip(rows, plan, strict=True)
        ]
        fed = 2 + sum(plan)
        policy.observe(StepOutcome(outcomes, 2, fed, 2 * CONTEXT, fed * CONTEXT, 0.1 * plan[0], 0.014, 5e-4, 5e-4))
    assert made <= 6
    assert copied > 200


def test_limits_are_kept():
    policy = controller()
    rows = [PlanRow(0, 0, CONTEXT, "a"), PlanRow(1, 1, CONTEXT, "a"), PlanRow(2, LIMIT, CONTEXT, "a")]
    for _ in range(100):
        plan = policy.plan(rows, 0)
        assert all(0 <= k <= row.limit for k, row in zip(plan, rows, strict=True))
    assert policy.plan([], 64) == []
    assert policy.plan(rows[:1], 0) == [0]


def test_it_rests_where_drafts_gain_nothing_and_wakes_when_the_batch_shrinks():
    """32 sequences of which no draft token is accepted: soon it looks at one step in nine."""
    policy = controller()
    simulate(policy, [Kind(0.0)] * 32, steps=100)
    looked = sum(not policy.rests(32) and not policy.plan(rows_of(32), 0)[0] for _ in range(90))
    assert 8 <= looked <= 12
    while not policy.rests(32):
        policy.plan(rows_of(32), 0)
    assert policy.rests(32), "rests are long by now"
    assert not policy.rests(20)


def test_it_does_not_rest_where_drafts_pay():
    policy = controller()
    simulate(policy, [Kind(0.9)] * 2, steps=100)
    assert not any(policy.rests(2) or sum(policy.plan(rows_of(2), 0)) == 0 for _ in range(3))


def rows_of(count: int) -> list[PlanRow]:
    return [PlanRow(i, LIMIT, CONTEXT, "") for i in range(count)]
