"""The way from the engines back to the router: answers to legs, one HTTP hop later, and what waits for them there."""

from __future__ import annotations

from collections.abc import Callable

from pdflow.engine.sequence import Sequence
from pdflow.protocol.values import Instant, RequestId
from pdflow.routing.events import RouterEvent
from pdflow_sim.clock import Clock


class RouterLink:
    """Args: `http_ns`: one hop of HTTP, one way, between the router and an engine."""

    def __init__(self, clock: Clock, http_ns: int) -> None:
        self.clock = clock
        self.http_ns = http_ns
        self.receive: Callable[[RouterEvent], None]
        """What the router does with an answer that has arrived: set by its node."""
        self.decoded: dict[RequestId, tuple[Sequence, Instant]] = {}
        """What engines have generated and the router has not received yet: the sequence, and when its last token
        came."""
        self.first_follows: set[RequestId] = set()
        """Decode legs on their way that await P's first token."""

    def later(self, event: RouterEvent) -> None:
        """An engine's answer: at the router one hop later."""
        self.clock.call(self.http_ns, self.receive, event)
