"""One simulated run, put together: its parts, for whoever lets it happen and looks at what came of it.

Nothing that is part of a run knows this: each part is given the others that it needs (`sim.build`).
"""

from __future__ import annotations

import attrs

from pdflow.cost.step import StepCost
from pdflow.results.records import Records
from pdflow.results.steps import Steps
from pdflow.results.totals import Totals
from sim.aggregated_node import AggregatedNode
from sim.clients import Clients
from sim.clock import Clock
from sim.decode_node import DecodeNode
from sim.fabric import Fabric
from sim.faults import Faults
from sim.heartbeats import Heartbeats
from sim.node import Observer
from sim.node_registry import NodeRegistry
from sim.patience import Patience
from sim.prefill_node import PrefillNode
from sim.recording import Recorder
from sim.router_node import RouterNode
from sim.run_metrics import RunMetrics
from sim.scaling import Scaling
from sim.sessions import Sessions
from sim.shipping import Shipping
from sim.store_node import StoreNode


@attrs.define(kw_only=True)
class World:
    """Built by `sim.build`. `records` and `totals` fill as it runs; the clock stops when the last request has ended."""

    env: Clock
    metrics: RunMetrics
    fabric: Fabric
    shipping: Shipping | None
    """Carries operations that go in pieces or a few at a time, where the method has any."""
    nodes: NodeRegistry
    router: RouterNode
    clients: Clients
    costs: dict[str, StepCost]
    """What a step takes, by pool."""
    recorder: Recorder | None
    """Writes down what changes over time, if somebody asked."""
    sessions: Sessions | None = None
    """Who sends requests, if they come in sessions."""
    patience: Patience | None = None
    """When clients give up, if they do."""
    scaling: Scaling | None = None
    """Who starts and stops engines, if anybody does."""
    heartbeats: Heartbeats | None = None
    """How the router knows who is there, if engines report."""
    faults: Faults | None = None
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
    def prefills(self) -> list[PrefillNode | AggregatedNode]:
        """Whoever the router may send a prompt to."""
        return self.nodes.prefills

    @property
    def decodes(self) -> list[DecodeNode]:
        """Whoever it may send a decode leg to."""
        return self.nodes.decodes

    @property
    def stores(self) -> list[StoreNode]:
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
