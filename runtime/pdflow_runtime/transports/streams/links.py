"""Both ends of a stream between two agents: the link of whoever opened it, the guest of whoever answered.

Only the opener posts, so an agent has at most one open link to each peer that it may write to or read from, and as many
guests as there are lives of peers that do so to it.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

import trio

from pdflow.protocol.values import Address
from pdflow_runtime.transports.copying import Motion
from pdflow_runtime.transports.streams.messages import Description, PackedPieces
from pdflow_runtime.transports.streams.stream import SocketStream


class Remote(Protocol):
    """A peer's memory as we can reach it; None in its place where we cannot."""

    @property
    def nbytes(self) -> int: ...


class AgentLink:
    """Our stream to one peer."""

    __slots__ = (
        "bell",
        "description",
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
        self.description: Final = description
        self.stream: Final = stream
        self.remote: Final = remote
        """The peer's memory, where it can be mapped."""
        self.open = True
        """Otherwise nothing more is posted on it, and it lives until the peer has let go of it."""
        self.lost = False
        """It has broken, or what it leads to, by nobody's doing."""
        self.writes: dict[int, PackedPieces] = {}
        """Posted and not answered."""
        self.reads: dict[int, PackedPieces] = {}
        """Asked for on this stream, and not here yet (tcp, nccl)."""
        self.word_reads: set[int] = set()
        """As `reads`, of words."""
        self.motions: deque[tuple[int, Motion]] = deque()
        """Reads that we carry out ourselves, in their order; the first one is running."""
        self.bell = trio.Event()

    def operations(self) -> list[int]:
        return [*{*self.writes, *self.reads, *self.word_reads, *(op for op, _ in self.motions)}]

    def take_back(self, op: int) -> bool:
        """Whether this operation was open here and none of it had been posted. It never is, then."""
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
    """A peer's stream to us."""

    __slots__ = ("incarnation", "left", "name", "remote", "stream")

    def __init__(self, name: Address, incarnation: int, stream: SocketStream, remote: Remote | None) -> None:
        self.name: Final = name
        self.incarnation: Final = incarnation
        self.stream: Final = stream
        self.remote: Final = remote
        self.left: Final = trio.Event()
        """Set when its stream is closed, and nothing of it moves."""
