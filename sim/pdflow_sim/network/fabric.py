"""The network between nodes: control messages, handshakes, and one-sided operations over shared links.

An operation is posted (a cost per message and per descriptor, one after the other on its rank's posting lane), flows
over its path or several rails beside all other flows, and lands one latency after its last byte left; its notification
is behind its data. Where the dialect polls, whatever arrives waits for its node's next poll.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, get_args

from pdflow.engine.noise import varied
from pdflow.methods.wire_profile import LEASE_WORD, Occasion, ProfileMessage, Side, WireProfile
from pdflow.network.network import FlowId, FlowNetwork, PathId
from pdflow.protocol.effects import PostRead, PostWrite, Send
from pdflow.protocol.events import FenceEnded, HandshakeEnded, ReadEnded, Received, WordRead, WriteEnded
from pdflow.protocol.ids import LeaseWord, Op
from pdflow.protocol.messages import Message
from pdflow.protocol.values import Address, Instant
from pdflow.results.records import HANDSHAKE, XFER_POST, XFER_WIRE
from pdflow_sim.clock import Clock
from pdflow_sim.network.flight import Flight, copy_of
from pdflow_sim.network.paths import Paths, Route
from pdflow_sim.nodes.node import FAR, SimPort
from pdflow_sim.observe.run_metrics import RunMetrics

FRAMES = {kind.__struct_config__.tag: kind for kind in get_args(Message)}


class WordLookup(NamedTuple):
    """A READ of a lease word under way."""

    port: SimPort
    op: Op
    source: Address
    number: int
    latency_ns: int


Carry: TypeAlias = Callable[[PostWrite | PostRead, Flight, Route, int], None]
"""Carries an operation in pieces: (what posts it, the operation as a whole, its route, ns before its first byte)."""


class FabricSettings(NamedTuple):
    """Settings of the network from the scenario, besides the links."""

    control_ns: int
    """A control message's latency."""
    handshake_ns: int
    warm: bool
    """True if ranks have completed their handshakes before the first request, and before they serve again."""
    wire_profile: WireProfile
    """The messages of a method as published, instead of pdflow's frames."""
    pulls: bool
    """True if D moves the bytes."""
    checks_words: bool
    """True if a lease word ends with its prompt: not where D goes without what P has lost (`pdflow.methods.guards`)."""
    noise_ppm: Sequence[int] = ()
    """By how much the latencies of operations differ from the mean, in millionths, used in turn; empty: they do not."""


class Fabric:
    """The network of one run. Args: `paths` knows routes, latencies and descriptor counts of pairs of ranks."""

    def __init__(self, clock: Clock, metrics: RunMetrics, paths: Paths, settings: FabricSettings) -> None:
        wire_profile = settings.wire_profile
        self.clock = clock
        self.metrics = metrics
        self.network: FlowNetwork = paths.network
        self.paths = paths
        self.pulls = settings.pulls
        self.carry: Carry | None = None
        """Takes over operations (`pdflow_sim.network.shipping`), if the method sends them in pieces."""
        self.control_ns = control_ns = settings.control_ns
        self.handshake_ns = settings.handshake_ns
        self.warm = settings.warm
        self.met: set[tuple[Address, Instant, Address, Instant]] = set()
        """Ranks and peers that have used the handshake that was ready for them, with the start of each process."""
        self.wire_profile = wire_profile
        self.silent: frozenset[type] = frozenset([FRAMES[tag] for tag in wire_profile.silent if tag in FRAMES])
        """Kinds of messages that take no time and are not counted."""
        self.requesting, self.closing = wire_profile.besides(Occasion.REQUEST), wire_profile.besides(Occasion.CLOSING)
        self.requesting_ns = control_ns * sum([message.waits for message in self.requesting])
        self.closing_ns = control_ns * len(self.closing)
        self.ports: dict[Address, SimPort] = {}
        self.flows: dict[FlowId, Flight] = {}
        self.armed: Instant = FAR
        self.word_values: dict[Address, dict[int, int]] = {}
        """Every P rank's lease words, as a READ finds them, by rank and index."""
        self.checks_words = settings.checks_words
        self.noise_ppm = settings.noise_ppm
        self.messages = 0
        self.posted = 0
        """Operations posted so far."""
        self.posting_ns: dict[Address, int] = {}
        """How long each rank's posting lane has been busy."""
        self.fences: dict[tuple[Address, Address], int] = {}
        """By P rank and D rank: the number of the last operation that a fence between them stopped."""
        self.bars: dict[tuple[Address, Address], int] = {}
        """By P rank and D rank: the newest generation of D's blocks when D closed itself to P."""
        self.fails: Callable[[Op | Address], bool] | None = None
        """Set by tests: whether this operation, or this handshake with a peer, fails."""

    # Control messages.

    def send(self, sender: SimPort, effect: Send) -> None:
        event = Received(sender.address, sender.incarnation, effect.message)
        self.clock.call(self.send_delay_ns(effect.message), self.arrived, (self.ports[effect.to], event))

    def send_delay_ns(self, message: Message) -> int:
        """Count a message that is sent, and return how long it takes, in ns."""
        if type(message) in self.silent:
            return 0
        self.messages += 1
        return self.control_ns

    def arrived(self, arg: tuple[SimPort, Any]) -> None:
        port, event = arg
        port.node.receive(port, event)

    def handshake(self, port: SimPort, peer: Address) -> None:
        self.clock.call(self.contact_ns(port, peer), self.shaken, (port, peer))

    def contact_ns(self, port: SimPort, peer: Address) -> int:
        """Return how long it takes this rank to make itself known to a peer, in ns.

        Where connections are warm, the first handshake of two processes began when the later of them started, before
        the first request for those that are there from the beginning. A later one, after a lost connection, begins now.
        """
        cold_ns = self.cold_contact_ns(port)
        if not cold_ns or not self.warm:
            return cold_ns
        there = self.ports[peer]
        pair = (port.address, port.since, peer, there.since)
        if pair in self.met:
            return cold_ns
        self.met.add(pair)
        began = max(port.since, there.since)
        return max(0, began + cold_ns - self.clock.now) if began else 0

    def cold_contact_ns(self, port: SimPort) -> int:
        """Return how long a handshake takes that begins now, in ns."""
        return self.handshake_ns if self.contact(port) else 0

    def contact(self, port: SimPort) -> str:
        """Return how the rank makes itself known, in words; "" where its peer does that."""
        if self.wire_profile.messages and not port.node.makes_contact:
            return ""
        return self.wire_profile.contact(port.side)

    def shaken(self, arg: tuple[SimPort, Address]) -> None:
        port, peer = arg
        ok = self.fails is None or not self.fails(peer)
        port.node.feed(port, HandshakeEnded(peer, ok, self.ports[peer].incarnation if ok else 0))

    def fence(self, port: SimPort, peer: Address) -> None:
        self.clock.call(0, self.fenced, (port, peer))

    def fenced(self, arg: tuple[SimPort, Address]) -> None:
        """Carry out a fence: nothing that was posted between these two lands any more, nor, at D, what P may still post
        into blocks that have been given out so far.
        """
        port, peer = arg
        me = port.address
        self.fences[me, peer] = self.fences[peer, me] = self.posted
        if port.side is Side.D:
            self.bars[peer, me] = port.node.newest_generation()
        for flow, flight in list(self.flows.items()):
            if self.barred(flight) and self.network.cancel(flow, self.clock.now) is not None:
                del self.flows[flow]
                if not flight.others(flow):
                    self.fail(flight)
        self.arm()
        port.node.feed(port, FenceEnded(peer))

    def barred(self, flight: Flight) -> bool:
        link = (flight.p_port.address, flight.d_port.address)
        return flight.number <= self.fences.get(link, 0) or flight.generation <= self.bars.get(link, 0)

    def expose_word(self, rank: Address, lease_word: LeaseWord) -> None:
        """Let READs find a lease word at this rank from now on."""
        self.word_values.setdefault(rank, {})[lease_word.index] = lease_word.value

    def forget_word(self, rank: Address, lease_word: LeaseWord) -> None:
        """Forget the lease word of a prompt that P no longer keeps."""
        words = self.word_values.get(rank)
        if words and self.checks_words:
            words.pop(lease_word.index, None)

    def read_word(self, port: SimPort, op: Op, source: Address, index: int) -> None:
        """Begin one small READ: the word as it is when the request reaches P, known one round trip later."""
        latency = 0 if LEASE_WORD in self.wire_profile.silent else self.paths.latency_ns(source, port.address)
        self.clock.call(latency, self.word_found, WordLookup(port, op, source, index, latency))

    def word_found(self, lookup: WordLookup) -> None:
        words = self.word_values.get(lookup.source)
        value = None if words is None else words.get(lookup.number)
        self.clock.call(lookup.latency_ns, self.arrived, (lookup.port, WordRead(lookup.op, value)))

    # One-sided operations.

    def write(self, port: SimPort, effect: PostWrite, request: int) -> None:
        route = self.paths.route(port.address, effect.to)
        target = self.ports[effect.to]
        self.post(effect, port, port, target, route, request)

    def read(self, port: SimPort, effect: PostRead, request: int) -> None:
        route = self.paths.route(effect.source, port.address)
        source = self.ports[effect.source]
        self.post(effect, port, source, port, route, request)

    def copy(self, port: SimPort, path: PathId, nbytes: int, latency_ns: int, then: Callable[[bool], None]) -> None:
        """Begin a copy between a GPU and its host, or within a GPU."""
        self.clock.call(latency_ns, self.begin_copy, copy_of(port, path, nbytes, self.posted, then))

    def begin_copy(self, flight: Flight) -> None:
        self.flow(flight, flight.nbytes)

    def post(
        self, effect: PostWrite | PostRead, lane: SimPort, p_port: SimPort, d_port: SimPort, route: Route, request: int
    ) -> None:
        now = self.clock.now
        self.posted = number = self.posted + 1
        registration = effect.registration
        flight = Flight(
            op=effect.op,
            request=request,
            p_port=p_port,
            d_port=d_port,
            path=route.path,
            rails=route.rails,
            wire_latency=self.latency_ns(route, number),
            nbytes=effect.nbytes,
            notification=effect.notification,
            generation=registration.target.generation,
            number=number,
            reads=type(effect) is PostRead,
            then=None,
        )
        before_ns = self.count_messages(flight) if self.wire_profile.messages else 0
        if self.carry is not None:
            self.carry(effect, flight, route, before_ns)
            return
        if self.closing and not flight.reads:
            flight.wire_latency += self.closing_ns
        blocks = effect.source.blocks if isinstance(effect, PostWrite) else effect.blocks
        cost_ns = route.post_ns(registration.num_tokens, route.joints(blocks, registration))
        self.metrics.records.ends[HANDSHAKE][request] = now
        if not cost_ns and not before_ns:
            self.begin(flight)
            return
        self.clock.call(self.occupy(lane, cost_ns) + before_ns, self.begin, flight)

    def latency_ns(self, route: Route, number: int) -> int:
        """Return the latency of the operation of this number."""
        mean, ppm = route.latency_ns, self.noise_ppm
        return varied(mean, ppm, number) if ppm else mean

    def occupy(self, lane: SimPort, cost_ns: int) -> int:
        """Post something on the lane of the rank that is free first; return in how many ns it is posted."""
        now, lanes = self.clock.now, lane.lanes_free
        first = min(lanes)
        posted = lanes[lanes.index(first)] = max(now, first) + cost_ns
        self.posting_ns[lane.address] = self.posting_ns.get(lane.address, 0) + cost_ns
        if lane.node.posts_on_engine:
            lane.node.post_until(posted)
        return posted - now

    def count_messages(self, flight: Flight) -> int:
        """Count the messages before an operation's first byte and behind its last; return how long the former take, in
        ns.
        """
        if not flight.reads:
            self.messages += len(self.closing)
        if flight.reads != self.pulls:
            return 0
        self.messages += len(self.requesting)
        if self.metrics.trace_line is not None:
            for message in self.requesting:
                self.trace_send(flight, message)
        return self.requesting_ns

    def trace_send(self, flight: Flight, message: ProfileMessage, what: str = "") -> None:
        """Trace that one of the two ranks sends this message."""
        by, to = (flight.p_port, flight.d_port) if message.by is Side.P else (flight.d_port, flight.p_port)
        assert self.metrics.trace_line is not None
        self.metrics.trace_line(by.address, f"sends {message.name}{what}: {to.address}")

    def begin(self, flight: Flight) -> None:
        """Start to move the bytes of an operation that has been posted."""
        self.metrics.records.ends[XFER_POST][flight.request] = self.clock.now
        self.flow(flight, flight.nbytes)

    def flow(self, flight: Flight, nbytes: int) -> None:
        """Start flows for so many bytes of an operation."""
        if flight.path is not None:
            self.flows[self.network.start(flight.path, nbytes, self.clock.now)] = flight
        elif flight.rails is not None:
            for path, share in flight.rails.deal(nbytes):
                flow = self.network.start(path, share, self.clock.now)
                self.flows[flow] = flight
                flight.shares[flow] = (path, share)
        else:
            self.depart(flight)
            return
        self.arm()

    def arm(self) -> None:
        at = self.network.wake_at()
        if at is not None and at < self.armed:
            self.armed = at
            self.clock.call(at - self.clock.now, self.ring, at)

    def ring(self, at: Instant) -> None:
        if self.armed != at:
            return
        self.armed = FAR
        for flow in self.network.advance(self.clock.now):
            flight = self.flows.pop(flow)
            if flight.rails is None or not flight.others(flow):
                self.depart(flight)
        self.arm()

    def depart(self, flight: Flight) -> None:
        """Land an operation whose last byte has left, one latency later."""
        if flight.wire_latency:
            self.clock.call(flight.wire_latency, self.land, flight)
        else:
            self.land(flight)

    def fail(self, flight: Flight) -> None:
        """End an operation without success: its handle reports that; there is no notification."""
        if flight.then is not None:
            flight.then(False)
            return
        if flight.reads:
            flight.d_port.node.receive(flight.d_port, ReadEnded(flight.op, False))
        else:
            flight.p_port.node.receive(flight.p_port, WriteEnded(flight.op, False))

    def land(self, flight: Flight) -> None:
        """End an operation whose last byte has arrived: it fails if a fence stopped it."""
        if (self.fences and self.barred(flight)) or (self.fails is not None and self.fails(flight.op)):
            self.fail(flight)
        else:
            self.settle(flight)

    def settle(self, flight: Flight) -> None:
        """Report to both sides that all of an operation has landed."""
        if flight.then is not None:
            flight.then(True)
            return
        op, p_port, d_port = flight.op, flight.p_port, flight.d_port
        self.count_landed(flight)
        if flight.reads:
            if flight.notification is not None:
                p_port.node.receive(p_port, Received(d_port.address, d_port.incarnation, flight.notification))
            d_port.node.receive(d_port, ReadEnded(op, True))
            return
        if flight.notification is not None:
            d_port.node.receive(d_port, Received(p_port.address, p_port.incarnation, flight.notification))
        p_port.node.receive(p_port, WriteEnded(op, True))

    def count_landed(self, flight: Flight) -> None:
        """Count an operation that has landed, for the result."""
        metrics = self.metrics
        metrics.records.ends[XFER_WIRE][flight.request] = self.clock.now
        totals = metrics.totals
        totals.bytes_moved += flight.nbytes
        totals.transfers += 1
