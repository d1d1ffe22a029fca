"""Between hosts: bytes go behind their messages over TCP, and are received straight into the region.

The socket reads of a payload are ours, one after the other in trio's thread, and each is preceded by the question
whether the bytes are still wanted; so a fence holds from the moment it is asked for, and what comes later is read and
thrown away.

Nothing is encrypted. Off loopback, only between hosts that trust their network, or inside a tunnel.
"""

from __future__ import annotations

import mmap
import socket
from collections.abc import Iterable
from typing import Final

import msgspec

from pdflow.layout.descriptors import Descriptor
from pdflow.protocol.values import Address
from pdflow.protocol.wire.malformed import Malformed
from runtime.transports.base import Tell, TransportError
from runtime.transports.copying import Mapped
from runtime.transports.links import Guest, Link
from runtime.transports.messages import (
    Data,
    Description,
    Hello,
    Pieces,
    Read,
    ReadOver,
    ReadWord,
    Word,
    Write,
    frame,
    pack,
    unpack_pieces,
    word_at,
)
from runtime.transports.over_tcp import TcpStreams
from runtime.transports.sockets import listening, tune
from runtime.transports.stream import Parcel, StreamBrokenError

ANYWHERE: Final = 1 << 65
"""The bound of a target that only the reader knows."""


class TcpTransport(TcpStreams):
    """Args: host, an address of this machine that peers can reach."""

    name: Final = "tcp"

    def __init__(self, me: Address, tell: Tell, host: str = "127.0.0.1") -> None:
        super().__init__(me, tell)
        self._host: Final = host
        self._address: tuple[str, int] = (host, 0)

    def allocate(self, nbytes: int) -> memoryview:
        if nbytes <= 0:
            raise TransportError(f"a region of {nbytes} bytes cannot be had")
        try:
            region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise TransportError(f"{nbytes >> 20:,} MiB of memory cannot be had: {error.strerror}") from None
        return self._over(Mapped(memoryview(region)))

    def join(self, owner: TcpTransport) -> memoryview:
        """Another agent's region is ours, too."""
        assert owner._memory is not None, "allocate comes first"
        return self._over(owner._memory)

    def _over(self, memory: Mapped) -> memoryview:
        assert self._memory is None, "one region per agent"
        self._memory = memory
        self._listener = listening(self._host)
        self._address = self._listener.getsockname()[:2]
        return memory.view

    def describe(self) -> bytes:
        assert self._memory is not None, "allocate comes first"
        host, port = self._address
        return msgspec.msgpack.encode(
            Description(self.name, self.life, self.token, host, port, "", self._memory.nbytes)
        )

    def _reach(self, about: Description) -> None:
        return None

    def _admit(self, hello: Hello, sock: socket.socket) -> None:
        tune(sock)

    def _payload(self, pieces: Pieces) -> Iterable[memoryview]:
        assert self._memory is not None
        view = self._memory.view
        return (view[at : at + length] for at, length in zip(pieces.sources, pieces.lengths, strict=True) if length)

    def _landing(self, pieces: Pieces) -> Iterable[memoryview]:
        assert self._memory is not None
        view = self._memory.view
        return (view[to : to + length] for to, length in zip(pieces.targets, pieces.lengths, strict=True) if length)

    async def _receive(self, guest: Guest, message: Write) -> bool:
        assert self._memory is not None
        pieces = unpack_pieces(message.pieces, ANYWHERE, self._memory.nbytes)
        if isinstance(pieces, Malformed):
            raise StreamBrokenError(pieces.reason)

        def wanted() -> bool:
            return self._welcome(guest, message.generation)

        return await guest.stream.fill(self._landing(pieces), wanted) and wanted()

    def _post_read(self, op: int, link: Link, pieces: Pieces) -> None:
        link.reads[op] = pieces
        packed = pack(map(Descriptor, pieces.sources, pieces.targets, pieces.lengths))
        if not link.stream.post(Parcel(frame(Read(op, packed)), op=op)):
            self._ended(link, op, False)

    def _post_word(self, op: int, link: Link, address: int) -> None:
        link.words.add(op)
        if not link.stream.post(Parcel(frame(ReadWord(op, address)), op=op)):
            self._word_arrived(link, op, None)

    def _serve_read(self, guest: Guest, message: Read | ReadWord | ReadOver) -> Parcel:
        assert self._memory is not None
        if isinstance(message, ReadOver):
            raise StreamBrokenError("the bytes are sent from here")
        if isinstance(message, ReadWord):
            return Parcel(frame(Word(message.op, word_at(self._memory.view, message.address))))
        pieces = unpack_pieces(message.pieces, self._memory.nbytes, ANYWHERE)
        if isinstance(pieces, Malformed):
            raise StreamBrokenError(pieces.reason)
        return Parcel(frame(Data(message.op, pieces.nbytes)), self._payload(pieces))

    async def _receive_data(self, link: Link, message: Data) -> None:
        op, pieces = message.op, link.reads.get(message.op)
        if pieces is None:  # A fence has ended it.
            await link.stream.discard(message.nbytes)
        elif pieces.nbytes != message.nbytes:
            raise StreamBrokenError(f"{message.nbytes} bytes where {pieces.nbytes} were asked for")
        elif await link.stream.fill(self._landing(pieces), lambda: link.reads.get(op) is pieces) and op in link.reads:
            self._ended(link, op, True)
