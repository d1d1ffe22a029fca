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

    def enter(self, parcel: PieceInFlight) -> None:
        if self.free:
            self.free -= 1
            parcel.go_on()
        else:
            self.waiting.append(parcel)

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

    __slots__ = ("nbytes", "order", "piece", "queue", "shipping", "stages")

    def __init__(self, shipping: Shipping, order: ShippedOperation, piece: Piece, nbytes: int) -> None:
        self.shipping = shipping
        self.order = order
        self.piece = piece
        self.nbytes = nbytes
        self.stages: deque[Any] = deque(shipping.stages)
        """What it still has to go through: PEER, ASK and the like, or a hop."""
        self.queue: PieceQueue | None = None
        """In which it has, or waits for, its turn at the other rank."""

    def go_on(self, _: None = None) -> None:
        """Through the next stage, or to the end. The dead begin nothing."""
        shipping, flight = self.shipping, self.order.flight
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
        self.orders: dict[Op, ShippedOperation] = {}
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
        self.serves = pipeline_policy.sending_lanes if method.pulls else pipeline_policy.receiving_lanes
        """How many pieces the rank that does not post has in hand at once."""
        stages: list[Any] = [] if self.serves is None else [PEER]
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
        grant = effect.grant
        start, tokens = grant.token_start, grant.num_tokens
        layers = len(self.layers_of(flight.p_port.address)) if self.method.in_pieces else 1
        lanes = self.lanes_of(flight.mover.address)
        order = self.orders[effect.op] = ShippedOperation(flight, route, grant.xid, layers, tokens, lanes)
        self.metrics.records.ends[HANDSHAKE][flight.request] = self.clock.now
        lanes.add(order, grant.xid, layers, start, start + tokens, reads=flight.reads)
        if before_ns:
            self.clock.call(before_ns, self.begin, order)
        else:
            self.begin(order)

    def begin(self, order: ShippedOperation) -> None:
        order.lanes.begin(order)
        self.pump(order.lanes)

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
        order = self.orders.get(op)
        if order is not None:
            order.lanes.halt(order)
            self.give_up(order)

    def ended(self, request_id: RequestId) -> None:
        """D waits for nothing of this request any more."""
        for order in list(self.standing):
            if order.flight.op.reg.request_id == request_id:
                self.give_up(order)

    def died(self, node: SimNode) -> None:
        """Whoever stood still for this engine's listener goes on, and its next life listens again. A dead sender's turn
        is over."""
        self.deaf -= node.ports.keys()
        for order in list(self.standing):
            if order.flight.d_port.node is node:
                self.give_up(order)
            elif order.flight.p_port.node is node:
                for parcel in order.parked:
                    self.sender_gone(parcel)

    def give_up(self, order: ShippedOperation) -> None:
        """Nobody waits for what stands still of it."""
        order.over = True
        self.standing.pop(order, None)
        parked, order.parked = order.parked, []
        for parcel in parked:
            self.leave(parcel)
            order.lanes.lost(order, parcel.piece)
        self.judge(order)

    def pump(self, lanes: Lanes[ShippedOperation]) -> None:
        """Send what may be posted now."""
        while (found := lanes.next()) is not None:
            order, piece = found
            part = piece.stop - piece.start
            nbytes = order.flight.nbytes * part // (order.layers * order.tokens) + self.hidden_bytes * part
            PieceInFlight(self, order, piece, nbytes // self.pipeline_policy.tensors).go_on()

    def judge(self, order: ShippedOperation) -> None:
        """Something of it has ended: post what has a lane now, and tell how the operation ended, if it has."""
        ending = order.lanes.ending(order)
        self.pump(order.lanes)
        if ending is None:
            return
        flight = order.flight
        if self.orders.get(flight.op) is order:
            del self.orders[flight.op]
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

    def turn(self, parcel: PieceInFlight, stage: str) -> None:
        flight = parcel.order.flight
        if stage == ASK:
            self.ask(parcel)
            return
        if stage == BEHIND:
            self.say_behind(parcel)
            parcel.go_on()
            return
        if stage == ROOM:
            self.take_in(parcel)
            return
        if stage in (PICKLE, UNPICKLE):
            port = flight.p_port if stage == PICKLE else flight.d_port
            path = self.fabric.paths.thread(port.address, stage, self.pickle_bytes_per_s)
            self.fabric.copy(port, path, parcel.nbytes, 0, parcel.ended)
            return
        rank = flight.p_port if flight.reads else flight.d_port
        queue = self.queues.get(rank.address)
        if queue is None:
            assert self.serves is not None
            queue = self.queues[rank.address] = PieceQueue(self.serves)
        parcel.queue = queue
        queue.enter(parcel)

    def hop(self, parcel: PieceInFlight, hop: Hop) -> None:
        flight = parcel.order.flight
        if self.metrics.tell is not None:
            self.tell(parcel, hop)
        if hop is Hop.WIRE and (flight.p_port.address, parcel.order.xid) in self.evicted:
            self.lost(parcel)
        elif hop is Hop.WIRE:
            self.send(parcel)
        elif hop is Hop.D2H and self.pipeline_policy.in_stream:
            self.clock.call(flight.p_port.node.left_of_step(), self.copy_out, parcel)
        else:
            self.copy(flight.p_port if hop is Hop.D2H else flight.d_port, hop, parcel.nbytes, parcel.ended)

    def ask(self, parcel: PieceInFlight) -> None:
        """Announce it, and have that answered."""
        fabric, flight = self.fabric, parcel.order.flight
        fabric.messages += self.asks
        if self.metrics.tell is not None and self.asking:
            fabric.say(flight, self.asking[0], f" of {words(parcel.piece, parcel.order.layers)}")
        self.clock.call(self.asks * fabric.control_ns, parcel.go_on, None)

    def say_behind(self, parcel: PieceInFlight) -> None:
        fabric, flight = self.fabric, parcel.order.flight
        fabric.messages += len(self.behind)
        if self.metrics.tell is not None:
            for word in self.behind:
                fabric.say(flight, word)

    def tell(self, parcel: PieceInFlight, hop: Hop) -> None:
        """Say what this piece does next."""
        flight, tell = parcel.order.flight, self.metrics.tell
        assert tell is not None
        what = f"{words(parcel.piece, parcel.order.layers)}, {hop.value}"
        if hop is Hop.WIRE:
            for word in self.asking[1:]:
                self.fabric.say(flight, word)
            ask = "announces and sends" if self.asks and not self.asking else "sends"
            verb = "fetches" if flight.reads else ask
            by, other = (flight.d_port, flight.p_port) if flight.reads else (flight.p_port, flight.d_port)
            tell(by.address, f"{verb} {words(parcel.piece, parcel.order.layers)}: {other.address}")
        else:
            tell((flight.p_port if hop is Hop.D2H else flight.d_port).address, f"copies {what}")

    def copy_out(self, parcel: PieceInFlight) -> None:
        self.copy(parcel.order.flight.p_port, Hop.D2H, parcel.nbytes, parcel.ended)

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

    def send(self, parcel: PieceInFlight) -> None:
        """Post a piece between the NICs."""
        order, fabric = parcel.order, self.fabric
        whole = order.flight
        fabric.posted = number = fabric.posted + 1
        flight = whole.piece(parcel.nbytes, number, parcel.ended)
        lane = whole.mover
        now, cost_ns = self.clock.now, self.post_ns(order, parcel)
        lane.lane_free = max(now, lane.lane_free) + cost_ns
        self.clock.call(lane.lane_free - now, fabric.begin, flight)

    def post_ns(self, order: ShippedOperation, parcel: PieceInFlight) -> int:
        """Parts of staging memory are contiguous: one descriptor each, or one for each page. Blocks of one layer are a
        layer's share."""
        piece, page_bytes = parcel.piece, self.pipeline_policy.page_bytes
        if self.method.staged_at_p and self.method.staged_at_d:
            pages = -(-parcel.nbytes // page_bytes) if page_bytes else 0
            return order.route.post_ns(0) + -(-pages * order.route.per_descriptor_ps // PS_PER_NS)
        return order.route.post_ns(piece.stop - piece.start) // order.layers

    def take_in(self, parcel: PieceInFlight) -> None:
        """D finds room for it, or it waits there in turn; or D's listener refuses it, or ends."""
        flight, piece = parcel.order.flight, parcel.piece
        node, rank = flight.d_port.node, flight.d_port.address
        piece = Piece(self.layers_of(flight.p_port.address)[piece.layer], piece.start, piece.stop)
        if not node.refuses_pieces:
            self.park(parcel)
            if not parcel.order.over:
                node.await_room(rank, flight.generation, piece, partial(self.unpark, parcel))
            return
        if rank not in self.deaf:
            if node.takes_piece(rank, flight.generation, piece):
                parcel.go_on()
                return
            if self.pipeline_policy.guards.survives_exhaustion:
                self.lost(parcel)
                return
            self.deaf.add(rank)
            self.metrics.count("a listener has ended")
        self.park(parcel)

    def arrived(self, parcel: PieceInFlight) -> None:
        self.leave(parcel)
        order = parcel.order
        if self.misplaces and misplaced(parcel.piece, self.pipeline_policy.guards):
            self.spoil(order)
        order.lanes.landed(order, parcel.piece)
        self.judge(order)

    def lost(self, parcel: PieceInFlight) -> None:
        order = parcel.order
        sender, receiver = order.flight.p_port.node, order.flight.d_port.node
        loss = loss_of(self.pipeline_policy.guards, not sender.alive) if receiver.alive else Loss.ENDS
        if loss is Loss.AWAITED:
            self.sender_gone(parcel)
            self.park(parcel)
            return
        self.leave(parcel)
        if loss is Loss.SKIPPED:
            self.spoil(order)
            order.lanes.landed(order, parcel.piece)
        else:
            order.lanes.lost(order, parcel.piece)
        self.judge(order)

    def park(self, parcel: PieceInFlight) -> None:
        """It stands still, unless nobody waits for it."""
        order = parcel.order
        order.parked.append(parcel)
        self.standing[order] = None
        if order.over:
            self.give_up(order)

    def unpark(self, parcel: PieceInFlight) -> None:
        """There is room for it."""
        order = parcel.order
        if parcel in order.parked:
            order.parked.remove(parcel)
            if not order.parked:
                self.standing.pop(order, None)
            parcel.go_on()

    def spoil(self, order: ShippedOperation) -> None:
        """D will decode with other KV than its prompt's, and not know."""
        self.metrics.corrupted.add(order.flight.op.reg.request_id)

    def sender_gone(self, parcel: PieceInFlight) -> None:
        """Its sender's turn is over with its sender. Its receiver's is not."""
        order = parcel.order
        if order.flight.reads:
            self.leave(parcel)
        else:
            order.lanes.vacate(order, parcel.piece)
            self.pump(order.lanes)

    def leave(self, parcel: PieceInFlight) -> None:
        """Its turn at the other rank is over."""
        queue, parcel.queue = parcel.queue, None
        if queue is not None:
            queue.leave()


def words(piece: Piece, layers: int) -> str:
    """A piece, as a person says it."""
    which = f"layer {piece.layer}" if layers > 1 else "all layers"
    return f"{which}, tokens {piece.start} to {piece.stop}"
