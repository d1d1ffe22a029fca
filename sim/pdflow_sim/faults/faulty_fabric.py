"""The network of a run that has a plan of faults: what these do to messages, handshakes, WRITEs and READs.

It takes the network's place when the run is built; nodes do not know which of the two they have. A frame is carried to
whatever incarnation of its receiver there is when it arrives; an operation counts only for the incarnations that it was
posted between. A NIC whose peer does not answer retries until its transport times out: a partition that heals before
that costs only time.
"""

from __future__ import annotations

from typing import NamedTuple

from pdflow.faults.plan import (
    Delay,
    DropMessages,
    Duplicate,
    Fault,
    Partition,
    Reorder,
)
from pdflow.protocol.effects import Send
from pdflow.protocol.events import HandshakeEnded, ReadEnded, Received, WordRead, WriteEnded
from pdflow.protocol.ids import Op, engine_of
from pdflow.protocol.messages import Message
from pdflow.protocol.values import Address, EngineId, Instant
from pdflow.results.records import XFER_POST
from pdflow_sim.clock import Clock
from pdflow_sim.faults.active_faults import ActiveFaults
from pdflow_sim.faults.witness import Witness
from pdflow_sim.network.fabric import Fabric, FabricSettings
from pdflow_sim.network.flight import Flight
from pdflow_sim.network.paths import Paths
from pdflow_sim.nodes.engine_node import SimEngineNode
from pdflow_sim.nodes.node import SimPort
from pdflow_sim.observe.run_metrics import RunMetrics

NO_FLOW, NO_SHARE = -1, (-1, 0)
"""Stands among the shares of an operation that is stuck, so that it does not depart with one that has just ended."""


class Stuck:
    """An operation that a NIC tries again and again."""

    __slots__ = ("flight", "remaining")

    def __init__(self, flight: Flight, remaining: int) -> None:
        self.flight = flight
        self.remaining = remaining
        """Bytes; none, if all have arrived and only the acknowledgement is missing."""


def no_rail(flight: Flight) -> bool:
    """True if no NIC is left for the operation."""
    return flight.rails is not None and not flight.rails.paths


class Delivery(NamedTuple):
    """A message that reaches the endpoint of this address, whichever incarnation has it then."""

    to: Address
    event: Received


class HandshakeTry(NamedTuple):
    """A handshake under way."""

    port: SimPort
    peer: Address
    fails: bool
    until: Instant
    """When the handshake is given up."""


class FaultyFabric(Fabric):
    """The network with faults. Args: as Fabric's; `handshake_timeout_ns`: how long a handshake waits for its reply."""

    def __init__(
        self,
        clock: Clock,
        metrics: RunMetrics,
        paths: Paths,
        settings: FabricSettings,
        faults: ActiveFaults,
        witness: Witness,
        handshake_timeout_ns: int,
    ) -> None:
        super().__init__(clock, metrics, paths, settings)
        self.faults = faults
        self.witness = witness
        self.handshake_timeout_ns = handshake_timeout_ns
        self.transport_timeout_ns = faults.plan.transport_timeout_ns
        self.held: dict[tuple[Address, Address], list[list[Delivery]]] = {}
        """Messages that wait to be overtaken, by sender and receiver: each is emptied when it goes."""
        self.seen: dict[tuple[Address, Address], int] = {}
        """The incarnation that the last handshake of one rank with another showed."""
        self.floors: dict[EngineId, int] = {}
        """The last generation of D engines' former incarnations: their memory keys are not valid any more."""
        self.fates: dict[int, str] = {}
        """The stage of the error with which an operation will end, by the operation's number."""
        self.stuck: dict[int, Stuck] = {}
        self.left: dict[int, int] = {}
        """Bytes that an interrupted operation had left when it went on, by its number."""
        self.unplugged: list[SimEngineNode] = []
        """Dead nodes whose NICs have stopped too."""

    def begin_fault(self, fault: Fault) -> None:
        """Open a window of a fault of messages, handshakes or operations."""
        self.faults.begin(fault)
        if isinstance(fault, Partition):
            self.faults.count(fault)
            self._interrupt()

    def end_fault(self, fault: Fault) -> None:
        """Close a window of such a fault."""
        self.faults.end(fault)
        if isinstance(fault, Partition):
            self.retry()

    # Messages.

    def send(self, sender: SimPort, effect: Send) -> None:
        """Send a message as Fabric does, if faults let it through."""
        self.deliver(sender, effect.to, effect.message, self.send_delay_ns(effect.message))

    def deliver(self, sender: SimPort, to: Address, message: Message, delay: int) -> None:
        """Deliver a message, or what faults leave of it."""
        a, b = self.faults.slot_of(sender.address), self.faults.slot_of(to)
        lost = self.faults.is_partitioned(a, b)
        copies = [0]
        hold: int | None = None
        tag = message.__struct_config__.tag
        # What the original does not say nothing happens to, but to its peer.
        faults = () if type(message) in self.silent else self.faults.on_messages
        for fault in faults:
            if not fault.links.hold(a, b) or (fault.frames and tag not in fault.frames) or not self.faults.hits(fault):
                continue
            if isinstance(fault, DropMessages):
                lost = True
            elif isinstance(fault, Delay):
                delay += fault.delay_ns
                if fault.jitter_ns:
                    delay += self.faults.numbers[fault.name].below(fault.jitter_ns + 1)
            elif isinstance(fault, Duplicate):
                copies.append(fault.delay_ns)
            elif isinstance(fault, Reorder):
                hold = fault.delay_ns
        if lost:
            return
        link = (sender.address, to)
        delivery = Delivery(to, Received(sender.address, sender.incarnation, message))
        if hold is not None:
            waiting = [delivery]
            self.held.setdefault(link, []).append(waiting)
            self.clock.call(delay + hold, self.release, waiting)
            copies = copies[1:]
        for extra in copies:
            self.clock.call(delay + extra, self.delivered, delivery)
        if hold is None:
            for waiting in self.held.pop(link, ()):
                self.clock.call(delay, self.release, waiting)

    def release(self, waiting: list[Delivery]) -> None:
        """Deliver a message that was to be overtaken, if it has not been delivered yet."""
        if waiting:
            self.delivered(waiting.pop())

    def delivered(self, delivery: Delivery) -> None:
        port = self.ports[delivery.to]
        port.node.receive(port, delivery.event)

    # Handshakes, and the small READ of a lease word: there and back.

    def handshake(self, port: SimPort, peer: Address) -> None:
        """Begin a handshake as Fabric does; its reply may never come."""
        a, b = self.faults.slot_of(port.address), self.faults.slot_of(peer)
        fails = self.fails is not None and self.fails(peer)
        takes = self.contact_ns(port, peer)
        for fault in self.faults.on_handshakes:
            if fault.links.hold(a, b) and self.faults.hits(fault):
                fails = True
                takes = self.cold_contact_ns(port) if fault.delay_ns is None else fault.delay_ns
        until = self.clock.now + max(takes, self.handshake_timeout_ns)
        self.clock.call(takes, self.answered, HandshakeTry(port, peer, fails, until))

    def answered(self, handshake: HandshakeTry) -> None:
        """End a handshake with its reply, if the peer is there to give one."""
        port, peer, fails, until = handshake
        if fails:
            self.unanswered(handshake)
            return
        now = self.clock.now
        a, b = self.faults.slot_of(port.address), self.faults.slot_of(peer)
        there = self.ports[peer]
        node = there.node
        if not node.alive or self.faults.is_partitioned(a, b) or self.faults.is_partitioned(b, a):
            self.clock.call(until - now, self.unanswered, handshake)
        elif node.paused_until > now:
            if node.paused_until < until:
                self.clock.call(node.paused_until - now, self.answered, handshake)
            else:
                self.clock.call(until - now, self.unanswered, handshake)
        elif port is self.ports[port.address]:
            self.seen[port.address, peer] = there.incarnation
            port.node.feed(port, HandshakeEnded(peer, True, there.incarnation))

    def unanswered(self, handshake: HandshakeTry) -> None:
        handshake.port.node.feed(handshake.port, HandshakeEnded(handshake.peer, False, 0))

    def read_word(self, port: SimPort, op: Op, source: Address, index: int) -> None:
        """Read a lease word as Fabric does, if P is there and reachable; otherwise the READ times out."""
        a, b = self.faults.slot_of(source), self.faults.slot_of(port.address)
        if (
            self.ports[source].node.alive
            and not self.faults.is_partitioned(a, b)
            and not self.faults.is_partitioned(b, a)
        ):
            super().read_word(port, op, source, index)
        else:
            self.clock.call(self.transport_timeout_ns, self.arrived, (port, WordRead(op, None)))

    # Operations.

    def begin(self, flight: Flight) -> None:
        """Begin an operation as Fabric does, if all its bytes may start to flow now."""
        self.metrics.records.ends[XFER_POST][flight.request] = self.clock.now
        if self.may_begin(flight):
            self.flow(flight, flight.nbytes)

    def may_begin(self, flight: Flight) -> bool:
        """Return whether all bytes of an operation may start to flow now; if not, fail, delay or shorten it here."""
        p, d = flight.p_port, flight.d_port
        mine = flight.mover.node
        if not mine.alive and (flight.reads or mine in self.unplugged):
            if flight.then is not None:
                flight.then(False)
            return False
        a, b = self.faults.slot_of(p.address), self.faults.slot_of(d.address)
        stage: str | None = None
        for fault in self.faults.on_transfers:
            if (fault.links.hold(a, b) or fault.links.hold(b, a)) and self.faults.hits(fault):
                stage = fault.stage
        if stage == "start":
            self.fail(flight)
        elif self.blocked(flight) or no_rail(flight):
            self.stick(flight, flight.nbytes)
        elif (after := self.refused_after(flight)) is not None:
            self.clock.call(after, self.fail, flight)
        elif stage is None:
            return True
        else:
            self.fates[flight.number] = stage
            self.flow(flight, flight.nbytes // 2 if stage == "in-flight" else flight.nbytes)
        return False

    def blocked(self, flight: Flight) -> bool:
        """True if bytes from P cannot reach D. A READ must be asked for first."""
        p, d = self.faults.slot_of(flight.p_port.address), self.faults.slot_of(flight.d_port.address)
        return self.faults.is_partitioned(p, d) or (flight.reads and self.faults.is_partitioned(d, p))

    def refused_after(self, flight: Flight) -> int | None:
        """Return the ns after which the NIC gives up an operation on memory that is gone; None if it is there."""
        p, d = flight.p_port, flight.d_port
        mine, theirs = (d, p) if flight.reads else (p, d)
        if not theirs.node.alive:
            return self.transport_timeout_ns
        restarted = self.seen.get((mine.address, theirs.address), theirs.incarnation) != theirs.incarnation
        if restarted or (not flight.reads and self.stale(d.address, flight.generation)):
            return flight.wire_latency
        return None

    def stale(self, d_rank: Address, generation: int) -> bool:
        """True if a grant is of a former incarnation of its D engine."""
        return generation <= self.floors.get(engine_of(d_rank), 0)

    def stick(self, flight: Flight, remaining: int) -> None:
        if flight.number in self.stuck:
            self.stuck[flight.number].remaining += remaining
            return
        if flight.rails is not None:
            flight.shares[NO_FLOW] = NO_SHARE
        stuck = self.stuck[flight.number] = Stuck(flight, remaining)
        self.clock.call(self.transport_timeout_ns, self._give_up, stuck)

    def _give_up(self, stuck: Stuck) -> None:
        number = stuck.flight.number
        if self.stuck.get(number) is stuck:
            del self.stuck[number]
            self.fates.pop(number, None)
            stuck.flight.shares.clear()
            self.fail(stuck.flight)

    def _interrupt(self) -> None:
        """Stop what flows across a partition that begins."""
        now = self.clock.now
        for flow, flight in list(self.flows.items()):
            if self.blocked(flight):
                carried = self.network.cancel(flow, now)
                if carried is not None:
                    del self.flows[flow]
                    share = flight.shares.pop(flow, None)
                    nbytes = self.left.pop(flight.number, flight.nbytes) if share is None else share[1]
                    # At least one byte: the last one is not there until the flow has ended.
                    self.stick(flight, max(1, nbytes - carried))
        self.arm()

    def retry(self) -> None:
        """Let NICs that still retry get through, since a partition is over or a NIC works again."""
        for number, stuck in list(self.stuck.items()):
            flight = stuck.flight
            a, b = self.faults.slot_of(flight.p_port.address), self.faults.slot_of(flight.d_port.address)
            if self.blocked(flight) or no_rail(flight) or (not stuck.remaining and self.faults.is_partitioned(b, a)):
                continue
            del self.stuck[number]
            flight.shares.pop(NO_FLOW, None)
            if stuck.remaining:
                self.left[number] = stuck.remaining
                self.flow(flight, stuck.remaining)
            else:
                flight.p_port.node.receive(flight.p_port, WriteEnded(flight.op, True))

    def settle(self, flight: Flight) -> None:
        """Report the end of an operation as Fabric does, unless an error comes first or its process is gone."""
        if flight.then is not None:
            flight.then(not self.loses(flight))
            return
        fate = self.fates.pop(flight.number, None)
        self.left.pop(flight.number, None)
        mine = flight.mover.node
        if not mine.alive and (flight.reads or mine in self.unplugged):
            return
        after = self.refused_after(flight)
        if fate == "in-flight" or after is not None:
            self.clock.call(after or 0, self.fail, flight)
            return
        self.count_landed(flight)
        if flight.reads:
            self.read_landed(flight, fate is None)
        else:
            self.write_landed(flight, fate is None)

    def loses(self, flight: Flight) -> bool:
        """True if a piece whose last byte has arrived counts as lost all the same."""
        self.left.pop(flight.number, None)
        lost = self.fates.pop(flight.number, None) is not None
        return lost or (flight.request >= 0 and self.refused_after(flight) is not None)

    def read_landed(self, flight: Flight, ok: bool) -> None:
        p, d = flight.p_port, flight.d_port
        if flight.notification is not None:
            self.witness.read_landed(flight)
            self.deliver(d, p.address, flight.notification, 0)
        d.node.receive(d, ReadEnded(flight.op, ok))

    def write_landed(self, flight: Flight, ok: bool) -> None:
        p, d = flight.p_port, flight.d_port
        if flight.notification is not None:
            self.deliver(p, d.address, flight.notification, 0)
        self.witness.write_landed(flight, p.node)
        if not ok:
            self.witness.landed.add(flight.op)
            p.node.receive(p, WriteEnded(flight.op, False))
        elif self.faults.is_partitioned(self.faults.slot_of(d.address), self.faults.slot_of(p.address)):
            self.witness.landed.add(flight.op)
            self.stick(flight, 0)
        else:
            p.node.receive(p, WriteEnded(flight.op, True))

    def fail(self, flight: Flight) -> None:
        """End an operation without success as Fabric does, and record a failed WRITE for the oracle."""
        if flight.then is None and not flight.reads:
            self.witness.write_failed(flight, flight.p_port.node)
        super().fail(flight)

    # Engines.

    def invalidate(self, node: SimEngineNode) -> None:
        """Note that the memory of this engine is gone."""
        self.floors[node.name] = node.newest_generation()

    def unplug(self, node: SimEngineNode) -> None:
        """Stop the NICs of this engine: what they were moving ends."""
        self.unplugged.append(node)
        now = self.clock.now
        for flow, flight in list(self.flows.items()):
            if flight.mover.node is node and self.network.cancel(flow, now) is not None:
                del self.flows[flow]
                if not flight.others(flow) and flight.then is not None:
                    # Whoever waits for its turn behind this piece must not wait for the dead.
                    flight.then(False)
        self.arm()
