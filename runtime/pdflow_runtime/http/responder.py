"""The answer to one request: whole, streamed, or passed on as another server framed it.

A client that is gone is never an exception here: the handler's scope is cancelled, and a send is then a checkpoint that
says so. A handler that must settle something first shields itself (`trio.CancelScope(shield=True)`), and what it
sends meanwhile goes nowhere. The head of a stream waits for the first bytes of its body, and leaves with them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from enum import Enum, auto

import trio
from trio.lowlevel import wait_writable

from pdflow.protocol.values import Instant, S
from pdflow_runtime.clock import now_ns
from pdflow_runtime.http.messages import Header, HttpRequest, head, status_line
from pdflow_runtime.http.sockets import send_now

_KEEP_ALIVE: Header = (b"connection", b"keep-alive")
_CLOSE: Header = (b"connection", b"close")
_CHUNKED: Header = (b"transfer-encoding", b"chunked")
_FAIR = 32
"""Sends in a row without a checkpoint; then other tasks have a turn."""


class _Stage(Enum):
    WAITING = auto()
    CHUNKS = auto()
    """We frame what is sent."""
    VERBATIM = auto()
    """Framed elsewhere, or ended by the connection's end."""
    DONE = auto()


class Responder:
    """Sends the answer: `reply`, or `begin`, `send`... and `end`. Any other order is a RuntimeError: a mistake of the
    caller."""

    def __init__(
        self,
        sock: socket.socket,
        request: HttpRequest,
        scope: trio.CancelScope,
        write_s: float,
        on_stall: Callable[[bool], None],
    ) -> None:
        self.gone = False
        """Whether the client hung up, or took nothing for too long."""
        self.keep_alive = request.keep_alive
        """Whether the connection may go on after this answer; False is written in the head, if that has not left."""
        self.status = 0
        """The status that was sent; 0: none yet."""
        self.begun_ns = now_ns()
        """When the request was whole."""
        self.details: object = None
        """What the handler leaves for the server's observer (`ended.py`)."""
        self.key_name = ""
        """The name of the API key that the client has sent; empty if none is needed."""
        self._sock = sock
        self._request = request
        self._scope = scope
        self._write_s = write_s
        self._on_stall = on_stall
        """Is called when the client takes no more for now, and when it takes more or is gone."""
        self._stalled_ns: Instant | None = None
        """Since when the client has taken nothing."""
        self._writing = trio.CancelScope()
        self._stage = _Stage.WAITING
        self._held = b""
        self._in_a_row = 0

    @property
    def waits_for_client(self) -> bool:
        """Whether nothing more is received for the client, until it has taken what is there."""
        return self._stalled_ns is not None

    @property
    def begun(self) -> bool:
        return self._stage is not _Stage.WAITING

    @property
    def stalled_s(self) -> float:
        """How long the client has taken nothing of what is being sent."""
        return 0.0 if self._stalled_ns is None else (now_ns() - self._stalled_ns) / S

    @property
    def done(self) -> bool:
        return self._stage is _Stage.DONE

    @property
    def framing(self) -> bool:
        """True if `send` frames what is sent: the stream can be ended at any moment."""
        return self._stage is _Stage.CHUNKS

    @property
    def chunked_ok(self) -> bool:
        """True if the client understands chunks."""
        return self._request.chunked_ok

    async def reply(self, status: int, headers: tuple[Header, ...] = (), body: bytes = b"") -> None:
        """Send a whole answer."""
        self._expect(_Stage.WAITING)
        bodiless = status == 204 or status == 304
        framing = () if bodiless else ((b"content-length", b"%d" % len(body)),)
        data = self._head(status, (*headers, *framing))
        self._stage = _Stage.DONE
        await self._push(data if bodiless or self._request.method == "HEAD" else data + body)

    async def begin(self, status: int, headers: tuple[Header, ...] = ()) -> None:
        """Begin a stream whose pieces `send` frames: chunks, or for an HTTP/1.0 client up to the connection's end."""
        self._expect(_Stage.WAITING)
        if self._request.chunked_ok:
            self._held = self._head(status, (*headers, _CHUNKED))
            self._stage = _Stage.CHUNKS
        else:
            self.keep_alive = False
            self._held = self._head(status, headers)
            self._stage = _Stage.VERBATIM

    async def begin_verbatim(self, status: int, headers: tuple[Header, ...]) -> None:
        """Begin a stream that carries its framing with it: `headers` name the framing, `send` passes bytes on
        untouched."""
        self._expect(_Stage.WAITING)
        self._held = self._head(status, headers)
        self._stage = _Stage.VERBATIM

    async def send(self, data: bytes) -> None:
        if self._stage is _Stage.CHUNKS:
            if not data:
                return  # an empty chunk would be the end
            data = b"%x\r\n%b\r\n" % (len(data), data)
        else:
            self._expect(_Stage.VERBATIM)
        if self._held:
            data, self._held = self._held + data, b""
        await self._push(data)

    def begin_now(self, data: bytes) -> None:
        """Send the first piece of the stream after `begin`, as far as the client takes it at once: the rest leaves with
        the next."""
        stage, self._stage = self._stage, _Stage.VERBATIM
        self.send_now(b"%x\r\n%b\r\n" % (len(data), data) if stage is _Stage.CHUNKS else data, False)
        self._stage = stage

    def go_on_verbatim(self) -> None:
        """Stop framing: what is sent from here on brings its own framing, in chunks as all that was sent before."""
        self._expect(_Stage.CHUNKS)
        self._stage = _Stage.VERBATIM

    def send_now(self, data: bytes, last: bool) -> bool:
        """Pass these bytes on, verbatim, as far as the client takes them at once; False if `flush` has to send the
        rest.

        With the last of them sent, the answer is done at once: a client that has it all may hang up.
        """
        self._expect(_Stage.VERBATIM)
        if self._held:
            data = self._held + data
        sent = 0
        if not self.gone:
            try:
                sent = send_now(self._sock, data)
            except OSError:
                self.lose()
        self._held = data[sent:]
        if last and not self._held:
            self._stage = _Stage.DONE
        return not self._held

    async def flush(self) -> None:
        """Send what is held back. What a cancellation leaves of it is still held, ahead of what is sent next."""
        while self._held and not self.gone:
            await self._writable()
            if not self.gone:
                self._send_held()

    async def _writable(self) -> None:
        """Wait until the client takes more. It is gone if it takes nothing for too long."""
        self._on_stall(True)
        self._stalled_ns = now_ns()
        try:
            with trio.move_on_after(self._write_s) as self._writing:
                await wait_writable(self._sock)
        finally:
            self._stalled_ns = None
            self._on_stall(False)
        if self._writing.cancelled_caught:
            self.lose()

    def _send_held(self) -> None:
        try:
            self._held = self._held[send_now(self._sock, self._held) :]
        except OSError:
            self.lose()

    async def end(self) -> None:
        """End the stream, which is whole. A stream that is not ended is cut off with its connection, by which the
        client sees that it is not whole."""
        last = b"0\r\n\r\n" if self._stage is _Stage.CHUNKS else b""
        if not last:
            self._expect(_Stage.VERBATIM)
        data, self._held = self._held + last, b""
        self._stage = _Stage.DONE
        if data:
            await self._push(data)

    def take_over_framing(self) -> None:
        """Frame what is sent from here on: after a verbatim stream of chunks whose source broke off between two of
        them."""
        self._expect(_Stage.VERBATIM)
        self._stage = _Stage.CHUNKS

    def lose(self) -> None:
        """Note that the client is gone, and cancel its handler. A handler that has answered in whole may still clean
        up."""
        self.gone = True
        self._writing.cancel()
        if not self.done:
            self._scope.cancel()

    def _expect(self, stage: _Stage) -> None:
        if self._stage is not stage:
            raise RuntimeError(f"a response cannot go from {self._stage.name.lower()} to {stage.name.lower()}")

    def _head(self, status: int, headers: tuple[Header, ...]) -> bytes:
        self.status = status
        return head(status_line(status), (*headers, _KEEP_ALIVE if self.keep_alive else _CLOSE))

    async def _push(self, data: bytes) -> None:
        if not self.gone:
            try:
                sent = send_now(self._sock, data)
                if sent < len(data):
                    await self._push_slowly(memoryview(data)[sent:])
            except OSError:
                self.lose()
        self._in_a_row += 1
        if self._in_a_row >= _FAIR or self.gone:
            self._in_a_row = 0
            await trio.lowlevel.checkpoint()

    async def _push_slowly(self, rest: memoryview) -> None:
        """Send the rest as the client takes it. What a cancellation leaves of it is held, ahead of what is sent next:
        an error that ends a stream must not get into the middle of a chunk."""
        try:
            while rest:
                await self._writable()
                if self.gone:
                    return
                rest = rest[send_now(self._sock, rest) :]
        finally:
            self._held = bytes(rest)
