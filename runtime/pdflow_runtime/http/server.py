"""The HTTP server: accepts connections, and drains. A single connection is handled in connection.py.

    async with trio.open_nursery() as nursery:
        server = await nursery.start(serve_http, listen("127.0.0.1", 0), handler)
        ...
        server.drain()     # the nursery ends with the last answer

`handler(request, responder)` is called once per request, one at a time on each connection. It answers through the
responder; it is cancelled when its client hangs up.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeAlias

import trio

from pdflow_runtime.http.connection import Connection, refusal_of, refused
from pdflow_runtime.http.connection_table import ConnectionTable, counted_address
from pdflow_runtime.http.descriptors import EXHAUSTED, EXHAUSTION, SATURATION
from pdflow_runtime.http.ended import Observer, ignore
from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import HttpLimits, HttpRequest, Refusal
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.http.sockets import close, send_now, tuned
from pdflow_runtime.tls_socket import TlsNow, accepted_with

RequestHandler: TypeAlias = Callable[[HttpRequest, Responder], Awaitable[None]]

_EXHAUSTED_PAUSE_S = 0.1
"""How long accepting rests where the system has no descriptor left: connections end meanwhile."""
_ACCEPTED_AT_ONCE = 64
"""Clients in one turn of the event loop. If it is busy, a turn takes tens of milliseconds, and with one client in each
the backlog would be full of those that open connections fastest."""
_TOO_MANY = Refusal(429, "too many connections from this address, and requests on all of them are being answered")


class Server:
    def __init__(
        self,
        listener: socket.socket,
        handler: RequestHandler,
        limits: HttpLimits,
        ended: Observer = ignore,
        tls: TlsNow | None = None,
    ) -> None:
        self._table = ConnectionTable(limits)
        self.connections = self._table.connections
        """Those open now."""
        self.port: int = listener.getsockname()[1]
        self.draining = False
        self._listener = listener
        self._handler = handler
        self._limits = limits
        self._report = ended
        self._tls = tls
        self._accepting = trio.CancelScope()
        self._room = trio.Event()

    def drain(self) -> None:
        """Take no new connection, end those that are idle, and the others with the answers they have begun."""
        self.draining = True
        self._accepting.cancel()
        for connection in tuple(self.connections):
            connection.drain()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            try:
                with self._accepting:
                    await self._accept(nursery)
                if self.draining:
                    self._begin_the_last(nursery)
            finally:
                close(self._listener)

    async def _accept(self, nursery: trio.Nursery) -> None:
        while True:
            await trio.lowlevel.wait_readable(self._listener)
            for _ in range(_ACCEPTED_AT_ONCE):
                await self._space()
                try:
                    accepted = self._waiting()
                except OSError as error:
                    if error.errno not in EXHAUSTED:
                        raise
                    EXHAUSTION.add("accepting a connection", error)
                    if not self._table.evict():
                        await trio.sleep(_EXHAUSTED_PAUSE_S)
                    break
                if not accepted:
                    break
                self._begin(*accepted, nursery)

    async def _space(self) -> None:
        """Wait until one more client can be connected, perhaps in place of another one; no checkpoint if it can."""
        while pause_s := self._table.pause_s():
            self._room = trio.Event()
            if pause_s == math.inf:
                SATURATION.add(self._limits.connections)
            # A client that takes nothing may be given up meanwhile.
            with trio.move_on_after(min(pause_s, self._limits.stalled_s)):
                await self._room.wait()

    def _begin_the_last(self, nursery: trio.Nursery) -> None:
        """Take the clients that had connected before the server stopped, and may have sent a request by now."""
        with suppress(OSError):
            while accepted := self._waiting():
                self._begin(*accepted, nursery)

    def _waiting(self) -> tuple[socket.socket, str] | None:
        """Accept the next client in the backlog, with its host; None if there is none."""
        try:
            sock, address = self._listener.accept()
            return sock, str(address[0])
        except (BlockingIOError, InterruptedError, ConnectionError):
            return None

    def _begin(self, sock: socket.socket, host: str, nursery: trio.Nursery) -> None:
        address = counted_address(host)
        if not self._table.make_room(address):
            with suppress(OSError):
                if self._tls is None:
                    send_now(tuned(sock), refused(_TOO_MANY))
            sock.close()
            self._report(refusal_of(host, _TOO_MANY))
            return
        sock = tuned(sock)
        if self._tls is not None:
            sock = accepted_with(self._tls(), sock)
        reporting = (address, host, self._report)
        connection = Connection(sock, self._handle, self._limits, self._table, *reporting)
        self._table.add(connection)
        if self.draining:
            connection.drain()
        nursery.start_soon(self._attend, connection)

    async def _handle(self, request: HttpRequest, responder: Responder) -> None:
        if not self._table.admits(request.path):
            SATURATION.add(self._limits.connections)
            raise OpenAIError(503, f"{self._limits.connections} requests are being answered, which is the most")
        with self._table.answering(request):
            await self._handler(request, responder)

    async def _attend(self, connection: Connection) -> None:
        try:
            await connection.run()
        finally:
            self._table.remove(connection)
            self._room.set()


async def serve_http(
    listener: socket.socket,
    handler: RequestHandler,
    limits: HttpLimits | None = None,
    *,
    ended: Observer = ignore,
    tls: TlsNow | None = None,
    task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until drained or cancelled; the listener is closed then. Starts with its Server. `ended` is called with
    each request that was answered or refused. With `tls`, clients must use TLS."""
    server = Server(listener, handler, limits or HttpLimits(), ended, tls)
    task_status.started(server)
    await server.run()
