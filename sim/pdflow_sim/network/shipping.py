"""How operations of a method are carried that go in pieces, over several hops, or a few at a time.

Which piece a rank posts next, and what a stop still cuts, says `pdflow.methods.lanes`; this carries what is posted: it
takes its turn at the other rank, is announced if the method asks, and passes its hops one after the other. What its
operation comes to is told as if it had been one: by `Fabric.land` and `Fabric.fail`.

The other rank's turns are no rule of who posts: D takes in so many pieces of what it is sent, and P serves so many of
what is fetched from it, in the order in which they come.

What becomes of a piece that does not land is `pdflow.methods.guards`' to say. One that is waited for without end stands
still, with the lanes that it has, until its request has ended: a deadline is ours, the originals have none.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

from pdflow.cost.step import PS_PER_NS
from pdflow.layout.shapes import stage_layers
from pdflow.methods.guards import Loss, loss_of
from pdflow.methods.lanes import Lanes, lane_rules
from pdflow.methods.method import Hop, Method, PipelinePolicy
from pdflow.methods.pages import misplaced
from pdflow.methods.shipment import Piece, ShipmentEnd
from pdflow.methods.wire_profile import Occasion
from pdflow.protocol.effects import PostRead, PostWrite
from pdflow.protocol.events import WriteStopped
from pdflow.protocol.ids import Op, engine_of, rank_of
from pdflow.protocol.values import Address, RequestId, Xid
from pdflow.results.records import HANDSHAKE
from pdflow_sim.network.fabric import Fabric
from pdflow_sim.network.flight import Flight, Then
from pdflow_sim.network.paths import Route
from pdflow_sim.nodes.node import SimNode, SimPort


class PieceQueue:
    """What a rank takes in, or serves: so many pieces at a time; what comes later waits in turn."""

    __slots__ = ("free", "waiting")

    def __init__(self, width: int) -> None:
        self.free = width
        self.waiting: deque[PieceInFlight] = deque()

    def enter(self, in_flight: PieceInFlight) -> None:
        if self.free:
            self.free -= 1
            in_flight.go_on()
        else:
            self.waiting.append(in_flight)

    def leave(self) -> None:
        if self.waiting:
            self.waiting.popleft().go_on()
        else:
            self.free += 1


class ShippedOperation:
    """One operation under way."""

    __slots__ = ("flight", "lanes", "layers", "over", "parked", "route", "tokens", "xid")

    def __init__(
        self, flight: Flight, route: Route, xid: Xid, layers: int, tokens: int, lanes: Lanes[ShippedOperation]
    ) -> None:
        self.flight = flight
        """The operation as a whole: what is told of its end."""
        self.route = route
        self.xid = xid
        self.layers = layers
        self.tokens = tokens
        self.lanes = lanes
        """Of the rank that posts it."""
        self.parked: list[PieceInFlight] = []
        """Pieces that stand still."""
        self.over = False
        """Its request has ended: nothing of it is waited for."""


class PieceInFlight:
    """One piece on its way: it has been posted."""

    __slots__ = ("nbytes", "operation", "piece", "queue", "shipping", "stages")

    def __init__(self, shipping: Shipping, operation: ShippedOperation, piece: Piece, nbytes: int) -> None:
        self.shipping = shipping
        self.operation = operation
        self.piece = piece
        self.nbytes = nbytes
        self.stages: deque[Any] = deque(shipping.stages)
        """What it still has to go through: PEER, ASK and the like, or a hop."""
        self.queue: PieceQueue | None = None
        """In which it has, or waits for, its turn at the other rank."""

    def go_on(self, _: None = None) -> None:
        """Through the next stage, or to the end. The dead begin nothing."""
        shipping, flight = self.shipping, self.operation.flight
        if not (flight.d_port if flight.reads else flight.p_port).node.alive:
            shipping.clock.call(0, shipping.lost, self)
            return
        if not self.stages:
            shipping.arrived(self)
            return
        stage = self.stages.popleft()
        if type(stage) is str:
            shipping.turn(self, stage)
        else:
            shipping.hop(self, stage)

    def ended(self, ok: bool) -> None:
        """A hop is done."""
        if ok:
            self.go_on()
        else:
            self.shipping.lost(self)


PEER, ASK, ROOM, BEHIND = "peer", "ask", "room", "behind"
PICKLE, UNPICKLE = "pickle", "unpickle"
UNNAMED = 2
"""An announcement and its answer, where the method has no words of its own for them."""


class Shipping:
    """Args: method and conduct of the scenario; bytes of a token's hidden states; what a thread pickles."""

    def __init__(
        self,
        fabric: Fabric,
        method: Method,
        pipeline_policy: PipelinePolicy,
        hidden_bytes: int,
        pickle_bytes_per_s: int,
    ) -> None:
        self.fabric = fabric
        fabric.carry = self.post
        self.clock = fabric.clock
        self.metrics = fabric.metrics
        self.method = method
        self.pipeline_policy = pipeline_policy
        self.operations: dict[Op, ShippedOperation] = {}
        self.rules = lane_rules(method, pipeline_policy)
        self.lanes: dict[Address, Lanes[ShippedOperation]] = {}
        """Of each rank that posts."""
        self.queues: dict[Address, PieceQueue] = {}
        """Of each rank that takes in, or serves."""
        self.evicted: set[tuple[Address, Xid]] = set()
        """What P has no more of what D may ask for and then goes without."""
        self.standing: dict[ShippedOperation, None] = {}
        """Of which pieces stand still."""
        self.deaf: set[Address] = set()
        """D ranks whose listener has ended."""
        self.misplaces = not pipeline_policy.guards.indexes_by_piece
        self.takes_in_pieces = method.takes_in_pieces(pipeline_policy)
        self.peer_lanes = pipeline_policy.sending_lanes if method.pulls else pipeline_policy.receiving_lanes
        """How many pieces the rank that does not post has in hand at once."""
        stages: list[Any] = [] if self.peer_lanes is None else [PEER]
        self.asking, self.behind = (
            pipeline_policy.wire_profile.besides(Occasion.PIECE),
            pipeline_policy.wire_profile.besides(Occasion.BEHIND),
        )
        self.asks = len(self.asking) or UNNAMED * pipeline_policy.asks
        """Messages before each piece."""
        wire: list[Any] = [stage for stage, is_there in self.around() if is_there]
        self.hidden_bytes = hidden_bytes if pipeline_policy.hidden_states else 0
        self.pickle_bytes_per_s = pickle_bytes_per_s
        for hop in method.hops * pipeline_policy.tensors:
            stages += wire if hop is Hop.WIRE else [hop]
        self.stages = tuple(stages)

    def around(self) -> list[tuple[Any, bool]]:
        """What a piece goes through on its way from NIC to NIC."""
        pickles = self.pipeline_policy.pickles
        before = [(PICKLE, pickles), (ASK, bool(self.asks)), (ROOM, self.takes_in_pieces)]
        return [*before, (Hop.WIRE, True), (BEHIND, bool(self.behind)), (UNPICKLE, pickles)]

    def layers_of(self, rank: Address) -> range:
        """The layers that a P rank has KV of."""
        pool = self.fabric.paths.pool_of[engine_of(rank)]
        shape = self.fabric.paths.shapes[pool.name]
        return stage_layers(shape.num_layers, pool.pp)[rank_of(rank) // pool.tp]

    # Operations.

    def lanes_of(self, rank: Address) -> Lanes[ShippedOperation]:
        lanes = self.lanes.get(rank)
        if lanes is None:
            lanes = self.lanes[rank] = Lanes(self.rules)
        return lanes

    def post(self, effect: PostWrite | PostRead, flight: Flight, route: Route, before_ns: int) -> None:
        """An operation begins: what can be sent of it is, when what is said before it has been."""
        registration = effect.registration
        start, tokens = registration.token_start, registration.num_tokens
        layers = len(self.layers_of(flight.p_port.address)) if self.method.in_pieces else 1
        lanes = self.lanes_of(flight.mover.address)
        operation = self.operations[effect.op] = ShippedOperation(
            flight, route, registration.xid, layers, tokens, lanes
        )
        self.metrics.records.ends[HANDSHAKE][flight.request] = self.clock.now
        lanes.add(operation, registration.xid, layers, start, start + tokens, reads=flight.reads)
        if before_ns:
            self.clock.call(before_ns, self.begin, operation)
        else:
            self.begin(operation)

    def begin(self, operation: ShippedOperation) -> None:
        operation.lanes.begin(operation)
        self.pump(operation.lanes)

    def offer(self, rank: Address, xid: Xid, piece: Piece) -> None:
        """A P rank can send this from now on."""
        lanes = self.lanes_of(rank)
        lanes.offer(xid, piece)
        self.pump(lanes)

    def withdraw(self, rank: Address, xid: Xid) -> None:
        """It has nothing of this prompt any more."""
        if self.method.pulls and not self.pipeline_policy.guards.invalidates_lost:
            self.evicted.add((rank, xid))
        self.lanes_of(rank).withdraw(xid)

    def stop(self, op: Op) -> None:
        operation = self.operations.get(op)
        if operation is not None:
            operation.lanes.halt(operation)
            self.give_up(operation)

    def ended(self, request_id: RequestId) -> None:
        """D waits for nothing of this request any more."""
        for operation in list(self.standing):
            if operation.flight.op.reg.request_id == request_id:
                self.give_up(operation)

    def died(self, node: SimNode) -> None:
        """Whoever stood still for this engine's listener goes on, and its next life listens again. A dead sender's turn
        is over."""
        self.deaf -= node.ports.keys()
        for operation in list(self.standing):
            if operation.flight.d_port.node is node:
                self.give_up(operation)
            elif operation.flight.p_port.node is node:
                for in_flight in operation.parked:
                    self.sender_gone(in_flight)

    def give_up(self, operation: ShippedOperation) -> None:
        """Nobody waits for what stands still of it."""
        operation.over = True
        self.standing.pop(operation, None)
        parked, operation.parked = operation.parked, []
        for in_flight in parked:
            self.leave(in_flight)
            operation.lanes.lost(operation, in_flight.piece)
        self.finish_if_ended(operation)

    def pump(self, lanes: Lanes[ShippedOperation]) -> None:
        """Send what may be posted now."""
        while (found := lanes.next()) is not None:
            operation, piece = found
            piece_tokens = piece.stop - piece.start
            nbytes = (
                operation.flight.nbytes * piece_tokens // (operation.layers * operation.tokens)
                + self.hidden_bytes * piece_tokens
            )
            PieceInFlight(self, operation, piece, nbytes // self.pipeline_policy.tensors).go_on()

    def finish_if_ended(self, operation: ShippedOperation) -> None:
        """Something of it has ended: post what has a lane now, and tell how the operation ended, if it has."""
        ending = operation.lanes.ending(operation)
        self.pump(operation.lanes)
        if ending is None:
            return
        flight = operation.flight
        if self.operations.get(flight.op) is operation:
            del self.operations[flight.op]
        fabric = self.fabric
        if ending is ShipmentEnd.SENT and fabric.closing and not flight.reads:
            self.clock.call(fabric.closing_ns, fabric.land, flight)
        elif ending is ShipmentEnd.SENT:
            fabric.land(flight)
        elif ending is ShipmentEnd.FAILED:
            fabric.fail(flight)
        else:
            flight.p_port.node.receive(flight.p_port, WriteStopped(flight.op))

    # Pieces.

    def turn(self, in_flight: PieceInFlight, stage: str) -> None:
        flight = in_flight.operation.flight
        if stage == ASK:
            self.ask(in_flight)
            return
        if stage == BEHIND:
            self.send_behind(in_flight)
            in_flight.go_on()
            return
        if stage == ROOM:
            self.take_in(in_flight)
            return
        if stage in (PICKLE, UNPICKLE):
            port = flight.p_port if stage == PICKLE else flight.d_port
            path = self.fabric.paths.thread(port.address, stage, self.pickle_bytes_per_s)
            self.fabric.copy(port, path, in_flight.nbytes, 0, in_flight.ended)
            return
        rank = flight.p_port if flight.reads else flight.d_port
        queue = self.queues.get(rank.address)
        if queue is None:
            assert self.peer_lanes is not None
            queue = self.queues[rank.address] = PieceQueue(self.peer_lanes)
        in_flight.queue = queue
        queue.enter(in_flight)

    def hop(self, in_flight: PieceInFlight, hop: Hop) -> None:
        flight = in_flight.operation.flight
        if self.metrics.trace_line is not None:
            self.trace_hop(in_flight, hop)
        if hop is Hop.WIRE and (flight.p_port.address, in_flight.operation.xid) in self.evicted:
            self.lost(in_flight)
        elif hop is Hop.WIRE:
            self.send(in_flight)
        elif hop is Hop.D2H and self.pipeline_policy.in_stream:
            self.clock.call(flight.p_port.node.left_of_step(), self.copy_out, in_flight)
        else:
            self.copy(flight.p_port if hop is Hop.D2H else flight.d_port, hop, in_flight.nbytes, in_flight.ended)

    def ask(self, in_flight: PieceInFlight) -> None:
        """Announce it, and have that answered."""
        fabric, flight = self.fabric, in_flight.operation.flight
        fabric.messages += self.asks
        if self.metrics.trace_line is not None and self.asking:
            fabric.trace_send(
                flight, self.asking[0], f" of {describe_piece(in_flight.piece, in_flight.operation.layers)}"
            )
        self.clock.call(self.asks * fabric.control_ns, in_flight.go_on, None)

    def send_behind(self, in_flight: PieceInFlight) -> None:
        fabric, flight = self.fabric, in_flight.operation.flight
        fabric.messages += len(self.behind)
        if self.metrics.trace_line is not None:
            for message in self.behind:
                fabric.trace_send(flight, message)

    def trace_hop(self, in_flight: PieceInFlight, hop: Hop) -> None:
        """Say what this piece does next."""
        flight, trace_line = in_flight.operation.flight, self.metrics.trace_line
        assert trace_line is not None
        what = f"{describe_piece(in_flight.piece, in_flight.operation.layers)}, {hop.value}"
        if hop is Hop.WIRE:
            for message in self.asking[1:]:
                self.fabric.trace_send(flight, message)
            ask = "announces and sends" if self.asks and not self.asking else "sends"
            verb = "fetches" if flight.reads else ask
            by, other = (flight.d_port, flight.p_port) if flight.reads else (flight.p_port, flight.d_port)
            trace_line(
                by.address, f"{verb} {describe_piece(in_flight.piece, in_flight.operation.layers)}: {other.address}"
            )
        else:
            trace_line((flight.p_port if hop is Hop.D2H else flight.d_port).address, f"copies {what}")

    def copy_out(self, in_flight: PieceInFlight) -> None:
        self.copy(in_flight.operation.flight.p_port, Hop.D2H, in_flight.nbytes, in_flight.ended)

    def copy(self, port: SimPort, hop: Hop, nbytes: int, then: Then) -> None:
        """A copy on one host."""
        if port.node.in_host_memory:
            then(True)
            return
        paths = self.fabric.paths
        if hop is Hop.D2D:
            path = paths.copy(port.address)
        else:
            path = paths.lane(port.address, "d2h" if hop is Hop.D2H else "h2d")
        self.fabric.copy(port, path, nbytes, paths.copy_ns(port.address), then)

    def send(self, in_flight: PieceInFlight) -> None:
        """Post a piece between the NICs."""
        operation, fabric = in_flight.operation, self.fabric
        whole = operation.flight
        fabric.posted = number = fabric.posted + 1
        flight = whole.piece(in_flight.nbytes, number, in_flight.ended)
        lane = whole.mover
        now, cost_ns = self.clock.now, self.post_ns(operation, in_flight)
        lane.lane_free = max(now, lane.lane_free) + cost_ns
        self.clock.call(lane.lane_free - now, fabric.begin, flight)

    def post_ns(self, operation: ShippedOperation, in_flight: PieceInFlight) -> int:
        """Parts of staging memory are contiguous: one descriptor each, or one for each page. Blocks of one layer are a
        layer's share."""
        piece, page_bytes = in_flight.piece, self.pipeline_policy.page_bytes
        if self.method.staged_at_p and self.method.staged_at_d:
            pages = -(-in_flight.nbytes // page_bytes) if page_bytes else 0
            return operation.route.post_ns(0) + -(-pages * operation.route.per_descriptor_ps // PS_PER_NS)
        return operation.route.post_ns(piece.stop - piece.start) // operation.layers

    def take_in(self, in_flight: PieceInFlight) -> None:
        """D finds room for it, or it waits there in turn; or D's listener refuses it, or ends."""
        flight, piece = in_flight.operation.flight, in_flight.piece
        node, rank = flight.d_port.node, flight.d_port.address
        piece = Piece(self.layers_of(flight.p_port.address)[piece.layer], piece.start, piece.stop)
        if not node.refuses_pieces:
            self.park(in_flight)
            if not in_flight.operation.over:
                node.await_room(rank, flight.generation, piece, partial(self.unpark, in_flight))
            return
        if rank not in self.deaf:
            if node.takes_piece(rank, flight.generation, piece):
                in_flight.go_on()
                return
            if self.pipeline_policy.guards.survives_exhaustion:
                self.lost(in_flight)
                return
            self.deaf.add(rank)
            self.metrics.count("a listener has ended")
        self.park(in_flight)

    def arrived(self, in_flight: PieceInFlight) -> None:
        self.leave(in_flight)
        operation = in_flight.operation
        if self.misplaces and misplaced(in_flight.piece, self.pipeline_policy.guards):
            self.mark_corrupted(operation)
        operation.lanes.landed(operation, in_flight.piece)
        self.finish_if_ended(operation)

    def lost(self, in_flight: PieceInFlight) -> None:
        operation = in_flight.operation
        sender, receiver = operation.flight.p_port.node, operation.flight.d_port.node
        loss = loss_of(self.pipeline_policy.guards, not sender.alive) if receiver.alive else Loss.ENDS
        if loss is Loss.AWAITED:
            self.sender_gone(in_flight)
            self.park(in_flight)
            return
        self.leave(in_flight)
        if loss is Loss.SKIPPED:
            self.mark_corrupted(operation)
            operation.lanes.landed(operation, in_flight.piece)
        else:
            operation.lanes.lost(operation, in_flight.piece)
        self.finish_if_ended(operation)

    def park(self, in_flight: PieceInFlight) -> None:
        """It stands still, unless nobody waits for it."""
        operation = in_flight.operation
        operation.parked.append(in_flight)
        self.standing[operation] = None
        if operation.over:
            self.give_up(operation)

    def unpark(self, in_flight: PieceInFlight) -> None:
        """There is room for it."""
        operation = in_flight.operation
        if in_flight in operation.parked:
            operation.parked.remove(in_flight)
            if not operation.parked:
                self.standing.pop(operation, None)
            in_flight.go_on()

    def mark_corrupted(self, operation: ShippedOperation) -> None:
        """D will decode with other KV than its prompt's, and not know."""
        self.metrics.corrupted.add(operation.flight.op.reg.request_id)

    def sender_gone(self, in_flight: PieceInFlight) -> None:
        """Its sender's turn is over with its sender. Its receiver's is not."""
        operation = in_flight.operation
        if operation.flight.reads:
            self.leave(in_flight)
        else:
            operation.lanes.release_lane(operation, in_flight.piece)
            self.pump(operation.lanes)

    def leave(self, in_flight: PieceInFlight) -> None:
        """Its turn at the other rank is over."""
        queue, in_flight.queue = in_flight.queue, None
        if queue is not None:
            queue.leave()


def describe_piece(piece: Piece, layers: int) -> str:
    """A piece, as a person says it."""
    which = f"layer {piece.layer}" if layers > 1 else "all layers"
    return f"{which}, tokens {piece.start} to {piece.stop}"
