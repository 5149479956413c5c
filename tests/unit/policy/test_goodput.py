"""The controller against simulated engines: near the best fixed length everywhere, 0 where drafts do not pay."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import mean

import pytest

from foredraft.policy import FixedPolicy, GoodputPolicy, PassTable, PlanRow, Policy, RowOutcome, StepCost, StepOutcome
from foredraft.policy.cost import interpolate

# Seconds of passes as measured on two cores: free up to 8 tokens, then a token costs about a millisecond.
TABLE = PassTable(
    (1, 2, 4, 8, 16, 32, 64, 128), (0.0138, 0.0139, 0.0142, 0.0154, 0.0235, 0.034, 0.062, 0.12), 1e-6, 5e-7
)
LIMIT = 8
CONTEXT = 100


def simulate(
    policy: Policy,
    alphas: Sequence[float],
    *,
    steps: int = 400,
    table: PassTable = TABLE,
    num_running: Callable[[int], int] | None = None,
    draft_s: float = 0.0,
    spikes: float = 0.0,
) -> tuple[float, list[list[int]]]:
    """Tokens per second of a batch whose draft tokens are accepted with these chances, and the plans of all steps."""
    rng = random.Random(0)
    emitted, seconds, plans = 0, 0.0, []
    for step in range(steps):
        running = alphas if num_running is None else alphas[: num_running(step)]
        rows = [PlanRow(i, LIMIT, CONTEXT, f"alpha {alpha}") for i, alpha in enumerate(running)]
        plan = policy.plan(rows, 0)
        outcomes = []
        for row, alpha, length in zip(rows, running, plan, strict=True):
            accepted = 0
            while accepted < length and rng.random() < alpha:
                accepted += 1
            outcomes.append(RowOutcome(row.sequence_id, row.route, length, length, accepted))
            emitted += accepted + 1
        num_tokens = len(rows) + sum(plan)
        target_s = interpolate(num_tokens, table.num_tokens, table.seconds) * rng.uniform(0.97, 1.03)
        target_s *= 3.0 if rng.random() < spikes else 1.0
        drafting_s = draft_s * max(plan, default=0)
        seconds += target_s + drafting_s + 4e-4
        pairs = sum(CONTEXT * (1 + k) for k in plan)
        policy.observe(StepOutcome(outcomes, num_tokens, CONTEXT * len(rows), pairs, drafting_s, target_s, 2e-4, 2e-4))
        plans.append(plan)
    return emitted / seconds, plans


def controller(table: PassTable = TABLE) -> GoodputPolicy:
    return GoodputPolicy(StepCost(table))


def best_fixed(alphas: Sequence[float], **options: float) -> tuple[float, float]:
    """Rates of the best fixed length and of plain decoding."""
    rates = {k: simulate(FixedPolicy(k), alphas, **options)[0] for k in range(LIMIT + 1)}  # type: ignore[arg-type]
    return max(rates.values()), rates[0]


@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.8, 0.9])
@pytest.mark.parametrize("num_rows", [1, 4, 8, 16, 32])
def test_near_the_best_fixed_length_at_every_load(num_rows: int, alpha: float):
    rate, _ = simulate(controller(), [alpha] * num_rows)
    best, plain = best_fixed([alpha] * num_rows)
    assert rate > 0.9 * best
    assert rate > 0.97 * plain


def test_plain_where_drafts_do_not_pay_and_long_where_they_do():
    for alphas, low, high in (([0.9], 6, 8), ([0.5] * 32, 0, 0.1), ([0.2] * 8, 0, 0.1)):
        _, plans = simulate(controller(), alphas)
        assert low <= mean(mean(plan) for plan in plans[100:]) <= high


def test_an_expensive_drafter_is_asked_for_less():
    """A draft token for a third of a pass (theory.best_num_draft_tokens says 2 or 3 at alpha 0.8)."""
    _, plans = simulate(controller(), [0.8], draft_s=0.0046)
    assert 1.5 <= mean(plan[0] for plan in plans[100:]) <= 3.5


def test_mixed_routes_get_different_lengths_and_beat_every_single_one():
    """Code edits get long drafts while stories get none, in the same batch."""
    alphas = [0.9] * 4 + [0.15] * 4
    rate, plans = simulate(controller(), alphas)
    assert rate > 1.1 * best_fixed(alphas)[0]
    late = plans[200:]
    assert mean(mean(plan[:4]) for plan in late) > 3
    assert mean(mean(plan[4:]) for plan in late) < 0.2


def test_a_jump_of_the_load_is_followed_within_twenty_steps():
    """1 to 32 rows and back: the mean length is that of the steady state."""
    _, plans = simulate(controller(), [0.85] * 32, steps=400, num_running=lambda step: 32 if 100 <= step < 300 else 1)
    assert mean(mean(plan) for plan in plans[80:100]) > 6
    assert mean(mean(plan) for plan in plans[200:300]) < 0.9
    assert mean(mean(plan) for plan in plans[120:130]) < 1.1
    assert mean(mean(plan) for plan in plans[320:330]) > 6


def test_a_table_measured_on_a_busy_machine_is_put_right():
    """The table says that passes are free up to 128 tokens; the steps say that they are not."""
    flat = PassTable(TABLE.num_tokens, (0.0138,) * 8, 0.0, 0.0)
    rate, _ = simulate(controller(flat), [0.6] * 32, steps=600)
    assert rate > 0.9 * simulate(FixedPolicy(0), [0.6] * 32, steps=600)[0]


def test_spikes_do_not_throw_it_off():
    """One pass in twenty takes three times as long."""
    _, plans = simulate(controller(), [0.9], spikes=0.05)
    assert mean(plan[0] for plan in plans[100:]) > 6


def test_a_route_without_drafts_is_probed_now_and_then():
    policy = controller()
    _, plans = simulate(policy, [0.02] * 16, steps=600)
    probes = [step for step, plan in enumerate(plans) if sum(plan) and step > 20]
    assert 5 <= len(probes) <= 30
    assert all(sum(plans[step]) == 1 for step in probes)


def test_what_a_route_has_shown_is_the_start_of_its_next_sequence():
    policy = controller()
    simulate(policy, [0.05] * 8, steps=60)
    fresh = [PlanRow(100 + i, LIMIT, CONTEXT, "alpha 0.05") for i in range(8)]
    assert sum(policy.plan(fresh, 0)) <= 2
    unknown = [PlanRow(200 + i, LIMIT, CONTEXT, "another route") for i in range(2)]
    assert sum(policy.plan(unknown, 0)) > 2


def test_limits_are_kept():
    policy = controller()
    rows = [PlanRow(0, 0, CONTEXT, "a"), PlanRow(1, 1, CONTEXT, "a"), PlanRow(2, LIMIT, CONTEXT, "a")]
    for _ in range(100):
        plan = policy.plan(rows, 0)
        assert all(0 <= k <= row.limit for k, row in zip(plan, rows, strict=True))
    assert policy.plan([], 64) == []
