"""A relayed answer is the upstream's, byte for byte; what breaks off is told where it can be, and cut where not."""

from __future__ import annotations

import json
import socket
import struct

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import OpenAIError, UpstreamError
from pdflow_runtime.http.messages import EVENT_STREAM, HttpRequest
from pdflow_runtime.http.relay import break_off, relay
from pdflow_runtime.http.responder import Responder
from tests.runtime.http.world import LOCAL, response_to, scripted, serving, until

GET = b"GET /p HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ONE = b"9\r\ndata: 1\n\n\r\n"


class Router:
    """Passes every request on to one port."""

    def __init__(self, port: int) -> None:
        self.client = HttpClient()
        self.port = port
        self.tapped: list[bytes] = []
        self.broke: list[UpstreamError] = []

    async def handle(self, request: HttpRequest, responder: Responder) -> None:
        try:
            async with self.client.request("GET", LOCAL, self.port, request.path) as response:
                await relay(response, responder, ((b"x-request-id", b"r1"),), self.tapped.append)
        except UpstreamError as error:
            self.broke.append(error)
            await break_off(responder, OpenAIError(502, str(error)))


async def relayed(answer: bytes, request: bytes = GET) -> tuple[bytes, bytes, Router]:
    """What the client of a router hears, head and rest, where the upstream says this."""
    async with scripted(answer) as (port, _):
        router = Router(port)
        async with serving(router.handle) as server:
            received = await response_to(server.port, request)
        router.client.close()
    head, _, body = received.partition(b"\r\n\r\n")
    return head, body, router


@pytest.mark.trio
async def test_a_whole_answer_is_passed_on_without_its_hops_headers() -> None:
    head, body, router = await relayed(
        b"HTTP/1.1 404 Not Found\r\nKeep-Alive: timeout=5\r\nConnection: keep-alive\r\n"
        b"Content-Type: application/json\r\nContent-Length: 4\r\n\r\nnone"
    )
    assert head.split(b"\r\n") == [
        b"HTTP/1.1 404 Not Found",
        b"content-type: application/json",
        b"x-request-id: r1",
        b"content-length: 4",
        b"connection: close",
    ]
    assert body == b"none"
    assert router.tapped == [b"none"]


@pytest.mark.trio
async def test_a_stream_is_passed_on_byte_for_byte() -> None:
    framed = b"3;x=y\r\nabc\r\n" + ONE + b"0\r\nX-Trailer: t\r\n\r\n"
    head, body, _ = await relayed(EVENTS + framed)
    assert b"transfer-encoding: chunked" in head
    assert body == framed


@pytest.mark.trio
async def test_pieces_leave_as_they_come() -> None:
    more = trio.Event()

    async def engine(request: HttpRequest, responder: Responder) -> None:
        await responder.begin(200, (EVENT_STREAM,))
        await responder.send(b"data: 1\n\n")
        await more.wait()
        await responder.end()

    async with serving(engine) as upstream:
        router = Router(upstream.port)
        async with serving(router.handle) as server, await trio.open_tcp_stream(LOCAL, server.port) as stream:
            await stream.send_all(GET)
            assert (await until(stream, b"1\n\n\r\n")).endswith(ONE)
            more.set()
            assert await until(stream, b"0\r\n\r\n") == b"0\r\n\r\n"
        router.client.close()


@pytest.mark.trio
async def test_a_passed_on_answer_is_done_with_its_last_byte() -> None:
    client, here = socket.socketpair()
    with client, here:
        here.setblocking(False)
        asked = HttpRequest("GET", "/", "", (), b"", True, True)
        responder = Responder(here, asked, trio.CancelScope(), 60, bool)
        await responder.begin_verbatim(200, ())
        assert responder.send_now(b"one", last=False)
        assert not responder.done
        while responder.send_now(b"x" * 1_000_000, last=True):  # until the kernel takes no more
            assert responder.done
            responder = Responder(here, asked, trio.CancelScope(), 60, bool)
            await responder.begin_verbatim(200, ())
        assert not responder.done


@pytest.mark.trio
async def test_a_slow_client_gets_all_of_it_and_holds_up_nobody() -> None:
    size = 16 << 20  # more than the kernel holds for a client that reads nothing
    text = b"".join(b"%08x" % n for n in range(size // 8))

    async def engine(request: HttpRequest, responder: Responder) -> None:
        if request.path == "/big":
            await responder.reply(200, (), text)
        else:
            await responder.reply(200, (), b"small")

    async with serving(engine) as upstream:
        router = Router(upstream.port)
        async with serving(router.handle) as server, await trio.open_tcp_stream(LOCAL, server.port) as slow:
            await slow.send_all(GET.replace(b"/p", b"/big"))
            await wait_all_tasks_blocked()
            assert (await response_to(server.port, GET)).endswith(b"small")
            received = b"".join([piece async for piece in slow])
        router.client.close()
    assert received.partition(b"\r\n\r\n")[2] == text


@pytest.mark.trio
@pytest.mark.parametrize(
    ("request_", "answer", "body"),
    [
        (b"GET /p HTTP/1.0\r\n\r\n", EVENTS + ONE + b"0\r\n\r\n", b"data: 1\n\n"),
        (GET, b"HTTP/1.0 200 OK\r\n\r\nto the end", b"a\r\nto the end\r\n0\r\n\r\n"),
    ],
    ids=["a client without chunks", "an upstream without an end"],
)
async def test_framing_that_a_side_lacks_is_made_anew(request_: bytes, answer: bytes, body: bytes) -> None:
    _, received, _ = await relayed(answer, request_)
    assert received == body


@pytest.mark.trio
async def test_an_upstream_that_sends_nothing_is_502() -> None:
    head, body, router = await relayed(b"")
    assert head.startswith(b"HTTP/1.1 502 ")
    assert json.loads(body)["error"]["type"] == "server_error"
    assert not router.broke[0].began


@pytest.mark.trio
@pytest.mark.parametrize("events", [b"", ONE, ONE + ONE])
async def test_events_that_break_off_between_chunks_end_with_an_error(events: bytes) -> None:
    _, body, router = await relayed(EVENTS + events)
    assert router.broke[0].kind == "closed"
    assert body.startswith(events)
    assert body.endswith(b"0\r\n\r\n")
    assert b'data: {"error":' in body
    assert b"data: [DONE]\n\n" in body


@pytest.mark.trio
@pytest.mark.parametrize(
    "answer",
    [
        EVENTS + ONE + b"9\r\ndata",
        EVENTS + ONE + b"9",
        EVENTS.replace(b"event-stream", b"plain") + ONE,
        b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\ndata: 1\n\n",
    ],
)
async def test_an_answer_that_breaks_off_upstream_is_closed(answer: bytes) -> None:
    _, body, router = await relayed(answer)
    assert router.broke[0].kind == "closed"
    assert body == answer.partition(b"\r\n\r\n")[2]


@pytest.mark.trio
async def test_nothing_malformed_is_passed_on() -> None:
    async with scripted(EVENTS + ONE, b"zz\r\nevil\r\n", hold=True) as (port, _):

        async def handle(request: HttpRequest, responder: Responder) -> None:
            async with router.client.request("GET", LOCAL, port, "/") as response:
                response._sock.send(b"go on")  # for the second part of the answer
                await wait_all_tasks_blocked()
                try:
                    await relay(response, responder)
                except UpstreamError as error:
                    router.broke.append(error)
                    await break_off(responder, OpenAIError(502, "broken"))

        router = Router(port)
        async with serving(handle) as server:
            received = await response_to(server.port, GET)
    assert router.broke[0].kind == "malformed"
    assert b"evil" not in received


@pytest.mark.trio
async def test_a_client_that_hangs_up_takes_the_upstream_request_with_it() -> None:
    cancelled = trio.Event()

    async def engine(request: HttpRequest, responder: Responder) -> None:
        await responder.begin(200, (EVENT_STREAM,))
        await responder.send(b"data: 1\n\n")
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    async with serving(engine) as upstream:
        router = Router(upstream.port)
        async with serving(router.handle) as server:
            async with await trio.open_tcp_stream(LOCAL, server.port) as stream:
                await stream.send_all(GET)
                await until(stream, ONE)
            await cancelled.wait()
        router.client.close()


@pytest.mark.trio
async def test_clients_that_reset_their_connections_stop_no_other_stream() -> None:
    """A reset that a send notices cancels the answer in the middle of the pump's turn."""

    async def engine(request: HttpRequest, responder: Responder) -> None:
        await responder.begin(200, (EVENT_STREAM,))
        while True:
            await responder.send(b"data: 1\n\n")
            await trio.sleep(0.001)

    async with serving(engine) as upstream:
        router = Router(upstream.port)
        async with serving(router.handle) as server, await trio.open_tcp_stream(LOCAL, server.port) as going:
            await going.send_all(GET)
            for _ in range(60):
                lost = socket.create_connection((LOCAL, server.port))
                lost.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                lost.sendall(GET)
                await trio.to_thread.run_sync(lost.recv, 1000)
                lost.close()
                with trio.fail_after(10):
                    await until(going, ONE)
        router.client.close()
