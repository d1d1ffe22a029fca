"""The transport between GPUs by NCCL, in groups of two ranks; without a GPU by a stand-in for it, which every line here
says.

Send and receive take two: a WRITE is a message on a TCP stream of ours, with descriptors and generation; its receiver
refuses it, and nothing is sent, or says that it is ready; a READ is a question, whose answer announces its bytes. Both
then tell NCCL so (bodies.py, groups.py). Bytes are gathered into a buffer, sent, received into a buffer, and scattered
by the receiver (staging.py): `fences` is revoke, `done_means` remote. Lease words are not sent by NCCL, but asked for
on the stream of messages, and lie in memory of the process.

A fence of ours against a writer waits for no body: what comes when it is not wanted any more stays in the buffer. A
fence of ours as the writer, and a stream that ends, abort the group on both sides. What is given up so cannot be used
again: the peers must connect anew, and have a new group then. To give one up for the memory that NCCL takes for it
(50 to 100 MB on a GPU), `forget` the peer.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

import msgspec

from pdflow.protocol.values import Address
from pdflow.protocol.wire.malformed import Malformed
from pdflow_runtime.gpu.driver import gpus
from pdflow_runtime.gpu.torch_build import torch_problem
from pdflow_runtime.security.tls import Tls
from pdflow_runtime.transports.adopting import Segment, address_of, cannot_adopt
from pdflow_runtime.transports.asking import AskingAgent, anonymous
from pdflow_runtime.transports.base import EventSink, MissingBackend, TransportError
from pdflow_runtime.transports.copying import Mapped
from pdflow_runtime.transports.nccl.bodies import Bodies, NcclReceive
from pdflow_runtime.transports.nccl.groups import NcclGroup
from pdflow_runtime.transports.nccl.interfaces import follow_host
from pdflow_runtime.transports.nccl.library import ID_BYTES, Library, real_library
from pdflow_runtime.transports.nccl.staging import (
    CHUNK_BYTES,
    GPU_CHUNK_BYTES,
    CudaDevice,
    HostStaging,
    KernelDevice,
    TensorRegion,
)
from pdflow_runtime.transports.nccl.standin import StandIn
from pdflow_runtime.transports.segments import Extent
from pdflow_runtime.transports.streams.links import AgentLink, Guest
from pdflow_runtime.transports.streams.messages import (
    AgentHello,
    Data,
    Description,
    PackedPieces,
    Ready,
    Write,
    extent_of,
    frame,
    unpack_pieces,
)
from pdflow_runtime.transports.streams.sockets import tune
from pdflow_runtime.transports.streams.stream import OutgoingMessage, StreamBrokenError

SIZE_BYTES: Final = 8
"""What follows a group's id in a greeting: the size of chunks, in which both ranks must cut bodies."""


@cache
def library_here() -> Library:
    """Return the library for this machine. MissingBackend if there are GPUs, and no NCCL."""
    return real_library() if gpus() else StandIn()


def require() -> None:
    """Raise MissingBackend if there are GPUs, and no NCCL, or no torch that can use them."""
    if gpus() and (why := torch_problem()) is not None:
        raise MissingBackend(f"the transport 'nccl' copies by torch where there are GPUs, but {why}")
    library_here()


def caution() -> str:
    if not gpus():
        return "no GPU found: a stand-in for NCCL moves KV through files in /dev/shm; its speed is not that of NCCL"
    return (
        f"KV moves over NCCL {library_here().ncclGetVersion()}; each engine needs its own GPU ({gpus()} on this host)"
    )


class NcclTransport(AskingAgent):
    """The transport over NCCL. Args: `host`, an address of this machine that peers can reach, for the streams of
    messages and for NCCL; `library` and `device`, if they are not to be this machine's own."""

    def __init__(
        self,
        me: Address,
        on_event: EventSink,
        host: str = "127.0.0.1",
        tls: Tls | None = None,
        library: Library | None = None,
        device: Callable[[int], KernelDevice] | None = None,
    ) -> None:
        super().__init__(me, on_event, host, tls)
        self._library: Final = library or library_here()
        self._stands_in: Final = isinstance(self._library, StandIn)
        self._device: Final = device or (None if self._stands_in else CudaDevice)
        """By a GPU's number, the device whose kernels gather and scatter; None where the CPU does."""
        self._allocated: memoryview | None = None
        """The region, if this agent or one that it joined has allocated it for kernels."""
        if not self._stands_in:
            follow_host(host)

    @property
    def name(self) -> str:
        return "nccl stand-in" if self._stands_in else "nccl"

    @property
    def label(self) -> str:
        return f"{self.me} ({self.name})"

    def allocate(self, nbytes: int) -> memoryview:
        if self._device is None:
            return super().allocate(nbytes)
        self._allocated = memory = anonymous(nbytes)
        segment = Segment(address_of(memory), nbytes)
        self._over(TensorRegion([segment], memoryview(bytearray()), self._device(0)))
        return memory

    def join(self, owner: AskingAgent) -> memoryview:
        assert isinstance(owner, NcclTransport)
        own = super().join(owner)
        self._allocated = owner._allocated
        return own if self._allocated is None else self._allocated

    def adopt(self, segments: Sequence[Segment], own_bytes: int) -> memoryview:
        """Use memory of one GPU that somebody else has allocated, or of this process, which is pinned then; see
        `transports/adopting.py`."""
        if self._device is None:
            raise cannot_adopt(self.name)
        numbers = sorted({segment.gpu for segment in segments if segment.gpu is not None})
        if len(numbers) > 1:
            raise TransportError(
                f"nccl moves memory of one GPU for each rank, and the segments lie on GPUs {numbers}: adopt those of "
                "one"
            )
        own = anonymous(own_bytes) if own_bytes else memoryview(bytearray())
        return self._over(TensorRegion(segments, own, self._device(numbers[0] if numbers else 0)))

    @property
    def _chunk_bytes(self) -> int:
        return CHUNK_BYTES if self._stands_in else GPU_CHUNK_BYTES

    def _hello(self, description: Description) -> AgentHello:
        assert self._memory is not None
        ident = bytes(self._library.ncclGetUniqueId().internal) + self._chunk_bytes.to_bytes(SIZE_BYTES, "little")
        return msgspec.structs.replace(super()._hello(description), nbytes=self._memory.nbytes, agent=ident)

    def _reach(self, description: Description, hello: AgentHello) -> Bodies:
        extent = extent_of(description)
        assert not isinstance(extent, Malformed), "parse_description has checked it"
        return self._bodies(extent, hello.agent, 0)

    def _admit(self, hello: AgentHello, sock: socket.socket) -> Bodies:
        tune(sock)
        if len(hello.agent) != ID_BYTES + SIZE_BYTES:
            raise TransportError("it names no NCCL group")
        theirs = int.from_bytes(hello.agent[ID_BYTES:], "little")
        if theirs != self._chunk_bytes:
            raise TransportError(f"it cuts bodies into chunks of {theirs} bytes, this rank of {self._chunk_bytes}")
        return self._bodies(hello.nbytes, hello.agent, 1)

    def _bodies(self, extent: Extent, ident: bytes, rank: int) -> Bodies:
        memory = self._memory
        stage = memory.device.staging if isinstance(memory, TensorRegion) else HostStaging
        return Bodies(extent, self.label, NcclGroup(self._library, ident[:ID_BYTES], rank), stage)

    async def _attend_link(self, link: AgentLink) -> None:
        assert isinstance(link.remote, Bodies)
        assert isinstance(self._memory, Mapped | TensorRegion)
        await link.remote.run(link.stream, self._memory)
        self._lose(link)

    async def _accompany(self, guest: Guest) -> None:
        assert isinstance(guest.remote, Bodies)
        assert isinstance(self._memory, Mapped | TensorRegion)
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
