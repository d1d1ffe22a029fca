"""A client's connection: a task that reads and a task that answers, so that a hang-up is seen while an answer runs. The
reader parses what it receives, unless an answer is due; what has come meanwhile, the task that answers parses behind
the answer.

The reader is the only one that receives, also while a request is being answered. At the end of the stream it cancels
the answer. A client that shuts down its sending half has therefore gone; no client of this API does that. What comes
behind the request that is being answered is kept unparsed, and no more of it is read than a limit: a client that sends
further requests waits for its answers, and one with more than that on their way is found gone only when it is written
to.
"""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from enum import Enum, auto
from typing import Protocol

import trio

from pdflow.protocol.values import S
from pdflow_runtime.clock import deadline_of, now_ns
from pdflow_runtime.http.descriptors import LineASecond
from pdflow_runtime.http.ended import UNKNOWN, EndedRequest, Observer, ignore
from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import HttpLimits, HttpRequest, Refusal, head, status_line
from pdflow_runtime.http.parsing import RequestParser
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.http.sockets import RECEIVE_BYTES, close, receive, send_all, send_now, silent, system_reason
from pdflow_runtime.tls_socket import PlainHttpError, TlsSocket, is_refusal

_log = logging.getLogger(__name__)

_LINGER_S = 2.0
"""After a refusal, what the client still sends is thrown away so long: an early close would be a reset, which takes
the answer with it (RFC 9112 9.6)."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_GIVES_WAY = Refusal(503, "all connections are in use: this one was the longest without a whole request; send it again")
_NOT_TLS = Refusal(400, "this port uses TLS: send the request to https://")
_NO_CERTIFICATE = Refusal(
    401,
    "this port uses TLS, and clients must present a certificate of the cluster's authority: set serve.tls_cert, "
    "tls_key and tls_ca where the request comes from, and serve.cluster_port, if this is a router's",
)
_REJECTIONS = LineASecond()


class _Due(Enum):
    """What the client must send in time."""

    NOTHING = auto()
    """An answer is due first."""
    REQUEST = auto()
    HEAD = auto()
    """The rest of a head."""
    BODY = auto()
    """The rest of a body."""


class ConnectionObserver(Protocol):
    """Is notified of what a connection does: the server's table (`connection_table.py`)."""

    def waits(self, connection: Connection, /) -> None: ...
    def is_answered(self, connection: Connection, /) -> None: ...
    def holds(self, connection: Connection, nbytes: int, /) -> None: ...
    def stalls(self, connection: Connection, stalled: bool, /) -> None: ...


class Connection:
    def __init__(
        self,
        sock: socket.socket,
        handler: Callable[[HttpRequest, Responder], Awaitable[None]],
        limits: HttpLimits,
        observer: ConnectionObserver,
        address: str = "",
        client: str = "",
        ended: Observer = ignore,
    ) -> None:
        self.address = address
        """That of the client, by which connections are counted."""
        self._client = client
        self._report = ended
        self._observer = observer
        self._scope = trio.CancelScope()
        self._sock = sock
        self._handler = handler
        self._limits = limits
        self._parser = RequestParser(limits)
        self._handshaking = trio.CancelScope()
        self._timeout = trio.CancelScope()
        self._due = _Due.NOTHING
        self._request_deadline = math.inf
        """By which the request that has begun must be whole."""
        self._answering: Responder | None = None
        self._ended = False
        """Whether the input has ended."""
        self._draining = False
        self._news = trio.Event()
        self._behind = b""
        """What has come behind the request that is being answered."""
        self._read_all = trio.Event()
        """Set when the reader has ended."""
        self._answered = trio.Event()
        """Set after an answer, if the reader waits for that."""

    def drain(self) -> None:
        """Answer what the client has begun to send, and nothing after it."""
        self._draining = True
        if self._answering:
            self._answering.keep_alive = False
        elif not (self._parser.ready or self._parser.within or self._behind) and silent(self._sock):
            self._handshaking.cancel()
            self._end()

    @property
    def unread(self) -> bool:
        """Whether the client has sent what was not read yet, or has disconnected."""
        return bool(self._behind) or not silent(self._sock)

    def give_way(self) -> None:
        """End at once, for another client."""
        if self._parser.within:
            with suppress(OSError):
                send_now(self._sock, refused(_GIVES_WAY))
            self._report(refusal_of(self._client, _GIVES_WAY))
        if self._answering:
            self._answering.lose()
        self._scope.cancel()

    async def run(self) -> None:
        try:
            with self._scope:
                if isinstance(self._sock, TlsSocket) and not await self._secured(self._sock):
                    return
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._read)
                    await self._answer()
                    nursery.cancel_scope.cancel()
        finally:
            self._parser.close()
            close(self._sock)

    async def _secured(self, sock: TlsSocket) -> bool:
        """Complete the TLS handshake; False if the client does not do so in time, or before the server drains."""
        self._handshaking.deadline = _after(self._limits.handshake_s)
        with self._handshaking:
            try:
                await sock.handshake()
            except PlainHttpError:
                sock.send_plain(refused(_NO_CERTIFICATE if sock.needs_certificate else _NOT_TLS))
            except OSError as error:
                if not (sock.needs_certificate and is_refusal(error)):
                    _log.debug("TLS handshake of %s failed: %s", self.address or "a client", error)
                elif (more := _REJECTIONS.more()) is not None:
                    _log.warning(
                        "rejected a connection from %s: %s%s; clients must present a certificate of the authority in "
                        "serve.tls_ca",
                        *(self._client, system_reason(error), more),
                    )
            else:
                return True
        return False

    async def _read(self) -> None:
        parser = self._parser
        self._set_deadline()
        with self._timeout:
            while await self._read_once():
                self._set_deadline()
        if self._timeout.cancelled_caught and parser.within and not self._ended:
            what, most_s = ("head", self._limits.head_s) if parser.in_head else ("body", self._limits.request_s)
            parser.give_up(Refusal(408, f"the request's {what} was not complete within {most_s:g} s"))
        self._end()
        self._read_all.set()

    async def _read_once(self) -> bool:
        """Receive once, and parse unless an answer is due; True if more may come."""
        try:
            received = await self._receive()
        except OSError:
            received = b""
        if not received:
            self._parser.ready.clear()
            self._behind = b""
            if self._answering:
                self._answering.lose()
            return False
        self._behind += received
        return self._is_busy or await self._parse()

    async def _receive(self) -> bytes:
        while (most := self._most()) <= 0:
            self._answered = trio.Event()
            await self._answered.wait()
        return await receive(self._sock, most)

    def _most(self) -> int:
        """Return how many bytes may be received now."""
        return RECEIVE_BYTES if self._parser.arriving_bytes else self._limits.behind_bytes - len(self._behind)

    async def _parse(self) -> bool:
        """Parse what has come, up to the end of a request; True if more may come."""
        parser = self._parser
        self._behind = self._behind[parser.feed(self._behind) :]
        if not parser.ready:
            self._observer.holds(self, parser.arriving_bytes)
            return await self._continue()
        item = parser.ready[0]
        if isinstance(item, HttpRequest):
            self._observer.is_answered(self)
        self._news.set()
        return isinstance(item, HttpRequest)

    async def _continue(self) -> bool:
        """Let the client send its body, if it waits for that; True if the connection has not broken."""
        parser = self._parser
        if parser.expects_continue:
            parser.expects_continue = False
            with trio.move_on_after(self._limits.write_s), suppress(OSError):
                await send_all(self._sock, _CONTINUE)
                return True
            return False
        return True

    @property
    def _is_busy(self) -> bool:
        """Whether an answer is due before anything else is parsed."""
        return self._answering is not None or bool(self._parser.ready)

    def _set_deadline(self) -> None:
        """Set the time by which the client must have sent what is due: no byte of it puts that off."""
        before, self._due = self._due, self._what_is_due()
        if self._due is before:
            return
        match self._due:
            case _Due.NOTHING:
                self._timeout.deadline = math.inf
            case _Due.REQUEST:
                self._timeout.deadline = _after(self._limits.idle_s)
            case _Due.HEAD:
                self._request_deadline = _after(self._limits.request_s)
                self._timeout.deadline = min(_after(self._limits.head_s), self._request_deadline)
            case _Due.BODY:
                if before is not _Due.HEAD:
                    self._request_deadline = _after(self._limits.request_s)
                self._timeout.deadline = self._request_deadline

    def _what_is_due(self) -> _Due:
        if self._is_busy:
            return _Due.NOTHING
        if not self._parser.within:
            return _Due.REQUEST
        return _Due.HEAD if self._parser.in_head else _Due.BODY

    def _end(self) -> None:
        self._ended = True
        self._news.set()

    async def _answer(self) -> None:
        ready = self._parser.ready
        while True:
            while not ready:
                if self._ended:
                    return
                self._news = trio.Event()
                await self._news.wait()
            item = ready.popleft()
            if isinstance(item, Refusal):
                await self._refuse(item)
                return
            if not await self._answer_one(item):
                return

    async def _answer_one(self, request: HttpRequest) -> bool:
        """Answer one request; True if the connection may go on."""
        with trio.CancelScope() as scope:
            responder = Responder(self._sock, request, scope, self._limits.write_s, self._on_stall)
            responder.keep_alive = request.keep_alive and not self._draining
            self._answering = responder
            try:
                await self._handle(request, responder)
            finally:
                # Also of an answer that the end of the connection, or of the process, ends.
                self._report_answered(request, responder)
        self._answering = None
        self._observer.waits(self)
        goes_on = responder.done and responder.keep_alive and not responder.gone
        if goes_on and self._behind and not await self._parse():
            self._end()
            self._timeout.cancel()
        self._set_deadline()
        self._answered.set()
        if self._parser.ready:
            await trio.lowlevel.checkpoint()  # many requests that come at once must not keep others waiting
        return goes_on

    async def _handle(self, request: HttpRequest, responder: Responder) -> None:
        try:
            await self._handler(request, responder)
        except Exception as error:
            await self._answer_failure(request, responder, error)
        if not responder.begun:
            _log.error(
                "%s %s: the handler returned without an answer, which is a bug of pdflow", request.method, request.path
            )
            await _answer_with(responder, OpenAIError(500, "internal error: the handler returned without an answer"))

    def _report_answered(self, request: HttpRequest, responder: Responder) -> None:
        begun_ns, details = responder.begun_ns, responder.details
        given_id = (request.header(b"x-request-id") or b"").decode("latin-1")
        asked = (self._client, request.method, request.path)
        self._report(EndedRequest(*asked, responder.status, begun_ns, now_ns(), given_id, details, responder.key_name))

    def _on_stall(self, stalled: bool) -> None:
        self._observer.stalls(self, stalled)

    async def _answer_failure(self, request: HttpRequest, responder: Responder, error: Exception) -> None:
        """Log the failure of a request, and answer with an error if nothing was sent yet: the server goes on."""
        cause: BaseException = error
        while isinstance(cause, BaseExceptionGroup) and len(cause.exceptions) == 1:
            cause = cause.exceptions[0]
        if not isinstance(cause, OpenAIError):
            _log.error("%s %s: internal error", request.method, request.path, exc_info=error)
            cause = OpenAIError(500, "internal error")
        if not responder.begun:
            await _answer_with(responder, cause)

    async def _refuse(self, refusal: Refusal) -> None:
        self._report(refusal_of(self._client, refusal))
        with trio.move_on_after(self._limits.write_s), suppress(OSError):
            await send_all(self._sock, refused(refusal))
            self._sock.shutdown(socket.SHUT_WR)
        with trio.move_on_after(_LINGER_S), suppress(OSError):
            await self._read_all.wait()  # only one task may receive
            while await receive(self._sock):
                pass


def refusal_of(client: str, refusal: Refusal) -> EndedRequest:
    """Return the report of a request that is refused now."""
    now = now_ns()
    return EndedRequest(client, UNKNOWN, UNKNOWN, refusal.status, now, now)


def refused(refusal: Refusal) -> bytes:
    """Return the answer that a refusal is."""
    error = OpenAIError(refusal.status, refusal.message)
    body = error.body()
    headers = (*error.headers, (b"content-length", b"%d" % len(body)), (b"connection", b"close"))
    return head(status_line(refusal.status), headers) + body


async def _answer_with(responder: Responder, error: OpenAIError) -> None:
    await responder.reply(error.status, error.headers, error.body())


def _after(seconds: float) -> float:
    return deadline_of(now_ns() + int(seconds * S))
