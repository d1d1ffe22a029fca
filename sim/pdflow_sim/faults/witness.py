"""Reports to the oracle what no endpoint reports, from what the world knows.

An oracle sees events and effects of endpoints. A dead process has none: what its NICs were still doing ends unseen, and
so does what had ended before it looked. Nor does the oracle know incarnations: a WRITE over a grant of a former
incarnation lands nowhere, and breaks nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdflow.protocol.effects import PostWrite
from pdflow.protocol.events import FenceEnded, PeerLost, Received, WriteEnded
from pdflow.protocol.ids import Op, engine_of, rank_address
from pdflow.protocol.invariants.oracle import Oracle
from pdflow.protocol.values import Address, Instant
from pdflow_sim.clock import Clock
from pdflow_sim.network.flight import Flight
from pdflow_sim.nodes.engine_node import SimEngineNode
from pdflow_sim.nodes.node import Observer, SimNode
from pdflow_sim.nodes.registry import NodeRegistry


class Witness:
    """Completes and filters what the oracle observes, if there is an oracle."""

    def __init__(self, clock: Clock, nodes: NodeRegistry) -> None:
        self.clock = clock
        self.nodes = nodes
        self.oracle: Oracle | None = None
        self.unseen: dict[Op, tuple[Flight, bool]] = {}
        """WRITEs that have ended and whose process has not looked yet, and whether they have landed."""
        self.landed: set[Op] = set()
        """WRITEs that have landed, though their handle says otherwise or is still to come."""

    def before(self, oracle: Oracle, is_stale: Callable[[Address, int], bool]) -> Observer:
        """Return the observer in front of the oracle. Args: `is_stale`: whether a D rank's grant of that generation is
        of a former incarnation.
        """
        self.oracle = oracle

        def stale(effect: Any) -> bool:
            return type(effect) is PostWrite and is_stale(effect.to, effect.registration.target.generation)

        def observe(node: str, event: Any, effects: tuple[Any, ...], now: Instant) -> None:
            if type(event) is WriteEnded:
                self.unseen.pop(event.op, None)
                if event.op in self.landed and not event.ok:
                    # Data that have landed are not undone by an error: their notice counts when D looks at it.
                    event = PeerLost(rank_address(event.op.reg.engine, event.op.d_rank))
            if any(stale(effect) for effect in effects):
                effects = tuple(effect for effect in effects if not stale(effect))
            oracle.observe(node, event, effects, now)

        return observe

    def write_landed(self, flight: Flight, writer: SimNode) -> None:
        if self.oracle is None:
            return
        if writer.alive:
            self.unseen[flight.op] = (flight, True)
        else:
            self._over(flight, True)

    def write_failed(self, flight: Flight, writer: SimNode) -> None:
        if self.oracle is None:
            return
        if writer.alive:
            self.unseen.setdefault(flight.op, (flight, False))
        else:
            self._over(flight, False)

    def read_landed(self, flight: Flight) -> None:
        """Report that a READ has landed, whatever becomes of P from here on, before D looks, and whether or not the
        notification gets through.
        """
        if self.oracle is not None and flight.notification is not None:
            d, p = flight.d_port, flight.p_port
            self.oracle.observe(p.address, Received(d.address, d.incarnation, flight.notification), (), self.clock.now)

    def died(self, node: SimEngineNode, lands: bool) -> None:
        """Report the death of an engine's processes; unless it `lands`, nothing of theirs is under way any more."""
        oracle = self.oracle
        if oracle is None:
            return
        for engine in node.engines:
            oracle.lost(engine)
        mine = [item for item in self.unseen.values() if engine_of(item[0].p_port.address) == node.name]
        for flight, landed in mine:
            del self.unseen[flight.op]
            self._over(flight, landed)
        if lands or node not in self.nodes.prefills:
            return
        for rank in node.ports:
            for target in (*self.nodes.stores, *self.nodes.decodes):
                for peer in target.ports if rank != node.name else ():
                    oracle.observe(rank, FenceEnded(peer), (), self.clock.now)

    def _over(self, flight: Flight, landed: bool) -> None:
        """Report the end of a dead process's WRITE. If it has not landed, the oracle takes its whole link for fenced:
        where another incarnation writes over it already, it sees less than it could, and never more than there is.
        """
        assert self.oracle is not None
        event = WriteEnded(flight.op, True) if landed else FenceEnded(flight.d_port.address)
        self.oracle.observe(flight.p_port.address, event, (), self.clock.now)
