"""The transport between GPUs by NCCL, in groups of two ranks; without a GPU by a stand-in for it, which every line here
says.

Send and receive take two: a WRITE is a message on a TCP stream of ours, with descriptors and generation; its receiver
refuses it, and nothing is sent, or says that it is ready; a READ is a question, whose answer announces its bytes. Both
then tell NCCL so (groups.py). Bytes are gathered into a buffer, sent, received into a buffer, and scattered by the
receiver, which checks before every chunk whether it is still wanted: `fences` is revoke, `done_means` remote.

A fence of ours against a writer waits for no body: what comes when it is not wanted any more stays in the buffer. A
fence of ours as the writer, and a stream that ends, abort the group on both sides. What is given up so cannot be used
again: the peers must connect anew, and have a new group then. To give one up for the memory that NCCL takes for it
(50 to 100 MB on a GPU), `forget` the peer.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
import trio

from pdflow.protocol.values import Address
from pdflow.protocol.wire.malformed import Malformed
from pdflow_runtime.gpu.driver import gpus
from pdflow_runtime.transports.asking import AskingAgent
from pdflow_runtime.transports.base import EventSink, TransportError
from pdflow_runtime.transports.copying import Copy, Mapped, Motion
from pdflow_runtime.transports.nccl.groups import CHUNK_BYTES, CudaStaging, HostStaging, NcclGroup, NcclStaging
from pdflow_runtime.transports.nccl.library import ID_BYTES, Library, real_library
from pdflow_runtime.transports.nccl.standin import StandIn
from pdflow_runtime.transports.streams.links import AgentLink, Guest
from pdflow_runtime.transports.streams.messages import (
    VERSION,
    AgentHello,
    Data,
    Description,
    PackedPieces,
    Ready,
    Write,
    frame,
    unpack_pieces,
)
from pdflow_runtime.transports.streams.sockets import is_whole, tune
from pdflow_runtime.transports.streams.stream import MAX_OUTGOING, OutgoingMessage, SocketStream, StreamBrokenError

log = logging.getLogger(__name__)

MAX_BODIES: Final = MAX_OUTGOING
"""The most bodies that wait to go through one group; beyond it the peer takes part in none of what it asks for or
announces."""
LOOK_S: Final = 0.02
"""The interval of checks whether the other side of a body is still there."""


@cache
def library_here() -> Library:
    """Return the library for this machine. MissingBackend if there are GPUs, and no NCCL."""
    return real_library() if gpus() else StandIn()


def require() -> None:
    library_here()


def caution() -> str:
    if not gpus():
        return "no GPU found: a stand-in for NCCL moves KV through files in /dev/shm; its speed is not that of NCCL"
    return (
        f"KV moves over NCCL {library_here().ncclGetVersion()}; each engine needs its own GPU ({gpus()} on this host)"
    )


class NcclReceive(Motion):
    """The motion of a body that is received. Halted, it ends at once, unless it is being scattered; its bytes come all
    the same."""

    __slots__ = ("_copy", "over")

    def __init__(self, owner: object, peer: str, generation: int) -> None:
        super().__init__(owner, peer, generation)
        self.over: Final = trio.Event()
        self._copy: Copy | None = None

    def halt(self) -> None:
        super().halt()
        if self._copy is None:
            self.over.set()
        else:
            self._copy.halt()

    async def run(self) -> None:
        await self.over.wait()

    async def scatter(self, staged: Mapped, memory: Mapped, pieces: PackedPieces) -> None:
        if self.halted:
            return
        self._copy = Copy(self, self.peer, self.generation, staged, memory, pieces)
        await self._copy.run()
        self._copy = None
        if self.halted:
            self.over.set()


class Bodies:
    """The bodies that go through one group, one after the other, beside the stream on which they are announced."""

    def __init__(self, nbytes: int, label: str, group: NcclGroup, stage: Callable[[], NcclStaging]) -> None:
        self.extent: Final = nbytes
        """The size of the peer's memory."""
        self._label: Final = label
        self._group: Final = group
        self._stage: Final = stage
        self._staged: Mapped | None = None
        self._waiting: deque[tuple[PackedPieces | int, NcclReceive | None]] = deque()
        self._bell = trio.Event()
        self._called = trio.Event()
        """Set while a thread waits for NCCL."""
        self._limiter: Final = trio.CapacityLimiter(1)

    def send(self, pieces: PackedPieces) -> None:
        self._put(pieces, None)

    def receive(self, nbytes: int, pieces: PackedPieces | None, landing: NcclReceive | None) -> None:
        """Receive a body into these pieces, or discard it if there are none. StreamBrokenError, as `send`, if too many
        wait."""
        self._put(nbytes if pieces is None else pieces, landing)

    def _put(self, what: PackedPieces | int, landing: NcclReceive | None) -> None:
        if len(self._waiting) >= MAX_BODIES:
            raise StreamBrokenError(f"{MAX_BODIES} announced transfers wait for the peer, which is the limit")
        self._waiting.append((what, landing))
        self._bell.set()

    def abort(self) -> None:
        self._group.abort()

    async def run(self, stream: SocketStream, memory: Mapped) -> None:
        """Move the bodies. Returns when NCCL has failed, or either side has given up."""
        why: object = "one side closed the connection"
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, stream, nursery.cancel_scope)
                try:
                    await self._move_all(memory)
                except RuntimeError as error:
                    why = error
                    nursery.cancel_scope.cancel()
            log.warning("%s: a transfer was lost: %s", self._label, why)
        finally:
            self.abort()
            for _, landing in self._waiting:
                if landing is not None:
                    landing.failed = not landing.halted
                    landing.over.set()

    async def _move_all(self, memory: Mapped) -> None:
        while True:
            while self._waiting:
                await self._move(*self._waiting[0], memory)
                self._waiting.popleft()
            self._bell = trio.Event()
            await self._bell.wait()

    async def _move(self, what: PackedPieces | int, landing: NcclReceive | None, memory: Mapped) -> None:
        if self._staged is None:
            await self._call(self._open)
            self._staged = self._group.staging.host
        if isinstance(what, int):
            for begin in range(0, what, CHUNK_BYTES):
                await self._call(partial(self._group.receive, min(CHUNK_BYTES, what - begin)))
        elif landing is None:
            sources, _, lengths = what.columns()
            for chunk in split(sources, lengths):
                await Copy(self, "", 0, memory, self._staged, chunk).run()
                await self._call(partial(self._group.send, chunk.nbytes))
        else:
            _, targets, lengths = what.columns()
            for chunk in split(targets, lengths, into_region=True):
                await self._call(partial(self._group.receive, chunk.nbytes))
                await landing.scatter(self._staged, memory, chunk)
            landing.over.set()

    def _open(self) -> None:
        self._group.open(self._stage())

    async def _call(self, call: Callable[[], None]) -> None:
        """Wait for a call of NCCL in a thread. RuntimeError."""
        self._called.set()
        await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._limiter)
        self._called = trio.Event()

    async def _watch(self, stream: SocketStream, scope: trio.CancelScope) -> None:
        """Abort when the stream has ended: NCCL may wait for ever for a rank that is gone, when it opens a group even
        after an abort."""
        while True:
            await self._called.wait()
            while self._called.is_set():
                if not is_whole(stream.sock):
                    self.abort()
                    scope.cancel()
                    return
                await trio.sleep(LOOK_S)


class NcclTransport(AskingAgent):
    """The transport over NCCL. Args: `host`, an address of this machine that peers can reach, for the streams of
    messages; `library`, if it is not to be this machine's own."""

    def __init__(
        self, me: Address, on_event: EventSink, host: str = "127.0.0.1", library: Library | None = None
    ) -> None:
        super().__init__(me, on_event, host)
        self._library: Final = library or library_here()
        self._stands_in: Final = isinstance(self._library, StandIn)

    @property
    def name(self) -> str:
        return "nccl stand-in" if self._stands_in else "nccl"

    @property
    def label(self) -> str:
        return f"{self.me} ({self.name})"

    def _hello(self, description: Description) -> AgentHello:
        assert self._memory is not None
        ident = bytes(self._library.ncclGetUniqueId().internal)
        return AgentHello(
            VERSION,
            self.me,
            self.incarnation,
            description.incarnation,
            description.token,
            "",
            self._memory.nbytes,
            ident,
        )

    def _reach(self, description: Description, hello: AgentHello) -> Bodies:
        return self._bodies(description.nbytes, hello.agent, 0)

    def _admit(self, hello: AgentHello, sock: socket.socket) -> Bodies:
        tune(sock)
        if len(hello.agent) != ID_BYTES:
            raise TransportError("it names no NCCL group")
        return self._bodies(hello.nbytes, hello.agent, 1)

    def _bodies(self, nbytes: int, ident: bytes, rank: int) -> Bodies:
        stage = HostStaging if self._stands_in else CudaStaging
        return Bodies(nbytes, self.label, NcclGroup(self._library, ident, rank), stage)

    async def _attend_link(self, link: AgentLink) -> None:
        assert isinstance(link.remote, Bodies)
        assert isinstance(self._memory, Mapped)
        await link.remote.run(link.stream, self._memory)
        self._lose(link)

    async def _accompany(self, guest: Guest) -> None:
        assert isinstance(guest.remote, Bodies)
        assert isinstance(self._memory, Mapped)
        await guest.remote.run(guest.stream, self._memory)
        guest.stream.close()

    def _close_link(self, link: AgentLink) -> None:
        assert isinstance(link.remote, Bodies)
        super()._close_link(link)
        link.remote.abort()

    # Bytes to us.

    async def _receive(self, guest: Guest, message: Write) -> bool:
        assert isinstance(guest.remote, Bodies)
        assert self._memory is not None
        pieces = unpack_pieces(message.pieces, guest.remote.extent, self._memory.extent)
        if isinstance(pieces, Malformed):
            raise StreamBrokenError(pieces.reason)
        if not self._welcome(guest, message.generation):
            return False
        landing = NcclReceive(guest, guest.name, message.generation)
        if pieces.nbytes:
            self._answer(guest, OutgoingMessage(frame(Ready(message.op))))
            guest.remote.receive(pieces.nbytes, pieces, landing)
        else:
            landing.over.set()
        landed = await self._move(landing)
        if landing.failed:
            raise StreamBrokenError("its bytes did not arrive")
        return landed

    async def _receive_data(self, link: AgentLink, message: Data) -> None:
        assert isinstance(link.remote, Bodies)
        op, pieces = message.op, self._asked(link, message)
        landing = None if pieces is None else NcclReceive(link, link.peer, -1)
        link.remote.receive(message.nbytes, pieces, landing)
        if landing is not None:
            landed = await self._move(landing)
            if link.reads.get(op) is pieces and not landing.failed:
                self._ended(link, op, landed)

    # Bytes from us.

    def _send_data(self, link: AgentLink, op: int, pieces: PackedPieces) -> None:
        assert isinstance(link.remote, Bodies)
        link.remote.send(pieces)

    def _data(self, guest: Guest, op: int, pieces: PackedPieces) -> OutgoingMessage:
        assert isinstance(guest.remote, Bodies)
        guest.remote.send(pieces)
        return OutgoingMessage(frame(Data(op, pieces.nbytes)))


def split(offsets: Any, lengths: Any, *, into_region: bool = False) -> Iterator[PackedPieces]:
    """Yield the copies from these offsets in a region into the staging buffer, or back, as much as it holds at once."""
    ends = np.cumsum(lengths)
    begins = ends - lengths
    total = int(ends[-1]) if len(ends) else 0
    borders = np.arange(0, total, CHUNK_BYTES, dtype=np.uint64)
    boundaries = np.union1d(begins[lengths > 0], borders)
    sizes = np.diff(boundaries, append=np.uint64(total))
    piece = np.searchsorted(ends, boundaries, "right")
    positions = [offsets[piece] + boundaries - begins[piece], boundaries % np.uint64(CHUNK_BYTES)]
    rows = np.stack((*(reversed(positions) if into_region else positions), sizes), axis=1)
    chunks = np.append(np.searchsorted(boundaries, borders), len(boundaries)).tolist()
    for first, last in pairwise(chunks):
        chunk = slice(first, last)
        yield PackedPieces(rows[chunk].tobytes(), int(sizes[chunk].sum()))
