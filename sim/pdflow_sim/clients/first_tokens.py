"""When an attempt's first token is generated, and whether the client has it: tokens pass the router's endpoint by."""

from __future__ import annotations

from pdflow.engine.sequence import Sequence
from pdflow.protocol.values import Instant
from pdflow.routing.attempt import Attempt
from pdflow_sim.nodes.registry import NodeRegistry
from pdflow_sim.nodes.router_link import RouterLink


class FirstTokens:
    """Asks the engines of attempts that are under way."""

    def __init__(self, link: RouterLink, nodes: NodeRegistry) -> None:
        self.link = link
        self.nodes = nodes

    def delivered(self, attempt: Attempt) -> bool:
        """Whether the client has a token of this attempt."""
        return 0 <= self.at(attempt) <= self.link.clock.now - self.link.http_ns

    def at(self, attempt: Attempt) -> Instant:
        """When the engine that decodes it generates its first token; -1 if that is not known yet."""
        seq = self.decoding(attempt)
        return -1 if seq is None else seq.first_token_ns

    def decoding(self, attempt: Attempt) -> Sequence | None:
        """Its sequence at the engine that generates its tokens."""
        decoded = self.link.decoded.get(attempt.request_id)
        if decoded is not None:
            return decoded[0]
        if attempt.d_open:
            return self.nodes.decodes[attempt.d].legs.get(attempt.request_id)
        leg = self.nodes.prefills[attempt.p].by_request.get(attempt.request_id)
        return None if leg is None or leg.seq.prefill_only else leg.seq
