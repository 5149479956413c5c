"""One arm under load on a tiny model: who is in flight, what counts, and that nothing is left."""

import pytest

from foredraft.drafters.ngram import NGramDrafter
from foredraft.measure.load_arrivals import ClosedLoop, PoissonArrivals
from foredraft.measure.load_prompts import RequestStream
from foredraft.measure.load_run import LoadArm
from foredraft.testing import engine_for, target_for


@pytest.fixture(scope="module")
def target(tiny):
    return target_for(tiny)


def tiny_stream(max_tokens=8):
    """Two routes, with prompts whose tokens repeat."""
    prompts = {
        "left": lambda turn: [1 + turn % 5, 2, 3, 4] * 3,
        "right": lambda turn: [5, 6, 7 + turn % 3, 8, 9],
    }
    return RequestStream(prompts, max_tokens=max_tokens, seed=0, max_model_len=128)


def arm_for(target, drafter=None, **options):
    return LoadArm("arm", engine_for(target, drafter, **options))


def test_all_clients_are_busy_in_the_whole_window_and_nothing_is_left(target):
    arm = arm_for(target)
    in_flight = []
    arm.engine.watchers.append(lambda rows, *_: in_flight.append(len(arm.engine.sequences)))
    run = arm.run(tiny_stream(), first=4, arrivals=ClosedLoop(3), num_requests=5)
    assert set(in_flight) == {3}
    assert [line.request.index for line in run.timelines] == list(range(4, 4 + len(run.timelines)))
    assert all(line.is_finished and len(line.token_ids) == line.request.max_tokens for line in run.timelines[:5])
    assert len(run.timelines) > 5
    assert not arm.engine.sequences
    assert not arm.engine.has_unfinished_requests
    assert target.slots.num_open == 0


def test_the_window_begins_with_the_last_client_s_first_token_and_ends_with_the_last_request(target):
    """With 16 tokens a step the three prompts of 12, 5 and 12 tokens do not fit into one."""
    arm = arm_for(target, max_num_batched_tokens=16)
    run = arm.run(tiny_stream(), first=0, arrivals=ClosedLoop(3), num_requests=4)
    starting = [line.deliveries[0].at_s for line in run.timelines[:3]]
    assert min(starting) < max(starting) == run.begin_s
    assert run.end_s == max(line.deliveries[-1].at_s for line in run.timelines[:4])
    every = [delivery for line in run.timelines for delivery in line.deliveries]
    assert all(delivery.at_s <= run.end_s for delivery in every)
    before = sum(delivery.num_tokens for delivery in every if delivery.at_s <= run.begin_s)
    assert before >= 3
    assert run.num_tokens == sum(len(line.token_ids) for line in run.timelines) - before
    assert run.num_steps == len({delivery.at_s for delivery in run.deliveries}) == len(run.steps)


def test_drafting_changes_no_token_and_its_lengths_are_noted_by_route(target):
    plain = arm_for(target).run(tiny_stream(), 0, ClosedLoop(2), 6)
    arm = arm_for(target, NGramDrafter(1, 3), num_speculative_tokens=3)
    drafted = arm.run(tiny_stream(), 0, ClosedLoop(2), 6)
    for one, other in zip(plain.timelines[:6], drafted.timelines[:6], strict=True):
        assert one.token_ids == other.token_ids
    assert sum(line.num_draft_tokens for line in drafted.timelines) > 0
    assert any(delivery.num_tokens > 1 for delivery in drafted.deliveries)
    assert {route for step in drafted.steps for route in step.routes} == {"left", "right"}
    assert {length for step in drafted.steps for length in step.lengths} <= {0, 1, 2, 3}
    assert any(3 in step.lengths for step in drafted.steps)
    assert not any(any(step.lengths) for step in plain.steps)


def test_poisson_requests_wait_in_the_queue_and_count_from_their_arrival(target):
    """At 2,000 a second nearly all have come before the first step ends; one at a time is served."""
    arm = arm_for(target, max_num_seqs=1)
    run = arm.run(tiny_stream(), 0, PoissonArrivals(2000.0, seed=0), 6)
    times = PoissonArrivals(2000.0, seed=0)
    assert run.begin_s == 0.0
    assert [line.arrived_s for line in run.timelines[:6]] == [times.next_s(index) for index in range(6)]
    waits = [line.deliveries[0].at_s - line.arrived_s for line in run.timelines[:6]]
    assert waits[5] > waits[1] > 0


def test_slow_arrivals_are_waited_for(target):
    run = arm_for(target).run(tiny_stream(), 0, PoissonArrivals(50.0, seed=3), 3)
    times = PoissonArrivals(50.0, seed=3)
    for index, line in enumerate(run.timelines[:3]):
        assert line.deliveries[0].at_s > times.next_s(index)
    assert run.window_s > times.next_s(2)


def test_a_warm_up_leaves_nothing(target):
    arm = arm_for(target)
    arm.warm_up(tiny_stream(), 0, num_clients=2, num_steps=4)
    assert not arm.engine.sequences
    assert target.slots.num_open == 0
    assert len(arm.recorder.steps) == 4


def test_an_interruption_aborts_what_is_running(target):
    arm = arm_for(target)

    def interrupt(*_):
        raise KeyboardInterrupt

    arm.engine.watchers.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        arm.run(tiny_stream(), 0, ClosedLoop(2), 2)
    assert not arm.engine.sequences
    arm.engine.watchers.clear()
    assert arm.run(tiny_stream(), 0, ClosedLoop(2), 2).timelines[0].is_finished
