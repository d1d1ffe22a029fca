"""Pieces that need an NCCL group of their two ranks, where a rank keeps only so many of these.

A piece that has its turn at both ranks takes its group, or waits until one of the rank that lacks room is idle, and
releases it where the piece ends. The first time two ranks meet their group is made by their handshake; to make it again
takes as long, and pieces that come meanwhile wait for that too. `pdflow.methods.nccl.table` decides which group is
evicted for another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pdflow.methods.method import Method, PipelinePolicy
from pdflow.methods.nccl.table import Groups, OpenGroup, Use
from pdflow.protocol.values import Address
from pdflow_sim.network.fabric import Fabric
from pdflow_sim.network.shipped_pieces import PieceInFlight
from pdflow_sim.network.shipping import ASK, Shipping
from pdflow_sim.nodes.node import SimNode

GROUP = "group"


class GroupedShipping(Shipping):
    """The carrier of pieces that need NCCL groups. Args: as Shipping's, and `most` groups of a rank. The method
    announces its pieces.
    """

    def __init__(
        self,
        fabric: Fabric,
        method: Method,
        pipeline_policy: PipelinePolicy,
        hidden_bytes: int,
        pickle_bytes_per_s: int,
        most: int,
    ) -> None:
        super().__init__(fabric, method, pipeline_policy, hidden_bytes, pickle_bytes_per_s)
        self.groups = Groups(most)
        self.held: dict[PieceInFlight, OpenGroup] = {}
        self.waiting: dict[Address, deque[PieceInFlight]] = {}
        """Pieces that wait for a group, by the rank all of whose groups were in use."""
        announced = self.stages.index(ASK)
        self.stages = (*self.stages[:announced], GROUP, *self.stages[announced:])

    def turn(self, in_flight: PieceInFlight, stage: str) -> None:
        if stage == GROUP:
            self.enter(in_flight)
        else:
            super().turn(in_flight, stage)

    def enter(self, in_flight: PieceInFlight) -> None:
        """Take a piece's group, or let the piece wait."""
        flight = in_flight.operation.flight
        use = self.groups.use(flight.p_port.address, flight.d_port.address)
        if not isinstance(use, Use):
            self.waiting.setdefault(use, deque()).append(in_flight)
            return
        self.held[in_flight] = use.group
        if use.made:
            self.note(use)
        now = self.clock.now
        if use.again:
            use.group.ready_ns = now + self.fabric.handshake_ns
        if use.group.ready_ns > now:
            self.clock.call(use.group.ready_ns - now, in_flight.go_on, None)
        else:
            in_flight.go_on()

    def note(self, use: Use) -> None:
        """Count and trace what it took to have a group."""
        metrics, trace_line = self.metrics, self.metrics.trace_line
        if use.closed:
            metrics.count("NCCL groups evicted", len(use.closed))
        if use.again:
            metrics.count("NCCL groups made again")
        if trace_line is not None:
            for p_rank, d_rank in use.closed:
                trace_line(p_rank, f"evicts its group: {d_rank}")
            p_rank, d_rank = use.group.ranks
            trace_line(p_rank, f"creates a group{' again' if use.again else ''}: {d_rank}")

    def leave(self, in_flight: PieceInFlight) -> None:
        self.release_group(in_flight)
        super().leave(in_flight)

    def sender_gone(self, in_flight: PieceInFlight) -> None:
        self.release_group(in_flight)
        super().sender_gone(in_flight)

    def release_group(self, in_flight: PieceInFlight) -> None:
        """Release the group of a piece that no longer goes over it."""
        group = self.held.pop(in_flight, None)
        if group is not None and self.groups.done(group):
            self.admit(group.ranks)

    def admit(self, ranks: Iterable[Address]) -> None:
        """Let pieces that wait for groups of these ranks enter, as far as there is room."""
        for rank in ranks:
            waiting = self.waiting.get(rank)
            while waiting and self.groups.has_room(rank):
                self.enter(waiting.popleft())

    def died(self, node: SimNode) -> None:
        self.admit(self.groups.died(node.ports))
        super().died(node)
