"""Relaying a server's answer to a client: its bytes as they came, framing included, and its head without hop-by-hop
headers.

The parser has seen every byte before the client does, so that what is passed on is well formed as far as it goes. A
stream of events that breaks off between two chunks can still be ended properly (`break_off`), with an error that the
client reads; anything else that breaks off is cut, which a client of HTTP/1.1 notices.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Final

from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import Header, Headers
from pdflow_runtime.http.openai.answers import DONE, error_event
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.http.response import Response

HOP: Final = frozenset(
    (
        b"connection",
        b"content-length",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-connection",
        b"server-timing",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""Headers of one hop (RFC 9110 7.6.1), those that frame its message, which each hop says anew, and an engine's stages,
which are for the router."""


async def relay(
    response: Response, responder: Responder, headers: Headers = (), tap: Callable[[bytes], None] | None = None
) -> None:
    """Pass the response on, with `headers` added; `tap` is called with each piece before the client gets it. Where the
    responder has begun, the response is the rest of a stream.

    UpstreamError where it breaks off; the responder has begun then, since the head was here.
    """
    kept = (*(header for header in response.headers if header[0] not in HOP), *headers)
    if not _can_pass(response, responder):
        await _relay_decoded(response, responder, kept, tap)
        return

    def take(data: bytes) -> bool:
        response.accept(data)
        if tap:
            tap(data)
        return responder.send_now(data, response.complete) and not response.complete

    if responder.begun:
        responder.go_on_verbatim()
    else:
        await responder.begin_verbatim(response.status, (*kept, *response.framing))
    try:
        while not response.complete:
            await response.carry(take)
            await responder.flush()
    finally:
        # It broke off, or was cancelled: another response may be the rest of the stream.
        if not response.complete and _is_events(response) and response.broke_between_chunks():
            responder.take_over_framing()
    if not responder.done:
        await responder.end()


async def break_off(responder: Responder, error: OpenAIError) -> None:
    """Send the client the error, if there still is a way. The handler then returns, and an answer that was not ended is
    cut off."""
    if not responder.begun:
        await responder.reply(error.status, error.headers, error.body())
    elif responder.framing:
        await responder.send(error_event(error) + DONE)
        await responder.end()


async def _relay_decoded(
    response: Response, responder: Responder, headers: tuple[Header, ...], tap: Callable[[bytes], None] | None
) -> None:
    if not responder.begun:
        await responder.begin(response.status, headers)
    async with aclosing(response.pieces()) as pieces:
        async for data in pieces:
            if tap:
                tap(data)
            await responder.send(data)
    await responder.end()


def _can_pass(response: Response, responder: Responder) -> bool:
    """True if the body says where it ends, in a way that the client understands."""
    if responder.begun:
        return response.chunked and responder.framing
    return bool(response.framing) and (responder.chunked_ok or not response.chunked)


def _is_events(response: Response) -> bool:
    return (response.header(b"content-type") or b"").startswith(b"text/event-stream")
