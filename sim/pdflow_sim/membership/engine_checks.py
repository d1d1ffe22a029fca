"""Checks of which engines have sent anything of an answer, for a router that watches for stalled engines.

`pdflow.routing.watching` decides which engines are stalled, and which requests hang. Tokens bypass the router's
endpoint, so each check also reports first tokens that have come to their clients. An engine that was asked has
responded by the next check if its process is neither paused nor dead then.
"""

from __future__ import annotations

from pdflow.protocol.values import EngineId, RequestId
from pdflow.routing.events import EnginesChecked
from pdflow.routing.watching import WatchingRouter
from pdflow_sim.clients.clients import Clients
from pdflow_sim.environment import ClockEnvironment, ProcessSteps


class SimEngineChecks:
    """Checks the engines of a run, in a simpy process. Args: `check_ns`: the interval."""

    def __init__(self, env: ClockEnvironment, clients: Clients, router: WatchingRouter, check_ns: int) -> None:
        self.env = env
        self.clients = clients
        self.clock = clients.clock
        self.node = clients.router
        self.endpoint = router
        self.check_ns = check_ns
        self.counted: dict[RequestId, int] = {}
        """Tokens of each open attempt that had come at the last check."""
        env.process(self.checks())

    def checks(self) -> ProcessSteps:
        while True:
            yield self.env.background_timeout(self.check_ns)
            if self.clients.done or not self.clock.has_work:
                return
            generating, quiet = self.answers()
            active, self.node.active = self.node.active | generating, set()
            if self.endpoint.attempts or self.endpoint.stalled:
                responding = tuple(sorted(self.responding()))
                self.node.feed(self.node.port, EnginesChecked(tuple(sorted(active)), responding, quiet=quiet))

    def responding(self) -> set[EngineId]:
        """Return the engines that were asked at the last check and respond, and forget that they were asked."""
        asked, self.node.asked = self.node.asked, set()
        engines = self.node.nodes.engines()
        return {
            node.name for node in engines if node.name in asked and node.alive and node.paused_until <= self.clock.now
        }

    def answers(self) -> tuple[set[EngineId], tuple[RequestId, ...]]:
        """Return the engines of which new tokens have come, and the attempts of which none have, although their answers
        have begun; report first tokens."""
        node, first_tokens, counted = self.node, self.node.first_tokens, self.counted
        active: set[EngineId] = set()
        quiet: list[RequestId] = []
        self.counted = {}
        for attempt in list(node.attempts.values()):
            source = first_tokens.source(attempt) if first_tokens.delivered(attempt) else None
            if source is None:
                continue
            if not attempt.started:
                node.first_token_delivered(attempt, first_tokens.at(attempt))
            engine, seq = source
            runs, ends = engine.engine.decoded_by(seq, self.clock.now - node.http_ns)
            tokens = sum(last - first + 1 for first, last in runs) + len(ends)
            self.counted[attempt.request_id] = tokens
            if tokens != counted.get(attempt.request_id, 0):
                active.add(engine.name)
            else:
                quiet.append(attempt.request_id)
        return active, tuple(quiet)
