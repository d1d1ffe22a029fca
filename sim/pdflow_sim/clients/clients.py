"""The clients of a run: how requests enter it and how they end. The run is over when all have ended.

Sessions, timeouts and faults of clients are not here: they are called when a request arrives or ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from pdflow.results.records import Outcome
from pdflow.routing.effects import Reply
from pdflow.workload.request import WHEN_ONE_ENDS, Request
from pdflow_sim.nodes.ports import NodePorts
from pdflow_sim.nodes.router_node import SimRouterNode

OnArrival: TypeAlias = Callable[[int, Request], None]
"""Called with a request's index, and what the workload says of it."""
OnEnd: TypeAlias = Callable[[int, Outcome], None]
"""Called with a request's index and how it ended."""


class Clients:
    """All clients of a run. The clock stops when the last request has ended."""

    def __init__(self, ports: NodePorts, router: SimRouterNode) -> None:
        self.clock = ports.clock
        self.metrics = ports.metrics
        self.prompts = ports.prompts
        self.prefill_tokens = ports.prefill_tokens
        self.router = router
        router.on_reply = self.replied
        self.workload: Iterator[Request]
        self.exhausted = False
        """True if no more requests will come."""
        self.ended = 0
        """The number of requests that have ended so far."""
        self.done = False
        """True if all requests have ended."""
        self.waiting_for_turn: Request | None = None
        """The next request of closed arrivals, which comes when another ends."""
        self.on_arrival: list[OnArrival] = []
        self.on_end: list[OnEnd] = []

    def open(self, workload: Iterator[Request]) -> None:
        """Let requests arrive, one in the queue at a time."""
        self.workload = workload
        self._next_arrival()

    def _next_arrival(self) -> None:
        request = next(self.workload, None)
        if request is None:
            self.exhausted = True
            self._check_done()
        elif request.arrival_ns == WHEN_ONE_ENDS:
            self.waiting_for_turn = request
        else:
            self.clock.call(max(0, request.arrival_ns - self.clock.now), self._arrived, request)

    def _arrived(self, request: Request) -> None:
        self.enter(request)
        self._next_arrival()

    def enter(self, request: Request) -> None:
        """Send a client's request now."""
        records = self.metrics.records
        index = records.add(self.clock.now, request.input_tokens, request.output_tokens)
        if request.class_:
            records.classify(index, request.class_)
        self.prompts.add(index, request)
        self.router.arrive(index, request.output_tokens <= self.prefill_tokens)
        for arrived in self.on_arrival:
            arrived(index, request)

    def replied(self, effect: Reply) -> None:
        """Record the end of a request, and send the next one of closed arrivals."""
        self.metrics.stamp_reply(effect)
        self.prompts.remove(effect.request)
        self.ended += 1
        for ended in self.on_end:
            ended(effect.request, effect.outcome)
        request = self.waiting_for_turn
        if request is not None:
            self.waiting_for_turn = None
            self.enter(request)
            self._next_arrival()
        self._check_done()

    def _check_done(self) -> None:
        if self.exhausted and self.ended == len(self.metrics.records) and not self.done:
            self.metrics.totals.duration_ns = self.clock.now
            self.done = True
            self.clock.stop()
