"""The node of a router that hedges.

Its endpoint learns which attempts have a token before it decides which requests are late, and which of two attempts
streams before any other event of either. Tokens of the two are taken in the order in which they came to the client, so
the attempt of the first one streams, as in the live runtime; the other is aborted at the next answer of the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdflow.protocol.values import Instant
from pdflow.routing.attempt import Attempt
from pdflow.routing.events import DecodeEnded, PrefillAnswered, RouterEvent
from pdflow.routing.hedging import HedgingRouter
from pdflow.scenario.costs.step_costs import ApiServerTime
from pdflow_sim.nodes.node import TIME_REACHED, SimPort
from pdflow_sim.nodes.ports import NodePorts
from pdflow_sim.nodes.registry import NodeRegistry
from pdflow_sim.nodes.router_node import SimRouterNode
from pdflow_sim.observe.run_metrics import request_of


class HedgedRouterNode(SimRouterNode):
    """The node of a hedging router. Args: as SimRouterNode's."""

    def __init__(
        self,
        ports: NodePorts,
        nodes: NodeRegistry,
        router: HedgingRouter,
        api_servers: Mapping[str, list[ApiServerTime]],
    ) -> None:
        super().__init__(ports, nodes, router, api_servers)
        self.deadlines = router.deadlines
        self.pairs = router.pairs
        self.receive = self.received

    def attempts_of(self, request: int) -> Sequence[Attempt]:
        return self.pairs.get(request) or super().attempts_of(request)

    def received(self, port: SimPort, event: Any) -> None:
        """Hand an event to the endpoint. Tokens go to the client without the endpoint, which learns of the first one of
        a late request before its deadline.
        """
        if event is TIME_REACHED:
            for request in self.deadlines.late(self.clock.now):
                for attempt in self.attempts_of(request):
                    if self.first_tokens.delivered(attempt):
                        self.first_token_delivered(attempt, self.first_tokens.at(attempt))
        self.feed(port, event)

    def answered(self, event: RouterEvent) -> None:
        if isinstance(event, (DecodeEnded, PrefillAnswered)):
            for attempt in self.pairs.get(request_of(event.request_id), ()):
                if self.first_tokens.delivered(attempt):
                    self.first_token_delivered(attempt, self.first_tokens.at(attempt))
        super().answered(event)

    def first_token_delivered(self, attempt: Attempt, at: Instant) -> None:
        """Report an attempt's first token, behind that of the other attempt if that came first."""
        for other in self.pairs.get(attempt.request, ()):
            if self.first_tokens.delivered(other) and self.first_tokens.at(other) < at:
                super().first_token_delivered(other, self.first_tokens.at(other))
        super().first_token_delivered(attempt, at)
