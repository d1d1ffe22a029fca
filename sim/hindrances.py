"""What faults do to what passes between engines: messages, handshakes, WRITEs and READs.

Stands between the nodes and the fabric in a world that has a plan of faults, and in no other. A frame is carried to
whatever life of its receiver there is when it arrives; an operation counts only for the lives that it was posted
between. A NIC whose peer does not answer tries on until its transport times out: a partition that heals before that
costs only time.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pdflow.faults.draw import Numbers, Streams
from pdflow.faults.plan import (
    ROUTER,
    Delay,
    Drop,
    Duplicate,
    Fault,
    HandshakeError,
    MessageFault,
    Partition,
    Plan,
    Reorder,
    TransferError,
)
from pdflow.protocol.effects import Handshake, ReadWord, Send
from pdflow.protocol.events import HandshakeEnded, ReadEnded, Received, WordRead, WriteEnded
from pdflow.protocol.ids import engine_of
from pdflow.protocol.messages import Message
from pdflow.protocol.values import Address, EngineId, Instant
from pdflow.results.records import XFER_WIRE
from pdflow.wiring.stores import LOADS
from sim.engine_node import EngineNode
from sim.fabric import Fabric, Flight
from sim.node import Node, Port
from sim.node_registry import NodeRegistry
from sim.witness import Witness

F = TypeVar("F", MessageFault, TransferError, HandshakeError)

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
    """Whether no NIC is left for it."""
    return flight.rails is not None and not flight.rails.paths


class Hindrances:
    """Args: handshake_timeout_ns is how long a handshake waits for its reply."""

    def __init__(
        self,
        fabric: Fabric,
        nodes: NodeRegistry,
        witness: Witness,
        plan: Plan,
        streams: Streams,
        handshake_timeout_ns: int,
    ) -> None:
        self.fabric = fabric
        self.env = fabric.env
        self.metrics = fabric.metrics
        self.nodes = nodes
        self.plan = plan
        self.witness = witness
        self.handshake_timeout_ns = handshake_timeout_ns
        self.numbers: dict[str, Numbers] = {fault.name: streams(f"faults/{fault.name}/hits") for fault in plan.faults}
        self.acting: dict[str, int] = {}
        """By name: how many windows of a fault are open."""
        self.on_messages: list[MessageFault] = []
        self.on_transfers: list[TransferError] = []
        self.on_handshakes: list[HandshakeError] = []
        self.partitions: list[Partition] = []
        self.held: dict[tuple[Address, Address], list[list[Any]]] = {}
        """Messages that wait to be overtaken, by sender and receiver: each is emptied when it goes."""
        self.lives: dict[tuple[Address, Address], int] = {}
        """The incarnation that the last handshake of one rank with another showed."""
        self.floors: dict[EngineId, int] = {}
        """The last generation of D engines' former lives: their memory keys are not valid any more."""
        self.fates: dict[int, str] = {}
        """By number: the stage of the error that an operation will end with."""
        self.stuck: dict[int, Stuck] = {}
        self.left: dict[int, int] = {}
        """By number: bytes that an interrupted operation had left when it went on."""
        self.unplugged: list[EngineNode] = []
        """Dead nodes whose NICs have stopped too."""
        self.fabric.hindrances = self
        for node in nodes.peers():
            self.attach(node)

    def attach(self, node: Node) -> None:
        node.do[Send] = self.send
        node.do[Handshake] = self.handshake
        if ReadWord in node.do:
            node.do[ReadWord] = self.read_word

    # Which faults act.

    def begin(self, fault: Fault) -> None:
        """A window of this fault opens."""
        self.acting[fault.name] = self.acting.get(fault.name, 0) + 1
        self._choose()
        if isinstance(fault, Partition):
            self.count(fault)
            self._interrupt()

    def end(self, fault: Fault) -> None:
        self.acting[fault.name] -= 1
        self._choose()
        if isinstance(fault, Partition):
            self.retry()

    def _choose(self) -> None:
        acting = [fault for fault in self.plan.faults if self.acting.get(fault.name)]
        self.on_messages = [fault for fault in acting if isinstance(fault, MessageFault)]
        self.on_transfers = [fault for fault in acting if isinstance(fault, TransferError)]
        self.on_handshakes = [fault for fault in acting if isinstance(fault, HandshakeError)]
        self.partitions = [fault for fault in acting if isinstance(fault, Partition)]

    def place(self, address: Address) -> EngineId:
        return self.nodes.slots.name_of(engine_of(address).removesuffix(LOADS))

    def cut(self, sender: EngineId, receiver: EngineId) -> bool:
        """Whether nothing gets through in this direction."""
        return any(partition.links.hold(sender, receiver) for partition in self.partitions)

    def count(self, fault: Fault) -> None:
        """For the result: how often each kind has happened."""
        self.metrics.count("fault: " + fault.name.partition("/")[0])

    def hits(self, fault: F) -> bool:
        """Drawn once for each message or operation that it may hit."""
        if fault.probability < 1.0 and self.numbers[fault.name].uniform() >= fault.probability:
            return False
        self.count(fault)
        return True

    # Messages.

    def send(self, sender: Port, effect: Send) -> None:
        self.carry(sender, effect.to, effect.message, self.fabric.under_way(effect.message))

    def carry(self, sender: Port, to: Address, message: Message, delay: int) -> None:
        """Bring a message to its receiver, or what faults leave of it."""
        a, b = self.place(sender.address), self.place(to)
        lost = self.cut(a, b)
        copies = [0]
        hold: int | None = None
        tag = message.__struct_config__.tag
        # What the original does not say nothing happens to, but to its peer.
        faults = () if type(message) in self.fabric.silent else self.on_messages
        for fault in faults:
            if not fault.links.hold(a, b) or (fault.frames and tag not in fault.frames) or not self.hits(fault):
                continue
            if isinstance(fault, Drop):
                lost = True
            elif isinstance(fault, Delay):
                delay += fault.delay_ns
                if fault.jitter_ns:
                    delay += self.numbers[fault.name].below(fault.jitter_ns + 1)
            elif isinstance(fault, Duplicate):
                copies.append(fault.delay_ns)
            elif isinstance(fault, Reorder):
                hold = fault.delay_ns
        if lost:
            return
        link = (sender.address, to)
        event = Received(sender.address, sender.incarnation, message)
        if hold is not None:
            waiting: list[Any] = [(to, event)]
            self.held.setdefault(link, []).append(waiting)
            self.env.call(delay + hold, self.let_go, waiting)
            copies = copies[1:]
        for extra in copies:
            self.env.call(delay + extra, self.arrived, (to, event))
        if hold is None:
            for waiting in self.held.pop(link, ()):
                self.env.call(delay, self.let_go, waiting)

    def loses_report(self, engine: EngineId) -> bool:
        """Whether a heartbeat of this engine does not get to the router."""
        drops = [fault for fault in self.on_messages if isinstance(fault, Drop) and fault.links.hold(engine, ROUTER)]
        return self.cut(engine, ROUTER) or any(self.hits(drop) for drop in drops)

    def let_go(self, waiting: list[Any]) -> None:
        if waiting:
            self.arrived(waiting.pop())

    def arrived(self, about: tuple[Address, Received]) -> None:
        to, event = about
        port = self.fabric.ports[to]
        port.node.receive(port, event)

    # Handshakes, and the small READ of a lease word: there and back.

    def handshake(self, port: Port, effect: Handshake) -> None:
        peer = effect.peer
        a, b = self.place(port.address), self.place(peer)
        fails = self.fabric.fails is not None and self.fabric.fails(peer)
        takes = self.fabric.contact_ns(port)
        for fault in self.on_handshakes:
            if fault.links.hold(a, b) and self.hits(fault):
                fails = True
                takes = takes if fault.delay_ns is None else fault.delay_ns
        until = self.env.now + max(takes, self.handshake_timeout_ns)
        self.env.call(takes, self.shaken, (port, peer, fails, until))

    def shaken(self, about: tuple[Port, Address, bool, Instant]) -> None:
        port, peer, fails, until = about
        if fails:
            self.unanswered((port, peer))
            return
        now = self.env.now
        a, b = self.place(port.address), self.place(peer)
        there = self.fabric.ports[peer]
        node: Any = there.node
        if not node.alive or self.cut(a, b) or self.cut(b, a):
            self.env.call(until - now, self.unanswered, (port, peer))
        elif node.paused_until > now:
            if node.paused_until < until:
                self.env.call(node.paused_until - now, self.shaken, about)
            else:
                self.env.call(until - now, self.unanswered, (port, peer))
        elif port is self.fabric.ports[port.address]:
            self.lives[port.address, peer] = there.incarnation
            port.node.feed(port, HandshakeEnded(peer, True, there.incarnation))

    def unanswered(self, about: tuple[Port, Address]) -> None:
        port, peer = about
        port.node.feed(port, HandshakeEnded(peer, False, 0))

    def read_word(self, port: Port, effect: ReadWord) -> None:
        a, b = self.place(effect.source), self.place(port.address)
        source: Any = self.fabric.ports[effect.source]
        if source.node.alive and not self.cut(a, b) and not self.cut(b, a):
            self.fabric.read_word(port, effect.op, effect.source, effect.index)
        else:
            lost = WordRead(effect.op, None)
            self.env.call(self.plan.transport_timeout_ns, self.fabric.arrived, (port, lost))

    # Operations.

    def begins(self, flight: Flight) -> bool:
        """Whether its bytes may start to flow, all of them, now; if not, it is seen to here."""
        p, d = flight.p_port, flight.d_port
        mine: Any = flight.mover.node
        if not mine.alive and (flight.reads or mine in self.unplugged):
            if flight.then is not None:
                flight.then(False)
            return False
        a, b = self.place(p.address), self.place(d.address)
        stage: str | None = None
        for fault in self.on_transfers:
            if (fault.links.hold(a, b) or fault.links.hold(b, a)) and self.hits(fault):
                stage = fault.stage
        if stage == "start":
            self.fabric.fail(flight)
        elif self.blocked(flight) or no_rail(flight):
            self.stick(flight, flight.nbytes)
        elif (after := self.refused_after(flight)) is not None:
            self.env.call(after, self.fabric.fail, flight)
        elif stage is None:
            return True
        else:
            self.fates[flight.number] = stage
            self.fabric.flow(flight, flight.nbytes // 2 if stage == "in-flight" else flight.nbytes)
        return False

    def blocked(self, flight: Flight) -> bool:
        """Whether bytes from P cannot reach D. A READ must be asked for first."""
        p, d = self.place(flight.p_port.address), self.place(flight.d_port.address)
        return self.cut(p, d) or (flight.reads and self.cut(d, p))

    def refused_after(self, flight: Flight) -> int | None:
        """When the NIC gives up an operation on memory that is gone; None if it is there."""
        p, d = flight.p_port, flight.d_port
        mine, theirs = (d, p) if flight.reads else (p, d)
        there: Any = theirs.node
        if not there.alive:
            return self.plan.transport_timeout_ns
        other_life = self.lives.get((mine.address, theirs.address), theirs.incarnation) != theirs.incarnation
        if other_life or (not flight.reads and self.stale(d.address, flight.generation)):
            return flight.wire_latency
        return None

    def stale(self, d_rank: Address, generation: int) -> bool:
        """Whether a grant is of a former life of its D engine."""
        return generation <= self.floors.get(engine_of(d_rank), 0)

    def stick(self, flight: Flight, remaining: int) -> None:
        if flight.number in self.stuck:
            self.stuck[flight.number].remaining += remaining
            return
        if flight.rails is not None:
            flight.shares[NO_FLOW] = NO_SHARE
        stuck = self.stuck[flight.number] = Stuck(flight, remaining)
        self.env.call(self.plan.transport_timeout_ns, self._give_up, stuck)

    def _give_up(self, stuck: Stuck) -> None:
        number = stuck.flight.number
        if self.stuck.get(number) is stuck:
            del self.stuck[number]
            self.fates.pop(number, None)
            stuck.flight.shares.clear()
            self.fabric.fail(stuck.flight)

    def _interrupt(self) -> None:
        """A partition begins: what flows across it stops."""
        fabric, now = self.fabric, self.env.now
        for flow, flight in list(fabric.flows.items()):
            if self.blocked(flight):
                carried = fabric.network.cancel(flow, now)
                if carried is not None:
                    del fabric.flows[flow]
                    share = flight.shares.pop(flow, None)
                    nbytes = self.left.pop(flight.number, flight.nbytes) if share is None else share[1]
                    # At least one byte: the last one is not there until the flow has ended.
                    self.stick(flight, max(1, nbytes - carried))
        fabric.arm()

    def retry(self) -> None:
        """A partition is over, or a NIC works again: NICs that are still trying get through."""
        for number, stuck in list(self.stuck.items()):
            flight = stuck.flight
            a, b = self.place(flight.p_port.address), self.place(flight.d_port.address)
            if self.blocked(flight) or no_rail(flight) or (not stuck.remaining and self.cut(b, a)):
                continue
            del self.stuck[number]
            flight.shares.pop(NO_FLOW, None)
            if stuck.remaining:
                self.left[number] = stuck.remaining
                self.fabric.flow(flight, stuck.remaining)
            else:
                flight.p_port.node.receive(flight.p_port, WriteEnded(flight.op, True))

    def spoils(self, flight: Flight) -> bool:
        """Whether a piece whose last byte has arrived counts as lost all the same."""
        self.left.pop(flight.number, None)
        spoilt = self.fates.pop(flight.number, None) is not None
        return spoilt or (flight.request >= 0 and self.refused_after(flight) is not None)

    def lands(self, flight: Flight) -> None:
        """Its last byte has arrived, unless an error comes first or there is nobody to arrive at."""
        fate = self.fates.pop(flight.number, None)
        self.left.pop(flight.number, None)
        p, d = flight.p_port, flight.d_port
        mine: Any = flight.mover.node
        if not mine.alive and (flight.reads or mine in self.unplugged):
            return
        after = self.refused_after(flight)
        if fate == "in-flight" or after is not None:
            self.env.call(after or 0, self.fabric.fail, flight)
            return
        totals = self.metrics.totals
        self.metrics.records.ends[XFER_WIRE][flight.request] = self.env.now
        totals.bytes_moved += flight.nbytes
        totals.transfers += 1
        if flight.reads:
            if flight.notice is not None:
                self.witness.read_landed(flight)
                self.carry(d, p.address, flight.notice, 0)
            d.node.receive(d, ReadEnded(flight.op, fate is None))
            return
        if flight.notice is not None:
            self.carry(p, d.address, flight.notice, 0)
        self.witness.write_landed(flight, mine)
        if fate is not None:
            self.witness.landed.add(flight.op)
            p.node.receive(p, WriteEnded(flight.op, False))
        elif self.cut(self.place(d.address), self.place(p.address)):
            self.witness.landed.add(flight.op)
            self.stick(flight, 0)
        else:
            p.node.receive(p, WriteEnded(flight.op, True))

    def failed(self, flight: Flight) -> None:
        """Its handle ends with an error."""
        writer: Any = flight.p_port.node
        if not flight.reads:
            self.witness.write_failed(flight, writer)

    def invalidate(self, node: EngineNode) -> None:
        """The memory of this engine is gone."""
        self.floors[node.name] = node.newest_generation()

    def unplug(self, node: EngineNode) -> None:
        """The NICs of this engine stop: what they were moving ends."""
        self.unplugged.append(node)
        fabric, now = self.fabric, self.env.now
        for flow, flight in list(fabric.flows.items()):
            if flight.mover.node is node and fabric.network.cancel(flow, now) is not None:
                del fabric.flows[flow]
                if not flight.others(flow) and flight.then is not None:
                    # Whoever waits for its turn behind this piece must not wait for the dead.
                    flight.then(False)
        fabric.arm()
