"""The router that hedges: its endpoint is told who has a token before it judges who is late, and which of two attempts
had one first before it hears anything else of either. So the first to stream is the answer, as it is live; the other
attempt is taken back at the next answer of the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pdflow.protocol.values import Instant
from pdflow.routing.attempt import Attempt
from pdflow.routing.hedging import HedgingRouter
from pdflow.routing.router import DecodeEnded, PrefillAnswered, RouterEvent
from sim.node import TIME_REACHED, Port
from sim.patience import first_token_came, first_token_ns
from sim.router_node import RouterNode

if TYPE_CHECKING:
    from sim.world import World


class HedgedRouterNode(RouterNode):
    """Args: as RouterNode's."""

    def __init__(
        self, world: World, router: HedgingRouter, http_ns: int, api_server_ns: Mapping[str, list[int]]
    ) -> None:
        super().__init__(world, router, http_ns, api_server_ns)
        self.deadlines = router.deadlines
        self.pairs = router.pairs
        self.receive = self.hear

    def attempts_of(self, request: int) -> Sequence[Attempt]:
        return self.pairs.get(request) or super().attempts_of(request)

    def hear(self, port: Port, event: Any) -> None:
        """Tokens go to the client without the endpoint, so that it hears of the first one when that matters."""
        if event is TIME_REACHED:
            for request in self.deadlines.late(self.env.now):
                for attempt in self.attempts_of(request):
                    if first_token_came(self.world, attempt):
                        self.tell_token(attempt, first_token_ns(self.world, attempt))
        self.feed(port, event)

    def answered(self, event: RouterEvent) -> None:
        if isinstance(event, (DecodeEnded, PrefillAnswered)):
            for attempt in self.pairs.get(self.world.request_of(event.request_id), ()):
                if first_token_came(self.world, attempt):
                    self.tell_token(attempt, first_token_ns(self.world, attempt))
                    break
        super().answered(event)

    def tell_token(self, attempt: Attempt, at: Instant) -> None:
        """Of two attempts, the one whose token the client had first."""
        for other in self.pairs.get(attempt.request, ()):
            if first_token_came(self.world, other) and first_token_ns(self.world, other) < at:
                attempt = other
        super().tell_token(attempt, at)
