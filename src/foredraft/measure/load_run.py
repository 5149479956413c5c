"""One arm under load: requests go in as they arrive, steps are made, deliveries are noted.

    sent      |r0 r1 .. rC-1| rC      rC+1    ...           more of the same stream, so that no client idles
    window                  |================================|
              every first   begin: each of the first         end: the first N requests
              client starts requests has its first token     are done; the rest is aborted

All arms work through the same requests in the same order. Within the window every client is busy, and what it costs to
take in the first requests at once is left out; so the rate is that of the steady state.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from foredraft.engine import Engine
from foredraft.engine.sequence import Sequence
from foredraft.measure.arms import exact_length_params
from foredraft.measure.load_arrivals import Arrivals
from foredraft.measure.load_prompts import LoadRequest, RequestStream
from foredraft.measure.load_record import PlannedStep, PlanRecorder
from foredraft.types import FinishReason, Request


@dataclass(frozen=True, slots=True)
class Delivery:
    """Tokens that one step gave to a request; seconds since the beginning."""

    at_s: float
    num_tokens: int


@dataclass(slots=True)
class Timeline:
    """What happened to one request.

    Attributes:
        arrived_s: seconds since the beginning.
        token_ids: the new tokens so far.
        num_draft_tokens, num_accepted_tokens: over its whole life.
    """

    request: LoadRequest
    arrived_s: float
    deliveries: list[Delivery] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    is_finished: bool = False


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One round of one arm at one level.

    Attributes:
        timelines: all requests that were sent, in order; the first ``num_requests`` are finished.
        begin_s, end_s: the window, in seconds since the beginning.
        steps: draft lengths chosen within the window.
        num_steps: steps of the engine within the window.
    """

    timelines: Seq[Timeline]
    num_requests: int
    begin_s: float
    end_s: float
    steps: Seq[PlannedStep]
    num_steps: int

    @property
    def window_s(self) -> float:
        return self.end_s - self.begin_s

    @property
    def deliveries(self) -> list[Delivery]:
        """Those within the window, of all requests."""
        return [d for line in self.timelines for d in line.deliveries if d.at_s > self.begin_s]

    @property
    def num_tokens(self) -> int:
        """Tokens delivered within the window."""
        return sum(delivery.num_tokens for delivery in self.deliveries)


class LoadArm:
    """An engine under load; what its policy has learnt stays from run to run.

    Args:
        engine: nothing else may use it, nor another engine of the same target while it runs.
    """

    def __init__(self, name: str, engine: Engine):
        self.name, self.engine = name, engine
        self.recorder = PlanRecorder(engine.policy)
        engine.policy = self.recorder
        self._num_sent = 0

    def run(
        self, stream: RequestStream, first: int, arrivals: Arrivals, num_requests: int, temperature: float = 0.0
    ) -> LoadRun:
        """Serve the stream from index ``first`` on until ``num_requests`` of it are done in the steady state."""
        round_ = _Round(self.engine, stream, first, arrivals, temperature, self._num_sent)
        num_starting = arrivals.num_clients or 0
        begin_s = 0.0 if arrivals.num_clients is None else None
        first_step, num_steps = len(self.recorder.steps), 0
        try:
            while begin_s is None or not round_.has_finished(num_requests):
                round_.send()
                now_s = round_.step()
                num_steps += 1
                if begin_s is None and round_.has_delivered(num_starting):
                    begin_s, first_step, num_steps = now_s, len(self.recorder.steps), 0
        finally:
            round_.abort()
            self._num_sent += len(round_.timelines)
        end_s = max(line.deliveries[-1].at_s for line in round_.timelines[:num_requests])
        return LoadRun(
            round_.timelines, num_requests, begin_s, max(end_s, begin_s), self.recorder.steps[first_step:], num_steps
        )

    def warm_up(self, stream: RequestStream, first: int, num_clients: int, num_steps: int) -> None:
        """Make some steps with so many requests in flight, and drop them."""
        params = exact_length_params(0.0, 0, num_steps * 16)
        room = self.engine.target.max_model_len
        ids = []
        for index in range(num_clients):
            request = stream[first + index]
            ids.append(f"warm-up-{index}")
            prompt = list(request.prompt_token_ids)[: room - 1]
            self.engine.add_request(Request(ids[-1], prompt, params, route=request.route))
        for _ in range(num_steps):
            self.engine.step()
        for request_id in ids:
            self.engine.abort(request_id)


class _Round:
    """The requests of one run, from arrival to end."""

    def __init__(
        self, engine: Engine, stream: RequestStream, first: int, arrivals: Arrivals, temperature: float, num_before: int
    ):
        self.timelines: list[Timeline] = []
        self._engine, self._stream, self._first = engine, stream, first
        self._arrivals, self._temperature, self._num_before = arrivals, temperature, num_before
        self._running: dict[str, tuple[Timeline, Sequence]] = {}
        self._began = time.perf_counter()

    def send(self) -> None:
        """Send what has arrived; with nothing to do, wait for the next request."""
        due = self._arrivals.due(self._now_s(), len(self.timelines), len(self._running))
        if not due and not self._running:
            time.sleep(max(0.0, self._arrivals.next_s(len(self.timelines)) - self._now_s()))
            due = self._arrivals.due(self._now_s(), len(self.timelines), 0)
        for arrived_s in due:
            request = self._stream[self._first + len(self.timelines)]
            params = exact_length_params(self._temperature, request.seed, request.max_tokens)
            request_id = f"load-{self._num_before + len(self.timelines)}"
            sequence = self._engine.add_request(
                Request(request_id, list(request.prompt_token_ids), params, route=request.route)
            )
            line = Timeline(request, arrived_s)
            self.timelines.append(line)
            self._running[request_id] = line, sequence

    def step(self) -> float:
        """One step of the engine; returns the seconds since the beginning after it."""
        outputs = self._engine.step()
        now_s = self._now_s()
        for output in outputs:
            line, sequence = self._running[output.request_id]
            line.deliveries.append(Delivery(now_s, len(output.token_ids)))
            line.token_ids += output.token_ids
            line.num_draft_tokens = sequence.metrics.num_draft_tokens
            line.num_accepted_tokens = sequence.metrics.num_accepted_tokens
            if output.finish_reason is not None:
                assert output.finish_reason is FinishReason.LENGTH, output
                line.is_finished = True
                del self._running[output.request_id]
        return now_s

    def has_delivered(self, count: int) -> bool:
        """Whether each of the first requests has its first token."""
        return all(line.deliveries for line in self.timelines[:count])

    def has_finished(self, count: int) -> bool:
        return len(self.timelines) >= count and all(line.is_finished for line in self.timelines[:count])

    def abort(self) -> None:
        """End what is still running."""
        for request_id in self._running:
            self._engine.abort(request_id)

    def _now_s(self) -> float:
        return time.perf_counter() - self._began
