"""One simulated run, put together: its parts, for whoever lets it happen and looks at what came of it.

Nothing that is part of a run knows this: each part is given the others that it needs (`pdflow_sim.build`).
"""

from __future__ import annotations

import attrs

from pdflow.cost.step import StepCost
from pdflow.results.records import Records
from pdflow.results.steps import Steps
from pdflow.results.totals import Totals
from pdflow_sim.clients.client_timeouts import ClientTimeouts
from pdflow_sim.clients.clients import Clients
from pdflow_sim.clients.sessions import SessionClients
from pdflow_sim.clock import Clock
from pdflow_sim.environment import ClockEnvironment
from pdflow_sim.faults.faults import FaultInjector
from pdflow_sim.membership.heartbeats import Heartbeats
from pdflow_sim.membership.scaling import Scaling
from pdflow_sim.network.fabric import Fabric
from pdflow_sim.network.shipping import Shipping
from pdflow_sim.nodes.aggregated_node import AggregatedNode
from pdflow_sim.nodes.decode_node import SimDecodeNode
from pdflow_sim.nodes.node import Observer
from pdflow_sim.nodes.prefill_node import SimPrefillNode
from pdflow_sim.nodes.registry import NodeRegistry
from pdflow_sim.nodes.router_node import SimRouterNode
from pdflow_sim.nodes.store_node import SimStoreNode
from pdflow_sim.observe.recording import Recorder
from pdflow_sim.observe.run_metrics import RunMetrics


@attrs.define(kw_only=True)
class World:
    """Built by `pdflow_sim.build`. `records` and `totals` fill as it runs; the clock stops when the last request has
    ended.
    """

    clock: Clock
    env: ClockEnvironment
    """For simpy processes: it shares the clock's queue."""
    metrics: RunMetrics
    fabric: Fabric
    shipping: Shipping | None
    """Carries operations that go in pieces or a few at a time, where the method has any."""
    nodes: NodeRegistry
    router: SimRouterNode
    clients: Clients
    costs: dict[str, StepCost]
    """What a step takes, by pool."""
    recorder: Recorder | None
    """Writes down what changes over time, if somebody asked."""
    sessions: SessionClients | None = None
    """Who sends requests, if they come in sessions."""
    client_timeouts: ClientTimeouts | None = None
    """When clients give up, if they do."""
    scaling: Scaling | None = None
    """Who starts and stops engines, if anybody does."""
    heartbeats: Heartbeats | None = None
    """How the router knows who is there, if engines report."""
    faults: FaultInjector | None = None
    """What goes wrong, if anything is to."""

    @property
    def records(self) -> Records:
        """Of each request."""
        return self.metrics.records

    @property
    def totals(self) -> Totals:
        """What the run adds up besides."""
        return self.metrics.totals

    @property
    def steps(self) -> dict[str, Steps]:
        """Of each engine that decodes."""
        return self.metrics.steps

    @property
    def prefills(self) -> list[SimPrefillNode | AggregatedNode]:
        """Whoever the router may send a prompt to."""
        return self.nodes.prefills

    @property
    def decodes(self) -> list[SimDecodeNode]:
        """Whoever it may send a decode leg to."""
        return self.nodes.decodes

    @property
    def stores(self) -> list[SimStoreNode]:
        """Between the two, where the method has a store."""
        return self.nodes.stores

    @property
    def ended(self) -> int:
        """Requests that have ended so far."""
        return self.clients.ended

    @property
    def done(self) -> bool:
        """Whether all have."""
        return self.clients.done

    def watch(self, observe: Observer) -> None:
        """Show every event into and effect out of every endpoint to `observe(node, event, effects, now)`."""
        self.router.watch(observe)
        for node in self.nodes.peers():
            node.watch(observe)

    def assert_empty(self) -> None:
        """At quiescence: every block is back in its pool, and no endpoint remembers a transfer that is still open."""
        for node in self.nodes.engines():
            if not node.alive:
                continue
            node.assert_empty()
            left = node.left_over()
            assert not left, left
        for store in self.stores:
            store.assert_empty()
            still = store.open_transfers()
            assert not still, still
