"""Requests that a server sends to itself, without a connection of its own listener: a pair of sockets takes its place.

So such a request waits for nothing that the request holds for which it is sent: where all connections are in use, a
connection to the own listener would wait for its own end.
"""

from __future__ import annotations

import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import trio

from pdflow_runtime.http.descriptors import EXHAUSTION
from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import HttpRequest
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.http.response import Response, read_head
from pdflow_runtime.http.sockets import close, system_reason
from pdflow_runtime.process.processes import leaves

_REQUEST: Final = HttpRequest("POST", "", "", (), b"", keep_alive=False, chunked_ok=True)
_HEAD_BYTES: Final = 64 << 10


@asynccontextmanager
async def answered_inside(answer: Callable[[Responder], Awaitable[None]]) -> AsyncIterator[Response]:
    """Call `answer` with a responder, and yield the response that it sends. `answer` is cancelled if the context is
    left with an error. UpstreamError if it sends no whole head; OpenAIError if there are too few file descriptors."""
    ours, theirs = _pair()
    # As with a connection: `answer` is cancelled after its responder is lost, never before.
    scope = trio.CancelScope(shield=True)
    # The reader of the response decides how long it may take.
    responder = Responder(theirs, _REQUEST, scope, math.inf, lambda _: None)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_answer, answer, responder, scope, theirs)
            try:
                response = await read_head(ours, _HEAD_BYTES)
                try:
                    yield response
                finally:
                    response.close()
            except BaseException:
                responder.lose()
                raise
    finally:
        close(theirs)
        close(ours)


async def _answer(
    answer: Callable[[Responder], Awaitable[None]], responder: Responder, scope: trio.CancelScope, sock: socket.socket
) -> None:
    try:
        with scope:
            try:
                await answer(responder)
            except* OpenAIError as errors:
                if not responder.begun:
                    error = next(leaves(errors))
                    assert isinstance(error, OpenAIError)
                    await responder.reply(error.status, error.headers, error.body())
    finally:
        close(sock)


def _pair() -> tuple[socket.socket, socket.socket]:
    try:
        ours, theirs = socket.socketpair()
    except OSError as error:
        EXHAUSTION.add("answering with several choices", error)
        raise OpenAIError(503, f"the server cannot answer with several choices now: {system_reason(error)}") from error
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs
