"""Carries operations that go in pieces, over several hops, or a few at a time.

`pdflow.methods.lanes` decides which piece a rank posts next, and what a stop still cuts; this module carries what is
posted: a piece takes its turn at the other rank, is announced if the method asks for it, and passes its hops one after
the other (`piece_hops`). The end of its operation is reported as that of an operation without pieces: by `Fabric.land`
and `Fabric.fail`.

The turns at the other rank are no rule of the rank that posts: D takes in so many pieces of what it is sent, and P
serves so many of what is fetched from it, in the order in which they come.

`pdflow.methods.guards` decides what becomes of a piece that does not land. One that is waited for without end stands
still, with the lanes that it has, until its request has ended: a deadline is pdflow's, the original systems have none.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from pdflow.layout.shapes import stage_layers
from pdflow.methods.guards import Loss, loss_of
from pdflow.methods.lanes import Lanes, lane_rules
from pdflow.methods.method import Hop, Method, PipelinePolicy
from pdflow.methods.pages import misplaced
from pdflow.methods.shipment import Piece, ShipmentEnd
from pdflow.protocol.effects import PostRead, PostWrite
from pdflow.protocol.events import WriteStopped
from pdflow.protocol.ids import Op, engine_of, rank_of
from pdflow.protocol.values import Address, RequestId, Xid
from pdflow.results.records import HANDSHAKE
from pdflow_sim.network.fabric import Fabric
from pdflow_sim.network.flight import Flight
from pdflow_sim.network.paths import Route
from pdflow_sim.network.piece_hops import PieceHops
from pdflow_sim.network.shipped_pieces import PieceCarrier, PieceInFlight, PieceQueue, ShippedOperation
from pdflow_sim.nodes.node import SimNode

PEER, ASK, ROOM, BEHIND = "peer", "ask", "room", "behind"
PICKLE, UNPICKLE = "pickle", "unpickle"


class Shipping(PieceCarrier):
    """The carrier of a method's operations. Args: `method` and `pipeline_policy` of the scenario; `hidden_bytes`: a
    token's hidden states; `pickle_bytes_per_s`: how fast a thread pickles.
    """

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
        """The lanes of each rank that posts."""
        self.queues: dict[Address, PieceQueue] = {}
        """The queue of each rank that takes in, or serves."""
        self.evicted: set[tuple[Address, Xid]] = set()
        """Prompts that P has no more, for which D may still ask and which it then goes without, by P rank."""
        self.standing: dict[ShippedOperation, None] = {}
        """Operations of which pieces stand still."""
        self.deaf: set[Address] = set()
        """D ranks whose listener has ended."""
        self.misplaces = not pipeline_policy.guards.indexes_by_piece
        self.takes_in_pieces = method.takes_in_pieces(pipeline_policy)
        self.peer_lanes = pipeline_policy.sending_lanes if method.pulls else pipeline_policy.receiving_lanes
        """How many pieces the rank that does not post has in hand at once."""
        stages: list[Any] = [] if self.peer_lanes is None else [PEER]
        self.hops = PieceHops(fabric, method, pipeline_policy)
        wire: list[Any] = [stage for stage, is_there in self.around() if is_there]
        self.hidden_bytes = hidden_bytes if pipeline_policy.hidden_states else 0
        self.pickle_bytes_per_s = pickle_bytes_per_s
        for hop in method.hops * pipeline_policy.tensors:
            stages += wire if hop is Hop.WIRE else [hop]
        self.stages = tuple(stages)

    def around(self) -> list[tuple[Any, bool]]:
        """Return the stages of a piece on its way from NIC to NIC, and whether each is there."""
        pickles = self.pipeline_policy.pickles
        before = [(PICKLE, pickles), (ASK, bool(self.hops.asks)), (ROOM, self.takes_in_pieces)]
        return [*before, (Hop.WIRE, True), (BEHIND, bool(self.hops.behind)), (UNPICKLE, pickles)]

    def layers_of(self, rank: Address) -> range:
        """Return the layers of which a P rank has KV."""
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
        """Begin an operation: send what can be sent of it, behind the messages that come before it."""
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
        """Let a P rank send this piece from now on."""
        lanes = self.lanes_of(rank)
        lanes.offer(xid, piece)
        self.pump(lanes)

    def withdraw(self, rank: Address, xid: Xid) -> None:
        """Withdraw a prompt of which the rank has nothing any more."""
        if self.method.pulls and not self.pipeline_policy.guards.invalidates_lost:
            self.evicted.add((rank, xid))
        self.lanes_of(rank).withdraw(xid)

    def stop(self, op: Op) -> None:
        operation = self.operations.get(op)
        if operation is not None:
            operation.lanes.halt(operation)
            self.give_up(operation)

    def ended(self, request_id: RequestId) -> None:
        """Give up what stands still of a request for which D no longer waits."""
        for operation in list(self.standing):
            if operation.flight.op.reg.request_id == request_id:
                self.give_up(operation)

    def died(self, node: SimNode) -> None:
        """Handle the death of an engine. Pieces that stood still for its listener are given up, and its next
        incarnation listens again; the turn of pieces that it was sending is over.
        """
        self.deaf -= node.ports.keys()
        for operation in list(self.standing):
            if operation.flight.d_port.node is node:
                self.give_up(operation)
            elif operation.flight.p_port.node is node:
                for in_flight in operation.parked:
                    self.sender_gone(in_flight)

    def give_up(self, operation: ShippedOperation) -> None:
        """Drop the pieces that stand still of an operation that is no longer waited for."""
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
        """Post what has a lane now that something of this operation has ended, and report the operation's end, if it
        has ended.
        """
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
            self.hops.ask(in_flight)
            return
        if stage == BEHIND:
            self.hops.send_behind(in_flight)
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
        if self.metrics.trace_line is not None:
            self.hops.trace(in_flight, hop)
        if hop is Hop.WIRE and (in_flight.operation.flight.p_port.address, in_flight.operation.xid) in self.evicted:
            self.lost(in_flight)
        else:
            self.hops.start(in_flight, hop)

    def take_in(self, in_flight: PieceInFlight) -> None:
        """Take in a piece if D has room. If not, it waits in turn; or D's listener refuses it, or ends."""
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
        """Let a piece stand still, unless its operation is no longer waited for."""
        operation = in_flight.operation
        operation.parked.append(in_flight)
        self.standing[operation] = None
        if operation.over:
            self.give_up(operation)

    def unpark(self, in_flight: PieceInFlight) -> None:
        """Let a piece go on for which there is room now."""
        operation = in_flight.operation
        if in_flight in operation.parked:
            operation.parked.remove(in_flight)
            if not operation.parked:
                self.standing.pop(operation, None)
            in_flight.go_on()

    def mark_corrupted(self, operation: ShippedOperation) -> None:
        """Note that D will decode with other KV than its prompt's, and not know."""
        self.metrics.corrupted.add(operation.flight.op.reg.request_id)

    def sender_gone(self, in_flight: PieceInFlight) -> None:
        """End a piece's turn at a sender that has died. Its turn at the receiver goes on."""
        operation = in_flight.operation
        if operation.flight.reads:
            self.leave(in_flight)
        else:
            operation.lanes.release_lane(operation, in_flight.piece)
            self.pump(operation.lanes)

    def leave(self, in_flight: PieceInFlight) -> None:
        """End a piece's turn at the other rank."""
        queue, in_flight.queue = in_flight.queue, None
        if queue is not None:
            queue.leave()
