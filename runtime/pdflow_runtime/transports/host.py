"""The serving side of an agent: it admits peers' streams and carries out what the guests on them ask for.

The receiver of bytes decides whether they land. A guest has shown the token of this memory; each of its WRITEs is
checked for bounds and generation, moved by us, and then answered. So a fence is local here, and waits for no peer.

One incarnation of a peer has one stream. A second one takes the first one's place only when nothing of that moves any
more: so a writer whose stream broke learns, by being welcomed anew, that what it had posted has come to its end.
"""

from __future__ import annotations

import errno
import logging
import secrets
import socket
from abc import ABC, abstractmethod
from typing import Final

import trio

from pdflow.protocol.values import Address
from pdflow.protocol.wire.limits import MAX_NAME_BYTES
from pdflow_runtime.security.pending_connections import PendingConnections
from pdflow_runtime.transports.base import EventSink, NotificationArrived, TransportError
from pdflow_runtime.transports.copying import Motion, RegionBase
from pdflow_runtime.transports.streams.links import Guest, Remote
from pdflow_runtime.transports.streams.messages import (
    MAX_HELLO_BYTES,
    MAX_NOTIFICATION_BYTES,
    TOKEN_BYTES,
    VERSION,
    AgentHello,
    ConnectionRefused,
    OperationEnded,
    ReadOver,
    ReadRequest,
    ReadWordRequest,
    Welcome,
    Write,
    frame,
    same_token,
)
from pdflow_runtime.transports.streams.stream import (
    OutgoingMessage,
    SocketStream,
    StreamBrokenError,
    StreamFinishedError,
)
from pdflow_runtime.transports.waits import Waits

log = logging.getLogger(__name__)

GREETING_S: Final = 5.0
"""The time that a peer has to introduce itself, and to answer our greeting."""
MAX_PENDING: Final = 64
"""Streams at once on which no peer has introduced itself yet."""
_OUT_OF_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Host(ABC):
    """The serving side of a transport's agent. Args: `me`, the name by which peers know this rank; `on_event`, which
    takes note of what happened."""

    def __init__(self, me: Address, on_event: EventSink) -> None:
        self.me: Final = me
        self.incarnation: Final = secrets.randbits(63)
        self.token: Final = secrets.token_bytes(TOKEN_BYTES)
        self._on_event: Final = on_event
        self._waits: Final = Waits(on_event)
        self._memory: RegionBase | None = None
        self._guests: set[Guest] = set()
        self._pending: Final = PendingConnections(MAX_PENDING, SocketStream.close)
        self._motions: set[Motion] = set()
        """Motions that bring bytes into our memory, for guests and for ourselves."""
        self._floors: dict[Address, int] = {}
        """By peer: the newest generation that it was fenced from. None of its WRITEs may reach that or an older one."""

    @property
    def label(self) -> str:
        """The prefix of this agent's log lines."""
        return self.me

    def _secured(self, sock: socket.socket) -> socket.socket:
        """Return the accepted socket, or one over it that encrypts."""
        return sock

    @abstractmethod
    def _admit(self, hello: AgentHello, sock: socket.socket) -> Remote | None:
        """Return the memory of a peer that has shown the token. TransportError if it may not come in."""

    @abstractmethod
    async def _receive(self, guest: Guest, message: Write) -> bool:
        """Move the bytes of a guest's WRITE. True if all have landed."""

    @abstractmethod
    def _serve_read(self, guest: Guest, message: ReadRequest | ReadWordRequest | ReadOver) -> OutgoingMessage | None:
        """Return the answer to a guest's READ. StreamBrokenError if the guest may not ask for it."""

    def _incarnation_for(self, hello: AgentHello) -> int:
        """Return the incarnation that a peer must name to be let in. The peer takes any other as proof that nothing of
        it moves here."""
        return self.incarnation

    def _let_be(self, remote: Remote | None) -> None:  # noqa: B027 (most have nothing to do)
        """Give up the memory of a peer after the stream that led to it has ended."""

    async def _accompany(self, guest: Guest) -> None:  # noqa: B027 (most have nothing to do)
        """Run beside the guest's own tasks, until its stream is over."""

    @abstractmethod
    def _perhaps_gone(self, peer: Address) -> None:
        """Report PeerGone if no stream of this peer is left, after one has ended by no doing of ours."""

    async def _accept(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        while True:
            await trio.lowlevel.wait_readable(listener)
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if error.errno in _OUT_OF_FILES:
                    log.warning("%s: cannot accept a connection: %s", self.label, error.strerror)
                    await trio.sleep(0.1)
                continue
            stream = SocketStream(self._secured(sock))
            self._pending.add(stream)
            nursery.start_soon(self._serve, stream)

    async def _serve(self, stream: SocketStream) -> None:
        guest: Guest | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.pump)
                try:
                    guest = await self._greet(stream)
                    nursery.start_soon(self._accompany, guest)
                    await self._attend_guest(guest)
                except StreamBrokenError as broken:
                    if not isinstance(broken, StreamFinishedError) and not stream.closed:
                        who = "an unknown peer" if guest is None else guest.name
                        log.warning("%s: closing the connection of %s: %s", self.label, who, broken)
                nursery.cancel_scope.cancel()
        finally:
            stream.close()
            if guest is not None:
                guest.left.set()
                self._let_be(guest.remote)
        if guest is not None and guest in self._guests:
            self._guests.discard(guest)
            self._perhaps_gone(guest.name)

    async def _greet(self, stream: SocketStream) -> Guest:
        try:
            with trio.move_on_after(GREETING_S) as timeout:
                await stream.secure()
                hello = await stream.message(MAX_HELLO_BYTES)
        finally:
            self._pending.leave(stream)
        if timeout.cancelled_caught:
            raise StreamBrokenError(f"no greeting within {GREETING_S:g} s")
        if not isinstance(hello, AgentHello) or hello.version != VERSION or not _is_name(hello.name):
            raise StreamBrokenError("its first message is not a greeting of this version")
        incarnation = self._incarnation_for(hello)
        if hello.target_incarnation != incarnation:
            stream.post(OutgoingMessage(frame(ConnectionRefused(incarnation))))
            raise StreamBrokenError("it wants a former agent of this address")
        if not same_token(hello.token, self.token):
            raise StreamBrokenError("it does not know the token of this memory")
        try:
            guest = Guest(hello.name, hello.incarnation, stream, self._admit(hello, stream.sock))
        except TransportError as error:
            raise StreamBrokenError(str(error)) from None
        for former in [
            former for former in self._guests if (former.name, former.incarnation) == (hello.name, hello.incarnation)
        ]:
            self._dismiss(former)
            await former.left.wait()
        self._guests.add(guest)
        stream.post(OutgoingMessage(frame(Welcome())))
        return guest

    async def _attend_guest(self, guest: Guest) -> None:
        while True:
            message = await guest.stream.message()
            if isinstance(message, Write):
                if message.notification is not None and len(message.notification) > MAX_NOTIFICATION_BYTES:
                    raise StreamBrokenError(
                        f"a notification of {len(message.notification)} bytes, limit {MAX_NOTIFICATION_BYTES}"
                    )
                landed = await self._receive(guest, message)
                if guest not in self._guests:
                    raise StreamFinishedError("it was fenced")
                if landed and message.notification is not None:
                    self._on_event(NotificationArrived(guest.name, message.notification))
                self._answer(guest, OutgoingMessage(frame(OperationEnded(message.op, landed))))
            elif isinstance(message, ReadRequest | ReadWordRequest | ReadOver):
                answer = self._serve_read(guest, message)
                if answer is not None:
                    self._answer(guest, answer)
            else:
                raise StreamBrokenError(f"unexpected message from the peer: {type(message).__name__}")

    def _answer(self, guest: Guest, outgoing: OutgoingMessage) -> None:
        if not guest.stream.post(outgoing):
            raise StreamBrokenError("it does not read the answers to its requests")

    def _dismiss(self, guest: Guest) -> None:
        """Dismiss a guest: nothing more of it lands. It sees its stream end once nothing of it moves."""
        self._guests.discard(guest)
        moving = [motion for motion in self._motions if motion.owner is guest]
        for motion in moving:
            motion.halt()
        if not moving:
            guest.stream.close()

    def _welcome(self, guest: Guest, generation: int) -> bool:
        """True if a WRITE of this guest may reach memory of this generation, as of now."""
        return guest in self._guests and generation > self._floors.get(guest.name, -1)

    async def _move(self, motion: Motion) -> bool:
        """Run the motion. True if all of it has landed without being halted in between."""
        self._motions.add(motion)
        try:
            await motion.run()
        finally:
            self._motions.discard(motion)
            self._waits.ended(motion)
        return motion.landed


def _is_name(name: str) -> bool:
    """True if this may stand in a log."""
    return 0 < len(name) <= MAX_NAME_BYTES and name.isprintable()
