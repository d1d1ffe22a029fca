"""The first tokens of attempts: when they are generated, and whether the client has them. Tokens bypass the router's
endpoint.
"""

from __future__ import annotations

from pdflow.engine.sequence import Sequence
from pdflow.protocol.values import Instant, RequestId
from pdflow.routing.attempt import Attempt
from pdflow_sim.nodes.engine_node import SimEngineNode
from pdflow_sim.nodes.registry import NodeRegistry
from pdflow_sim.nodes.router_link import RouterLink


class FirstTokens:
    """Looks up first tokens at the engines of attempts that are under way."""

    def __init__(self, link: RouterLink, nodes: NodeRegistry) -> None:
        self.link = link
        self.nodes = nodes
        self.lost: dict[RequestId, tuple[SimEngineNode, Sequence]] = {}
        """The sequences of attempts whose engine has died, with that engine, until the router sees it."""

    def delivered(self, attempt: Attempt) -> bool:
        """True if the client has a token of this attempt."""
        return 0 <= self.at(attempt) <= self.link.clock.now - self.link.http_ns

    def at(self, attempt: Attempt) -> Instant:
        """Return when the engine that decodes this attempt generates its first token; -1 if that is not known yet."""
        seq = self.decoding(attempt)
        return -1 if seq is None else seq.first_token_ns

    def source(self, attempt: Attempt) -> tuple[SimEngineNode, Sequence] | None:
        """Return the engine that generates the attempt's tokens, and the sequence there; None if there is none yet."""
        seq = self.decoding(attempt)
        if seq is None:
            return self.lost.get(attempt.request_id)
        return (self.nodes.decodes[attempt.d] if attempt.d >= 0 else self.nodes.prefills[attempt.p]), seq

    def decoding(self, attempt: Attempt) -> Sequence | None:
        """Return the attempt's sequence at the engine that generates its tokens; None if there is none yet."""
        decoded = self.link.decoded.get(attempt.request_id)
        if decoded is not None:
            return decoded[0]
        if attempt.d_open:
            return self.nodes.decodes[attempt.d].legs.get(attempt.request_id)
        leg = self.nodes.prefills[attempt.p].by_request.get(attempt.request_id)
        return None if leg is None or leg.seq.prefill_only else leg.seq
