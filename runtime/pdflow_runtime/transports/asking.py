"""The base of transports where the memory's owner is asked for a READ's bytes and sends them: tcp and nccl."""

from __future__ import annotations

import mmap
from abc import abstractmethod
from typing import Final

import msgspec

from pdflow.protocol.values import Address
from pdflow.protocol.wire.malformed import Malformed
from pdflow_runtime.security.tls import Tls
from pdflow_runtime.transports.adopting import AdoptedRegion
from pdflow_runtime.transports.base import EventSink, TransportError
from pdflow_runtime.transports.copying import Mapped
from pdflow_runtime.transports.segments import DescribedSegment
from pdflow_runtime.transports.streams.links import AgentLink, Guest
from pdflow_runtime.transports.streams.messages import (
    Data,
    Description,
    PackedPieces,
    ReadOver,
    ReadRequest,
    ReadWordRequest,
    WordValue,
    frame,
    unpack_pieces,
)
from pdflow_runtime.transports.streams.over_tcp import TcpStreams
from pdflow_runtime.transports.streams.sockets import listening
from pdflow_runtime.transports.streams.stream import OutgoingMessage, StreamBrokenError

ANYWHERE: Final = (1 << 64) - 1
"""The bound of a target that only the reader knows."""


class AskingAgent(TcpStreams):
    """An agent whose READs are answered by the memory's owner."""

    def __init__(self, me: Address, on_event: EventSink, host: str = "127.0.0.1", tls: Tls | None = None) -> None:
        super().__init__(me, on_event, host, tls)
        self._address: tuple[str, int] = (host, 0)

    @abstractmethod
    def _data(self, guest: Guest, op: int, pieces: PackedPieces) -> OutgoingMessage:
        """Return the answer to a READ, and arrange for its bytes to be sent."""

    def allocate(self, nbytes: int) -> memoryview:
        return self._over(Mapped(anonymous(nbytes)))

    def join(self, owner: AskingAgent) -> memoryview:
        """Use another agent's region as this one's, too."""
        assert isinstance(owner._memory, Mapped | AdoptedRegion), "call allocate first"
        return self._over(owner._memory)

    def _over(self, memory: Mapped | AdoptedRegion) -> memoryview:
        assert self._memory is None, "an agent has one region"
        self._memory = memory
        self._listener = listening(self._host)
        self._address = self._listener.getsockname()[:2]
        return memory.view if isinstance(memory, Mapped) else memory.own

    def describe(self) -> bytes:
        assert self._memory is not None, "call allocate first"
        host, port = self._address
        # Addresses are nobody else's matter: who wants bytes asks for them.
        segments = (
            tuple(DescribedSegment(segment.start, segment.nbytes) for segment in self._memory.described)
            if isinstance(self._memory, AdoptedRegion)
            else ()
        )
        return msgspec.msgpack.encode(
            Description(self.name, self.incarnation, self.token, host, port, "", self._memory.nbytes, segments=segments)
        )

    def _post_read(self, op: int, link: AgentLink, pieces: PackedPieces) -> None:
        link.reads[op] = pieces
        if not link.stream.post(OutgoingMessage(frame(ReadRequest(op, pieces.packed)), op=op)):
            self._ended(link, op, False)

    def _post_word(self, op: int, link: AgentLink, address: int) -> None:
        link.word_reads.add(op)
        if not link.stream.post(OutgoingMessage(frame(ReadWordRequest(op, address)), op=op)):
            self._word_arrived(link, op, None)

    def _serve_read(self, guest: Guest, message: ReadRequest | ReadWordRequest | ReadOver) -> OutgoingMessage:
        assert isinstance(self._memory, Mapped | AdoptedRegion)
        if isinstance(message, ReadOver):
            raise StreamBrokenError("the peer says that it has read bytes, which over this transport it must ask for")
        if isinstance(message, ReadWordRequest):
            return OutgoingMessage(frame(WordValue(message.op, self._memory.word_value(message.address))))
        pieces = unpack_pieces(message.pieces, self._memory.extent, ANYWHERE)
        if isinstance(pieces, Malformed):
            raise StreamBrokenError(pieces.reason)
        return self._data(guest, message.op, pieces)

    @staticmethod
    def _asked(link: AgentLink, message: Data) -> PackedPieces | None:
        """Return the pieces that a READ's answer is for; None if a fence has ended the READ. StreamBrokenError if the
        answer does not fit what was asked for."""
        pieces = link.reads.get(message.op)
        if pieces is not None and pieces.nbytes != message.nbytes:
            raise StreamBrokenError(f"the peer sent {message.nbytes} bytes, {pieces.nbytes} were asked for")
        return pieces


def anonymous(nbytes: int) -> memoryview:
    """Return zeroed memory of this process, aligned to a page. TransportError if it cannot be had."""
    if nbytes <= 0:
        raise TransportError(f"cannot allocate a region of {nbytes} bytes")
    try:
        return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except OSError as error:
        raise TransportError(f"cannot allocate {nbytes >> 20:,} MiB of memory: {error.strerror}") from None
