"""The router that hedges: its endpoint is told who has a token before it judges who is late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pdflow.routing.attempt import Attempt
from pdflow.routing.hedging import HedgingRouter
from pdflow.routing.router import TokenCame
from sim.node import TIME_REACHED, Port
from sim.patience import first_token_came
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
                        self.feed(port, TokenCame(attempt.request_id))
        self.feed(port, event)
