"""What a client of upstream servers may count on: whole answers or an UpstreamError, and connections used again."""

from __future__ import annotations

import gc
import socket
import weakref
from contextlib import aclosing

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.errors import UpstreamError
from pdflow_runtime.http.messages import JSON, HttpRequest
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.http.sockets import listen
from tests.runtime.http.world import LOCAL, echo, scripted, serving

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nyes"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def asked(client: HttpClient, port: int, path: str = "/p", body: bytes = b"") -> bytes:
    async with client.request("POST", LOCAL, port, path, (JSON,), body) as response:
        assert response.status == 200
        return await response.read()


@pytest.mark.trio
async def test_a_request_is_sent_and_its_answer_read() -> None:
    client = HttpClient()
    async with scripted(OK) as (port, seen):
        async with client.request("POST", LOCAL, port, "/p?q=1", (JSON, (b"x-request-id", b"r")), b"{}") as response:
            assert response.status == 200
            assert response.header(b"content-length") == b"3"
            assert await response.read() == b"yes"
            assert await response.read() == b"yes", "read twice is read once"
        client.close()
    assert seen == [
        b"POST /p?q=1 HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-length: 2\r\ncontent-type: application/json\r\n"
        b"x-request-id: r\r\n\r\n{}" % port
    ]


@pytest.mark.trio
async def test_connections_are_kept_and_used_again() -> None:
    client = HttpClient()
    async with serving(echo) as server:
        for n in range(3):
            assert await asked(client, server.port, "/n", b"%d" % n) == b"POST /n  %d" % n
        assert len(server.connections) == 1
        client.close()


@pytest.mark.trio
async def test_a_connection_that_went_stale_while_idle_is_not_used() -> None:
    client = HttpClient()
    async with scripted(OK, OK) as (port, seen):
        assert await asked(client, port) == b"yes"
        await wait_all_tasks_blocked()  # the server has closed by now
        assert await asked(client, port) == b"yes"
        client.close()
    assert len(seen) == 2


@pytest.mark.trio
async def test_a_kept_connection_that_ends_without_a_byte_is_tried_once_more() -> None:
    client = HttpClient()
    async with scripted(OK, b"", OK, hold=True) as (port, seen):
        assert await asked(client, port) == b"yes"
        assert await asked(client, port, "/again") == b"yes"
        client.close()
    assert [request.split()[1] for request in seen] == [b"/p", b"/again", b"/again"]


@pytest.mark.trio
@pytest.mark.parametrize(
    ("answer", "kind", "began"),
    [
        (b"", "closed", False),
        (b"HTTP/1.1 200 OK\r\nContent-", "closed", True),
        (OK[:-1], "closed", True),
        (CHUNKED + b"3\r\nyes\r\n", "closed", True),
        (CHUNKED + b"zz\r\n", "malformed", True),
        (OK + b"HTTP/1.1 200 OK\r\n", "malformed", True),
        (b"220 smtp.example.org\r\n\r\n", "malformed", True),
        (b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n", "malformed", True),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000, "too large", True),
    ],
)
async def test_half_an_answer_is_none(answer: bytes, kind: str, began: bool) -> None:
    client = HttpClient()
    async with scripted(answer, OK) as (port, seen):
        with pytest.raises(UpstreamError) as caught:
            await asked(client, port)
        assert len(seen) == 1, "a fresh connection's failure is final"
        assert (caught.value.kind, caught.value.began) == (kind, began)
        assert not client._idle


@pytest.mark.trio
@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (CHUNKED + b"3\r\nyes\r\n2;x=y\r\n..\r\n0\r\nX-Trailer: t\r\n\r\n", b"yes.."),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", b"x"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nX: y\r\n\r\n" + OK, b"yes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
    ],
)
async def test_answers_come_in_many_shapes(answer: bytes, body: bytes) -> None:
    client = HttpClient()
    async with scripted(answer) as (port, _):
        assert await asked(client, port) == body
        client.close()


@pytest.mark.trio
async def test_raw_pieces_are_the_bytes_as_sent_and_pieces_the_body() -> None:
    async def handler(request: HttpRequest, responder: Responder) -> None:
        await responder.begin(200)
        for n in range(3):
            await responder.send(b"data: %d\n\n" % n)
            await wait_all_tasks_blocked()
        await responder.end()

    client = HttpClient()
    async with serving(handler) as server:
        async with client.request("GET", LOCAL, server.port, "/") as response:
            raw = b""
            while data := await response.receive():
                raw += data
            assert raw == b"".join(b"9\r\ndata: %d\n\n\r\n" % n for n in range(3)) + b"0\r\n\r\n"
        async with (
            client.request("GET", LOCAL, server.port, "/") as response,
            aclosing(response.pieces()) as pieces,
        ):
            assert [piece async for piece in pieces] == [b"data: %d\n\n" % n for n in range(3)]
        assert len(server.connections) == 1
        client.close()


@pytest.mark.trio
async def test_leaving_early_is_an_abort() -> None:
    aborted = trio.Event()

    async def handler(request: HttpRequest, responder: Responder) -> None:
        await responder.begin(200)
        await responder.send(b"first")
        try:
            await trio.sleep_forever()
        finally:
            aborted.set()

    client = HttpClient()
    async with serving(handler) as server:
        async with client.request("GET", LOCAL, server.port, "/") as response:
            assert await response.receive() == b"5\r\nfirst\r\n"
        await aborted.wait()
        assert not client._idle


@pytest.mark.trio
async def test_nothing_of_a_request_waits_for_the_garbage_collector() -> None:
    kept: list[weakref.ref[object]] = []

    async def handler(request: HttpRequest, responder: Responder) -> None:
        kept.extend(weakref.ref(thing) for thing in (responder, *server.connections))
        await responder.reply(200, (), b"yes")

    client = HttpClient()
    gc.disable()
    try:
        async with serving(handler) as server:
            async with client.request("GET", LOCAL, server.port, "/") as response:
                kept.append(weakref.ref(response))
                await response.read()
            del response
            client.close()
            while server.connections:
                await trio.sleep(0.001)
        assert len(kept) == 3
        assert [thing() for thing in kept] == [None, None, None]
    finally:
        gc.enable()


@pytest.mark.trio
@pytest.mark.parametrize("host", ["a..b", "a" * 100])
async def test_what_is_no_host_s_name_is_refused(host: str) -> None:
    with pytest.raises(UpstreamError, match="is not a valid host name") as caught:
        async with HttpClient().request("GET", host, 1, "/"):
            pass
    assert caught.value.kind == "refused"


@pytest.mark.trio
async def test_nobody_there_is_refused_and_no_answer_to_a_connect_times_out(autojump_clock: MockClock) -> None:
    client = HttpClient(connect_s=3)
    with listen(LOCAL, 0, backlog=0) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection((LOCAL, port)):  # the backlog is full, and nobody accepts
            with pytest.raises(UpstreamError) as caught:
                await asked(client, port)
            assert caught.value.kind == "timeout"
            assert trio.current_time() == 3
    with pytest.raises(UpstreamError) as caught:
        await asked(client, port)
    assert caught.value.kind == "refused"


@pytest.mark.trio
async def test_no_more_is_kept_than_allowed_and_forgotten_is_closed() -> None:
    client = HttpClient(idle_per_host=2)
    async with serving(echo) as server:
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(asked, client, server.port)
        await wait_all_tasks_blocked()
        assert len(server.connections) == 2
        client.forget(LOCAL, server.port)
        await wait_all_tasks_blocked()
        assert not server.connections


@pytest.mark.parametrize("path", ["/a b", "/a\r\nX: y", "/a\n"])
def test_a_path_that_would_be_two_lines_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="cannot write this request line"):
        HttpClient().request("GET", LOCAL, 1, path)
