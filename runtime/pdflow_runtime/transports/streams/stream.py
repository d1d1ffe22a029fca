"""A connected socket as a stream: messages and payloads in and out, with no more copies than the kernel's own.

The stream decides how bytes are queued, sent and received in trio's thread, and when it is broken; messages are
interpreted by its owner. Reading never waits for writing: each has its own task, so two agents cannot block each other.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

import trio

from pdflow.protocol.wire.malformed import Malformed
from pdflow_runtime.tls_socket import TlsSocket, failure_text, is_sending
from pdflow_runtime.transports.streams.messages import LENGTH_BYTES, MAX_MESSAGE_BYTES, Message, parse

MAX_OUTGOING: Final = 4096
"""The most messages that wait to be sent on one stream; beyond it the peer does not read what it asked for."""
VIEWS_PER_CALL: Final = 512
"""Half of what Linux takes in one call (IOV_MAX)."""
BUFFER_BYTES: Final = 64 << 10
BYTES_BETWEEN_CHECKPOINTS: Final = 1 << 20
"""The bytes that may be received before other tasks run: some 0.3 ms."""
BYTES_PER_RECEIVE: Final = 1 << 20


class StreamBrokenError(Exception):
    """Raised when no more can be read from this stream, or what was read is no message."""


class StreamFinishedError(StreamBrokenError):
    """Raised when the peer's end was closed in order: by the peer, or by its process's death."""


class StreamLostError(StreamBrokenError):
    """Raised when the connection failed; what the other end has received is not known."""


class OutgoingMessage:
    """A message and the payload behind it, sent as a whole. `op` is the operation by which it can be taken back."""

    __slots__ = ("begun", "op", "views")

    def __init__(self, message: bytes, payload: Iterable[memoryview] = (), op: int | None = None) -> None:
        self.views = deque([memoryview(message), *payload])
        self.op = op
        self.begun = False


class SocketStream:
    """A stream over a non-blocking, connected socket, which it owns. `pump` must run for anything large to be sent."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock: Final = sock
        self.closed = False
        self._outgoing: deque[OutgoingMessage] = deque()
        self._bell = trio.Event()
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0
        self._since_checkpoint = 0
        self._lost = False

    async def secure(self) -> None:
        """Complete the handshake of TLS, if the socket uses it. StreamBrokenError if that fails."""
        if isinstance(self.sock, TlsSocket):
            try:
                await self.sock.handshake()
            except trio.ClosedResourceError:
                raise StreamBrokenError("closed by this side") from None
            except OSError as error:
                raise StreamLostError(f"no TLS: {_reason(error)}") from None

    # Out.

    def post(self, outgoing: OutgoingMessage) -> bool:
        """Send what the socket takes now, the rest when it can. False if too much waits already, or it is closed."""
        if self.closed or len(self._outgoing) >= MAX_OUTGOING:
            return False
        self._outgoing.append(outgoing)
        if len(self._outgoing) == 1 and len(outgoing.views) == 1:
            self._send()  # A task switch costs more than the call.
        if self._outgoing:
            self._bell.set()
        return True

    def take_back(self, op: int) -> bool:
        """Take back the message of this operation, if none of it has been sent: it never is, then. False otherwise."""
        for at, outgoing in enumerate(self._outgoing):
            if outgoing.op == op:
                if outgoing.begun:
                    return False
                del self._outgoing[at]
                return True
        return False

    async def pump(self) -> None:
        """Send what `post` could not, for as long as it runs."""
        while not self.closed:
            try:
                await self.drain()
            except trio.ClosedResourceError:
                return
            self._bell = trio.Event()
            await self._bell.wait()

    async def drain(self) -> None:
        """Send what `post` could not. trio.ClosedResourceError if the stream is closed meanwhile."""
        while self._outgoing:
            await trio.lowlevel.wait_writable(self.sock)
            if self._outgoing:  # They may have been taken back meanwhile.
                self._send()

    def end_sending(self) -> None:
        """Tell the peer that nothing follows. A message that was only partly sent stays so: the peer drops it."""
        self._outgoing.clear()
        if not self.closed:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._outgoing.clear()
            trio.lowlevel.notify_closing(self.sock)
            self.sock.close()

    def _send(self) -> None:
        """Send as much as one call takes. An error is left to the reader, which meets it too, behind all that came
        before it."""
        outgoing = self._outgoing[0]
        views = outgoing.views
        try:
            sent = self.sock.sendmsg(list(islice(views, VIEWS_PER_CALL)))
        except BlockingIOError:
            outgoing.begun = outgoing.begun or is_sending(self.sock)
            return
        except OSError:
            self._lost = True  # The kernel tells an error once, here or there; the reader must not take it for an end.
            self._outgoing.clear()
            return
        outgoing.begun = outgoing.begun or sent > 0
        while views and sent >= len(views[0]):
            sent -= len(views.popleft())
        if sent:
            views[0] = views[0][sent:]
        if not views:
            self._outgoing.popleft()

    # In.

    async def message(self, most_bytes: int = MAX_MESSAGE_BYTES) -> Message:
        """Return the next message. Raises StreamBrokenError, also for bytes that are none."""
        await self._gather(LENGTH_BYTES, at_border=True)
        length = int.from_bytes(self._take(LENGTH_BYTES), "big")
        if not 0 < length <= most_bytes:
            raise StreamBrokenError(f"a message of {length} bytes exceeds the limit of {most_bytes}")
        if length <= BUFFER_BYTES:
            await self._gather(length)
            body: memoryview | bytearray = self._take(length)
        else:
            body = bytearray(length)
            await self.fill([memoryview(body)])
        found = parse(body)
        if isinstance(found, Malformed):
            raise StreamBrokenError(found.reason)
        return found

    async def fill(self, views: Iterable[memoryview], keep_reading: Callable[[], bool] = lambda: True) -> bool:
        """Receive straight into these views, in their order, as long as the bytes are wanted. True if they were to the
        end.

        `keep_reading` is asked before every call that receives. Bytes that come after it has said no are discarded.
        """
        waiting = deque(view for view in views if len(view))
        while waiting:
            if self._start == self._end:
                received = await self._receive(list(islice(waiting, VIEWS_PER_CALL)), keep_reading=keep_reading)
            elif keep_reading():
                taken = self._take(min(len(waiting[0]), self._end - self._start))
                waiting[0][: len(taken)] = taken
                received = len(taken)
            else:
                received = 0
            if not received:
                await self.discard(sum(map(len, waiting)))
                return False
            while waiting and received >= len(waiting[0]):
                received -= len(waiting.popleft())
            if received:
                waiting[0] = waiting[0][received:]
        return True

    async def wait_for_end(self) -> bool:
        """Discard what the peer sends until the stream ends. True if it ended in order."""
        try:
            while True:
                await self.discard(BUFFER_BYTES)
        except StreamBrokenError as broken:
            return isinstance(broken, StreamFinishedError)

    async def discard(self, nbytes: int) -> None:
        while nbytes:
            if self._start == self._end:
                self._start = 0
                self._end = await self._receive([self._buffer])
            nbytes -= len(self._take(min(nbytes, self._end - self._start)))

    def _take(self, nbytes: int) -> memoryview:
        start = self._start
        self._start = start + nbytes
        return self._buffer[start : start + nbytes]

    async def _gather(self, nbytes: int, at_border: bool = False) -> None:
        """Have so many bytes in the buffer, in one run."""
        have = self._end - self._start
        if have >= nbytes:
            return
        if self._start + nbytes > BUFFER_BYTES or not have:
            self._buffer[:have] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, have
        while self._end - self._start < nbytes:
            border = at_border and self._start == self._end
            self._end += await self._receive([self._buffer[self._end :]], border)

    async def _receive(
        self, views: list[memoryview], at_border: bool = False, keep_reading: Callable[[], bool] = lambda: True
    ) -> int:
        """Receive at least one byte into these views; return 0 if none is wanted.

        Other tasks run when it has to wait, and now and then besides.
        """
        if self._since_checkpoint >= BYTES_BETWEEN_CHECKPOINTS:
            self._since_checkpoint = 0
            await trio.lowlevel.checkpoint()
        while keep_reading():
            try:
                received = self.sock.recvmsg_into(views)[0] if len(views) > 1 else self._receive_one(views[0])
            except BlockingIOError:
                self._since_checkpoint = 0
                await self._readable()
            except OSError as error:
                raise StreamLostError(f"the connection broke: {_reason(error)}") from None
            else:
                if not received:
                    if self._lost:
                        raise StreamLostError("the connection broke while sending")
                    raise StreamFinishedError(
                        "the peer closed the connection" + ("" if at_border else " in the middle of a message")
                    )
                self._since_checkpoint += max(received, BYTES_BETWEEN_CHECKPOINTS // 64)
                return received
        return 0

    def _receive_one(self, view: memoryview) -> int:
        return self.sock.recv_into(view, min(len(view), BYTES_PER_RECEIVE))

    async def _readable(self) -> None:
        try:
            await trio.lowlevel.wait_readable(self.sock)
        except trio.ClosedResourceError:
            raise StreamBrokenError("closed by this side") from None


def _reason(error: OSError) -> str:
    return failure_text(error, "tls_ca", "peer") if isinstance(error, ssl.SSLError) else error.strerror or str(error)
