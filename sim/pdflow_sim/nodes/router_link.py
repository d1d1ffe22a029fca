"""The link from the engines back to the router: answers to legs, one HTTP hop later, and what waits for them there."""

from __future__ import annotations

from collections.abc import Callable

from pdflow.engine.sequence import Sequence
from pdflow.protocol.values import Instant, RequestId
from pdflow.routing.events import RouterEvent
from pdflow_sim.clock import Clock


class RouterLink:
    """The link from the engines to the router. Args: `http_ns`: one hop of HTTP, one way, between the two."""

    def __init__(self, clock: Clock, http_ns: int) -> None:
        self.clock = clock
        self.http_ns = http_ns
        self.receive: Callable[[RouterEvent], None]
        """Handles an answer that has arrived at the router; set by its node."""
        self.decoded: dict[RequestId, tuple[Sequence, Instant, str]] = {}
        """Sequences that engines have decoded and whose answers have not reached the router yet, with the time of the
        last token and the engine's name.
        """
        self.first_follows: set[RequestId] = set()
        """Decode legs on their way that await P's first token."""

    def later(self, event: RouterEvent) -> None:
        """Deliver an engine's answer to the router, one hop later."""
        self.clock.call(self.http_ns, self.receive, event)
