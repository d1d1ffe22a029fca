"""One simulated run, assembled from its components: callers run its clock, observe its events and read its results.

No component of a run refers to it: each one is given the others that it needs (`pdflow_sim.build`).
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
    """All components of one simulated run, made by `pdflow_sim.build`. `records` and `totals` fill during the run; the
    clock stops when the last request has ended.
    """

    clock: Clock
    env: ClockEnvironment
    """The environment of simpy processes; it shares the clock's queue."""
    metrics: RunMetrics
    fabric: Fabric
    shipping: Shipping | None
    """Carries operations that go in pieces or a few at a time, where the method has any."""
    nodes: NodeRegistry
    router: SimRouterNode
    clients: Clients
    costs: dict[str, StepCost]
    """The cost of a step, by pool."""
    recorder: Recorder | None
    """Records links and engines over time; None unless the run was asked for that."""
    sessions: SessionClients | None = None
    """Sends the turns of sessions; None if the workload has no sessions."""
    client_timeouts: ClientTimeouts | None = None
    """Cancels requests whose clients give up; None if none does."""
    scaling: Scaling | None = None
    """Starts and stops engines; None if the scenario scales no pool."""
    heartbeats: Heartbeats | None = None
    """Sends the engines' heartbeats to the router; None if engines do not report."""
    faults: FaultInjector | None = None
    """The fault injector; None if the scenario has no faults."""

    @property
    def records(self) -> Records:
        """The record of each request."""
        return self.metrics.records

    @property
    def totals(self) -> Totals:
        """The totals of the run, besides the records of single requests."""
        return self.metrics.totals

    @property
    def steps(self) -> dict[str, Steps]:
        """The logged steps, by engine that decodes."""
        return self.metrics.steps

    @property
    def prefills(self) -> list[SimPrefillNode | AggregatedNode]:
        """The engines to which the router may send a prompt, by position."""
        return self.nodes.prefills

    @property
    def decodes(self) -> list[SimDecodeNode]:
        """The engines to which the router may send a decode leg, by position."""
        return self.nodes.decodes

    @property
    def stores(self) -> list[SimStoreNode]:
        """The nodes of the store; empty if the method has none."""
        return self.nodes.stores

    @property
    def ended(self) -> int:
        """The number of requests that have ended so far."""
        return self.clients.ended

    @property
    def done(self) -> bool:
        """True if all requests have ended."""
        return self.clients.done

    def watch(self, observe: Observer) -> None:
        """Show every event into and effect out of every endpoint to `observe(node, event, effects, now)`."""
        self.router.watch(observe)
        for node in self.nodes.peers():
            node.watch(observe)

    def assert_empty(self) -> None:
        """Assert, at quiescence, that every block is back in its pool and no endpoint has an open transfer."""
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
