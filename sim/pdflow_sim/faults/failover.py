"""Failure of NICs, and failover of the operations that they had under way.

A transfer engine gives what a failed NIC had left to the others near the same memory or, if none of these works, to
those near the engine's other GPUs. The side that moves the bytes knows at once that a NIC of its own is gone; that one
of the other side is, only when its transport times out. Routes avoid it from the start.

Source: Mooncake's Transfer Engine (preferred and secondary NICs; a failed path is replaced by another NIC).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdflow.protocol.ids import engine_of
from pdflow_sim.faults.faulty_fabric import NO_FLOW, NO_SHARE, FaultyFabric, no_rail
from pdflow_sim.network.flight import Flight
from pdflow_sim.network.paths import Nic


class LostShare(NamedTuple):
    """The share of an operation that was on its way over a NIC that has failed, and waits to go over another."""

    flight: Flight
    key: int
    """The share's key among the operation's shares."""
    nbytes: int


class Failover:
    """Moves operations from failed NICs to others, in a world that has a plan of faults."""

    def __init__(self, fabric: FaultyFabric) -> None:
        self.fabric = fabric
        self.paths = fabric.paths
        self.key = NO_FLOW
        """The key of the last share that waited to be tried again: below those of flows, and of what is stuck."""

    def lose(self, nics: Sequence[Nic]) -> None:
        """Fail these NICs now."""
        for nic in nics:
            self.paths.fail(nic, 1)
        fabric, clock = self.fabric, self.fabric.clock
        crossing = {path: engine_of(nic[0]) for nic in nics for path in self.paths.over.get(nic, ())}
        for flow, flight in list(fabric.flows.items()):
            share = flight.shares.get(flow)
            if share is None or share[0] not in crossing:
                continue
            carried = fabric.network.cancel(flow, clock.now)
            if carried is None:
                continue
            del fabric.flows[flow], flight.shares[flow]
            self.key -= 1
            flight.shares[self.key] = NO_SHARE
            own = crossing[share[0]] == engine_of(flight.mover.address)
            wait = 0 if own else fabric.transport_timeout_ns
            clock.call(wait, self.again, LostShare(flight, self.key, max(1, share[1] - carried)))
        fabric.arm()

    def regain(self, nics: Sequence[Nic]) -> None:
        """Let these NICs work again."""
        for nic in nics:
            self.paths.fail(nic, -1)
        self.fabric.retry()

    def again(self, share: LostShare) -> None:
        """Give a share to the NICs that are left, unless its operation has ended otherwise."""
        flight, key, remaining = share
        if flight.shares.pop(key, None) is None:
            return
        fabric, mine = self.fabric, flight.mover.node
        if fabric.barred(flight):
            if not flight.shares:
                fabric.fail(flight)
        elif not mine.alive and (flight.reads or mine in fabric.unplugged):
            if flight.then is not None and not flight.shares:
                flight.then(False)
        elif fabric.blocked(flight) or no_rail(flight):
            fabric.stick(flight, remaining)
        else:
            fabric.flow(flight, remaining)
