"""What the HTTP tests share: a server on loopback, and clients that speak bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import trio

from pdflow_runtime.http.ended import Observer, ignore
from pdflow_runtime.http.messages import HttpLimits, HttpRequest
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.http.server import Server, serve_http
from pdflow_runtime.http.sockets import listen

LOCAL = "127.0.0.1"


@asynccontextmanager
async def serving(
    handler: Callable[[HttpRequest, Responder], Awaitable[None]],
    limits: HttpLimits | None = None,
    ended: Observer = ignore,
) -> AsyncIterator[Server]:
    async with trio.open_nursery() as nursery:
        yield await nursery.start(partial(serve_http, ended=ended), listen(LOCAL, 0), handler, limits)
        nursery.cancel_scope.cancel()


def post(body: bytes, path: bytes = b"/p", headers: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n%b" % (path, headers, len(body), body)


async def connected(server: Server, streams: AsyncExitStack) -> trio.SocketStream:
    return await streams.enter_async_context(await trio.open_tcp_stream(LOCAL, server.port))


async def echo(request: HttpRequest, responder: Responder) -> None:
    """Answers with what it was asked, in the order of its parts."""
    echoed = f"{request.method} {request.path} {request.query} ".encode() + request.body
    await responder.reply(200, (), echoed)


async def response_to(port: int, data: bytes) -> bytes:
    """All that a server says to these bytes until it closes."""
    stream = await trio.open_tcp_stream(LOCAL, port)
    async with stream:
        await stream.send_all(data)
        return b"".join([piece async for piece in stream])


async def until(stream: trio.SocketStream, end: bytes) -> bytes:
    """What comes up to and with `end`."""
    got = b""
    while not got.endswith(end):
        piece = await stream.receive_some()
        assert piece, got
        got += piece
    return got


@asynccontextmanager
async def scripted(*answers: bytes, hold: bool = False) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server that reads one request per connection, says these bytes and closes; its port, and what it was asked.

    With `hold` it answers the next request on the same connection; no bytes then still mean a close.
    """
    left = list(answers)
    asked: list[bytes] = []

    async def attend(stream: trio.SocketStream) -> None:
        async with stream:
            while left:
                try:
                    got = await stream.receive_some()
                except trio.BrokenResourceError:
                    return
                if not got:
                    return
                asked.append(got)
                answer = left.pop(0)
                if answer:
                    await stream.send_all(answer)
                if not hold or not answer:
                    return
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host=LOCAL)
        nursery.start_soon(trio.serve_listeners, attend, listeners)
        yield listeners[0].socket.getsockname()[1], asked
        nursery.cancel_scope.cancel()
