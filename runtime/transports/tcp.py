"""Between hosts: bytes go behind their messages over TCP, and are received straight into the region.

The socket reads of a payload are ours, one after the other in trio's thread, and each is preceded by the question
whether the bytes are still wanted; so a fence holds from the moment it is asked for, and what comes later is read and
thrown away.

A stream that was reset proves nothing about the bytes that had been sent on it: the peer may still have them to read.
Proof is what answers at the same port afterwards: the same agent, which welcomes us only once it has let go of the old
stream; another agent, or nobody, and then the old one is gone, as it had the port to itself.

Nothing is encrypted. Off loopback, only between hosts that trust their network, or inside a tunnel.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import socket
from collections.abc import Iterable
from typing import Final

import msgspec
import trio

from pdflow.layout.descriptors import Descriptor
from pdflow.protocol.values import Address
from pdflow.protocol.wire.malformed import Malformed
from runtime.transports.agent import AgentGoneError, StreamAgent
from runtime.transports.base import Tell, TransportError
from runtime.transports.copying import Mapped
from runtime.transports.links import Guest, Link
from runtime.transports.messages import (
    Data,
    Description,
    Hello,
    Pieces,
    Read,
    ReadWord,
    Word,
    Write,
    frame,
    pack,
    unpack_pieces,
    word_at,
)
from runtime.transports.stream import Parcel, StreamBrokenError

log = logging.getLogger(__name__)

BACKLOG: Final = 128
ANYWHERE: Final = 1 << 65
"""The bound of a target that only the reader knows."""
IDLE_S: Final = 5
"""Of silence, before the kernel asks whether the other host is still there; it asks three times, as far apart."""
FIRST_AGAIN_S: Final = 0.02
LAST_AGAIN_S: Final = 1.0
"""Between two attempts to learn whether a peer has let go; each waits twice as long as the one before."""


class TcpTransport(StreamAgent):
    """Args: host, an address of this machine that peers can reach."""

    name: Final = "tcp"

    def __init__(self, me: Address, tell: Tell, host: str = "127.0.0.1") -> None:
        super().__init__(me, tell)
        self._host: Final = host
        self._address: tuple[str, int] = (host, 0)

    def allocate(self, nbytes: int) -> memoryview:
        assert self._memory is None, "one region per agent"
        if nbytes <= 0:
            raise TransportError(f"a region of {nbytes} bytes cannot be had")
        try:
            region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise TransportError(f"{nbytes >> 20:,} MiB of memory cannot be had: {error.strerror}") from None
        self._memory = Mapped(memoryview(region))
        self._listener = _listening(self._host)
        self._address = self._listener.getsockname()[:2]
        return self._memory.view

    def describe(self) -> bytes:
        assert self._memory is not None, "allocate comes first"
        host, port = self._address
        return msgspec.msgpack.encode(
            Description(self.name, self.life, self.token, host, port, "", self._memory.nbytes)
        )

    async def _dial(self, about: Description) -> socket.socket:
        family = _family(about.host)
        try:
            socket.inet_pton(family, about.host)
        except (OSError, ValueError):
            raise TransportError("its address is none") from None
        sock = socket.socket(family)
        sock.setblocking(False)
        try:
            refused = sock.connect_ex((about.host, about.port))
            if refused == errno.EINPROGRESS:
                await trio.lowlevel.wait_writable(sock)
                refused = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if refused:
                raise OSError(refused, os.strerror(refused))
            _tune(sock)
        except BaseException:
            sock.close()
            raise
        return sock

    def _reach(self, about: Description) -> None:
        return None

    def _admit(self, hello: Hello, sock: socket.socket) -> None:
        _tune(sock)

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

    def _serve_read(self, message: Read | ReadWord) -> Parcel:
        assert self._memory is not None
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

    async def _learn_of_end(self, link: Link) -> None:
        """By knocking, until somebody answers, or surely nobody. A connection made meanwhile says as much."""
        pause_s = FIRST_AGAIN_S
        while link in self._closing:
            async with self._doors.setdefault(link.peer, trio.Lock()):
                if self._reached(link.peer, link.about.life):
                    return
                try:
                    stream = await self._knock(link.peer, link.about)
                except AgentGoneError:
                    return
                except TransportError as error:
                    log.warning("%s: %s; what was posted there before may still land", self.me, error)
                else:
                    stream.close()
                    return
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_AGAIN_S)


def _listening(host: str) -> socket.socket:
    if host in ("", "0.0.0.0", "::"):
        raise TransportError(f"{host!r} is no address to connect to: name one of this machine's")
    listener = socket.socket(_family(host))
    listener.setblocking(False)
    try:
        # No SO_REUSEADDR: a port that can be bound belongs to nobody else any more.
        listener.bind((host, 0))
    except OSError as error:
        listener.close()
        raise TransportError(f"{host} is no address to listen on here: {error.strerror}") from None
    listener.listen(BACKLOG)
    return listener


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _tune(sock: socket.socket) -> None:
    """An answer does not wait for a full packet; a host that vanished is noticed while nothing is sent to it."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        sock.setsockopt(socket.IPPROTO_TCP, option, IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
