"""Both ends of a stream between two agents: a link at the agent that opened it, a guest at the one that accepted it.

Only the opener posts, so an agent has at most one open link to each peer that it may write to or read from, and as many
guests as there are incarnations of peers that do so to it.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

import trio

from pdflow.protocol.values import Address
from pdflow.protocol.wire.malformed import Malformed
from pdflow_runtime.transports.copying import Motion
from pdflow_runtime.transports.segments import Extent
from pdflow_runtime.transports.streams.messages import Description, PackedPieces, extent_of
from pdflow_runtime.transports.streams.stream import SocketStream


class Remote(Protocol):
    """A peer's memory as it can be reached from here; None stands for memory that cannot be."""

    @property
    def extent(self) -> Extent: ...


class AgentLink:
    """A stream that this agent has opened to a peer, and the operations posted on it."""

    __slots__ = (
        "bell",
        "description",
        "extent",
        "lost",
        "motions",
        "open",
        "peer",
        "reads",
        "remote",
        "stream",
        "word_reads",
        "writes",
    )

    def __init__(self, peer: Address, description: Description, stream: SocketStream, remote: Remote | None) -> None:
        self.peer: Final = peer
        extent = remote.extent if remote is not None else extent_of(description)
        assert not isinstance(extent, Malformed), "parse_description has checked it"
        self.description: Final = description
        self.extent: Final = extent
        """The bounds of what can be moved to and from the peer's memory."""
        self.stream: Final = stream
        self.remote: Final = remote
        """The peer's memory, if it can be reached without the peer's agent."""
        self.open = True
        """False if nothing more is posted on it: it stays until the peer has let go of it."""
        self.lost = False
        """True if it, or the way to the peer's memory, has broken by neither side's doing."""
        self.writes: dict[int, PackedPieces] = {}
        """WRITEs that are posted and not answered."""
        self.reads: dict[int, PackedPieces] = {}
        """READs that were asked for on this stream, and are not here yet (tcp, nccl)."""
        self.word_reads: set[int] = set()
        """Reads of words, as `reads`."""
        self.motions: deque[tuple[int, Motion]] = deque()
        """READs that we carry out ourselves, in their order; the first one is running."""
        self.bell = trio.Event()

    def operations(self) -> list[int]:
        return [*{*self.writes, *self.reads, *self.word_reads, *(op for op, _ in self.motions)}]

    def take_back(self, op: int) -> bool:
        """Take back an operation of which nothing has been posted: it never is, then. False if it is not open here, or
        was posted."""
        for at, (moving, _) in enumerate(self.motions):
            if moving == op and at:
                del self.motions[at]
                self.word_reads.discard(op)
                return True
        if (op in self.writes or op in self.reads) and self.stream.take_back(op):
            self.writes.pop(op, None)
            self.reads.pop(op, None)
            return True
        return False


class Guest:
    """A stream that a peer has opened to this agent."""

    __slots__ = ("incarnation", "left", "name", "remote", "stream")

    def __init__(self, name: Address, incarnation: int, stream: SocketStream, remote: Remote | None) -> None:
        self.name: Final = name
        self.incarnation: Final = incarnation
        self.stream: Final = stream
        self.remote: Final = remote
        self.left: Final = trio.Event()
        """Set when its stream is closed, and nothing of it moves."""
