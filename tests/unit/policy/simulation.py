"""An engine as a policy sees it: seconds by a table with noise, drafts that are found and accepted by chance."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from foredraft.policy import FixedPolicy, GoodputPolicy, PassTable, PlanRow, Policy, RowOutcome, StepCost, StepOutcome

# Seconds of passes as measured on two cores: free up to 8 tokens, then a token costs about a millisecond.
TABLE = PassTable(
    (1, 2, 4, 8, 16, 32, 64, 128), (0.0138, 0.0139, 0.0142, 0.0154, 0.0235, 0.034, 0.062, 0.12), 1e-6, 5e-7
)
LIMIT = 8
CONTEXT = 100


@dataclass(frozen=True)
class Kind:
    """Requests of one kind.

    Attributes:
        alpha: chance that a draft token is accepted if those before it were.
        found: chance that the drafter finds anything at all in a step.
        route: label; the chances in words if there is none.
    """

    alpha: float
    found: float = 1.0
    route: str | None = None

    @property
    def label(self) -> str:
        return f"{self.alpha} {self.found}" if self.route is None else self.route


@dataclass(frozen=True, kw_only=True)
class World:
    """What things cost.

    Attributes:
        slow: factor of all seconds at a step.
        spikes: share of steps whose pass takes ``spike`` times as long.
        host_s, token_s: of a step, and of each draft token, beside the pass.
        draft_s: of each token of the longest draft.
        prompts: prompt tokens in the pass at a step.
        num_running: rows at a step; None runs all.
        request_len: tokens after which a request makes room for a new one; None is never.
    """

    table: PassTable = TABLE
    slow: Callable[[int], float] = lambda step: 1.0
    spikes: float = 0.0
    spike: float = 3.0
    host_s: float = 4e-4
    token_s: float = 0.0
    draft_s: float = 0.0
    prompts: Callable[[int], int] = lambda step: 0
    num_running: Callable[[int], int] | None = None
    request_len: int | None = None


@dataclass
class Result:
    """Tokens and seconds of each step, and the plans."""

    emitted: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    plans: list[list[int]] = field(default_factory=list)

    def rate(self, first: int = 0, last: int | None = None) -> float:
        return sum(self.emitted[first:last]) / sum(self.seconds[first:last])


def simulate(policy: Policy, kinds: Sequence[Kind], *, steps: int = 400, world: World | None = None) -> Result:
    world = world or World()
    rng, noise = random.Random(0), random.Random(1)
    result = Result()
    ids, lengths = list(range(len(kinds))), [rng.randrange(world.request_len or 1) for _ in kinds]
    for step in range(steps):
        running = range(len(kinds) if world.num_running is None else world.num_running(step))
        limit = 0 if policy.rests(len(running)) else LIMIT
        rows = [PlanRow(ids[i], limit, CONTEXT, kinds[i].label) for i in running]
        plan = policy.plan(rows, world.prompts(step))
        outcomes, emitted = [], 0
        for i, row, planned in zip(running, rows, plan, strict=True):
            drafted = planned if rng.random() < kinds[i].found else 0
            accepted = 0
            while accepted < drafted and rng.random() < kinds[i].alpha:
                accepted += 1
            outcomes.append(RowOutcome(row.sequence_id, row.route, planned, drafted, range(accepted)))
            emitted += accepted + 1
            lengths[i] += accepted + 1
        outcome = _timed(world, outcomes, step, noise)
        result.emitted.append(emitted)
        result.seconds.append(outcome.draft_s + outcome.target_s + outcome.verify_s + outcome.host_s)
        result.plans.append(plan)
        policy.observe(outcome)
        for i in running:
            if world.request_len is not None and lengths[i] >= world.request_len:
                policy.forget(ids[i])
                ids[i], lengths[i] = max(ids) + 1, 0
    return result


def _timed(world: World, rows: Sequence[RowOutcome], step: int, noise: random.Random) -> StepOutcome:
    drafted = sum(row.num_draft_tokens for row in rows)
    num_tokens = len(rows) + drafted + world.prompts(step)
    keys, pairs = CONTEXT * len(rows), CONTEXT * (len(rows) + drafted)
    factor = world.slow(step) * noise.uniform(0.97, 1.03)
    target_s = factor * world.table.pass_s(len(rows), num_tokens, keys, pairs)
    target_s *= world.spike if noise.random() < world.spikes else 1.0
    draft_s = factor * world.draft_s * max((row.planned for row in rows), default=0)
    host_s = factor * (world.host_s + world.token_s * drafted)
    return StepOutcome(rows, len(rows), num_tokens, keys, pairs, draft_s, target_s, host_s / 2, host_s / 2)


def controller(table: PassTable = TABLE) -> GoodputPolicy:
    return GoodputPolicy(StepCost(table))


def fixed_rates(
    kinds: Sequence[Kind], lengths: Sequence[int] = range(LIMIT + 1), *, steps: int = 400, world: World | None = None
) -> list[float]:
    """Tokens per second with a fixed number of draft tokens."""
    return [simulate(FixedPolicy(k), kinds, steps=steps, world=world).rate() for k in lengths]


def with_changes(world: World, **changes: object) -> World:
    return replace(world, **changes)  # type: ignore[arg-type]
