"""One operation under way between two ranks: a WRITE, a READ, a piece of one, or a copy on one host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from pdflow.network.network import FlowId, PathId
from pdflow.protocol.ids import Op, Reg
from pdflow.protocol.messages import Message
from pdflow_sim.network.paths import Rails
from pdflow_sim.nodes.node import SimPort

NO_OP = Op(Reg("", 0, 0, ""), 0, 0)
"""The operation of a copy on one host."""

Then: TypeAlias = Callable[[bool], None]
"""Called with whether what was under way has arrived."""


class Flight:
    """One operation under way. It flows over one path, over rails, or over neither if nothing bounds it."""

    __slots__ = (
        "d_port",
        "generation",
        "nbytes",
        "notification",
        "number",
        "op",
        "p_port",
        "path",
        "rails",
        "reads",
        "request",
        "shares",
        "then",
        "wire_latency",
    )

    def __init__(
        self,
        *,
        op: Op,
        request: int,
        p_port: SimPort,
        d_port: SimPort,
        path: PathId | None,
        rails: Rails | None,
        wire_latency: int,
        nbytes: int,
        notification: Message | None,
        generation: int,
        number: int,
        reads: bool,
        then: Then | None,
    ) -> None:
        self.op = op
        self.request = request
        self.p_port = p_port
        self.d_port = d_port
        self.path = path
        self.rails = rails
        self.shares: dict[FlowId, tuple[PathId, int]] = {}
        """The path and the bytes of each flow that is under way over rails."""
        self.wire_latency = wire_latency
        self.nbytes = nbytes
        self.notification = notification
        self.generation = generation
        """The generation of the blocks at D."""
        self.number = number
        self.then = then
        """Called with how it ended, if it is only a stretch of an operation's way (`pdflow_sim.network.shipping`) or a
        copy on one host.
        """
        self.reads = reads
        """True if D moves the bytes; otherwise P does."""

    @property
    def mover(self) -> SimPort:
        """The rank that posted the operation, to which its end is reported."""
        return self.d_port if self.reads else self.p_port

    def others(self, flow: FlowId) -> bool:
        """Remove a flow that has ended. True if others of the operation go on."""
        self.shares.pop(flow, None)
        return bool(self.shares)

    def piece(self, nbytes: int, number: int, then: Then) -> Flight:
        """Return a piece of the operation, on the same way; `then` is called with how that ended."""
        return Flight(
            op=self.op,
            request=self.request,
            p_port=self.p_port,
            d_port=self.d_port,
            path=self.path,
            rails=self.rails,
            wire_latency=self.wire_latency,
            nbytes=nbytes,
            notification=None,
            generation=self.generation,
            number=number,
            reads=self.reads,
            then=then,
        )


def copy_of(port: SimPort, path: PathId, nbytes: int, number: int, then: Then) -> Flight:
    """Return the flight of a copy, whose bytes stay on the host of a rank."""
    return Flight(
        op=NO_OP,
        request=-1,
        p_port=port,
        d_port=port,
        path=path,
        rails=None,
        wire_latency=0,
        nbytes=nbytes,
        notification=None,
        generation=0,
        number=number,
        reads=False,
        then=then,
    )
