"""The hops of one piece of an operation: copies on a host, posts between NICs, and the messages around them."""

from __future__ import annotations

from pdflow.cost.step import PS_PER_NS
from pdflow.methods.method import Hop, Method, PipelinePolicy
from pdflow.methods.wire_profile import Occasion
from pdflow_sim.network.fabric import Fabric
from pdflow_sim.network.flight import Then
from pdflow_sim.network.shipped_pieces import PieceInFlight, ShippedOperation, describe_piece
from pdflow_sim.nodes.node import SimPort

UNNAMED = 2
"""The messages of an announcement and its answer, where the method has none of its own for them."""


class PieceHops:
    """Starts the hops of pieces. What follows a hop is the piece's own (`PieceInFlight.ended`)."""

    def __init__(self, fabric: Fabric, method: Method, pipeline_policy: PipelinePolicy) -> None:
        self.fabric = fabric
        self.clock = fabric.clock
        self.metrics = fabric.metrics
        self.method = method
        self.pipeline_policy = pipeline_policy
        self.asking = pipeline_policy.wire_profile.besides(Occasion.PIECE)
        self.behind = pipeline_policy.wire_profile.besides(Occasion.BEHIND)
        self.asks = len(self.asking) or UNNAMED * pipeline_policy.asks
        """Messages before each piece."""

    def start(self, in_flight: PieceInFlight, hop: Hop) -> None:
        flight = in_flight.operation.flight
        if hop is Hop.WIRE:
            self.send(in_flight)
        elif hop is Hop.D2H and self.pipeline_policy.in_stream:
            self.clock.call(flight.p_port.node.left_of_step(), self.copy_out, in_flight)
        else:
            self.copy(flight.p_port if hop is Hop.D2H else flight.d_port, hop, in_flight.nbytes, in_flight.ended)

    def ask(self, in_flight: PieceInFlight) -> None:
        """Announce a piece, and wait for the answer."""
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

    def trace(self, in_flight: PieceInFlight, hop: Hop) -> None:
        """Trace what this piece does next."""
        flight, trace_line = in_flight.operation.flight, self.metrics.trace_line
        assert trace_line is not None
        what = describe_piece(in_flight.piece, in_flight.operation.layers)
        if hop is Hop.WIRE:
            for message in self.asking[1:]:
                self.fabric.trace_send(flight, message)
            ask = "announces and sends" if self.asks and not self.asking else "sends"
            verb = "fetches" if flight.reads else ask
            by, other = (flight.d_port, flight.p_port) if flight.reads else (flight.p_port, flight.d_port)
            trace_line(by.address, f"{verb} {what}: {other.address}")
        else:
            trace_line((flight.p_port if hop is Hop.D2H else flight.d_port).address, f"copies {what}, {hop.value}")

    def copy_out(self, in_flight: PieceInFlight) -> None:
        self.copy(in_flight.operation.flight.p_port, Hop.D2H, in_flight.nbytes, in_flight.ended)

    def copy(self, port: SimPort, hop: Hop, nbytes: int, then: Then, queued: bool = False) -> None:
        """Begin a copy on one host. `queued`: it was issued while the one before it was made."""
        if port.node.in_host_memory:
            then(True)
            return
        paths = self.fabric.paths
        if hop is Hop.D2D:
            path = paths.copy(port.address)
        else:
            path = paths.lane(port.address, "d2h" if hop is Hop.D2H else "h2d")
        self.fabric.copy(port, path, nbytes, 0 if queued else paths.copy_ns(port.address), then)

    def send(self, in_flight: PieceInFlight) -> None:
        """Post a piece between the NICs."""
        operation, fabric = in_flight.operation, self.fabric
        whole = operation.flight
        fabric.posted = number = fabric.posted + 1
        flight = whole.piece(in_flight.nbytes, number, in_flight.ended)
        self.clock.call(fabric.occupy(whole.mover, self.post_ns(operation, in_flight)), fabric.begin, flight)

    def post_ns(self, operation: ShippedOperation, in_flight: PieceInFlight) -> int:
        """Return how long the posting lane is busy with a piece, in ns.

        Ranges of staging memory are contiguous: one descriptor each, or one for each page. Blocks of one layer are a
        layer's share.
        """
        piece, page_bytes = in_flight.piece, self.pipeline_policy.page_bytes
        if self.method.staged_at_p and self.method.staged_at_d:
            pages = -(-in_flight.nbytes // page_bytes) if page_bytes else 0
            return operation.route.post_ns(0) + -(-pages * operation.route.per_descriptor_ps // PS_PER_NS)
        return operation.route.post_ns(piece.stop - piece.start) // operation.layers
