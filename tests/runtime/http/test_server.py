"""What a server owes its clients: every request answered in order, hang-ups noticed, and one client's fault its own."""

from __future__ import annotations

import logging
import socket
import struct
from contextlib import AsyncExitStack, suppress

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pdflow_runtime.http.ended import EndedRequest
from pdflow_runtime.http.errors import OpenAIError
from pdflow_runtime.http.messages import EVENT_STREAM, HttpLimits, HttpRequest
from pdflow_runtime.http.responder import Responder
from tests.runtime.http.world import LOCAL, connected, echo, post, response_to, serving, until

CLOSING = b"connection: close\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
SMALL = HttpLimits(head_bytes=1_000, body_bytes=1_000)


@pytest.mark.trio
async def test_a_request_reaches_its_handler_whole() -> None:
    seen: list[HttpRequest] = []

    async def handler(request: HttpRequest, responder: Responder) -> None:
        seen.append(request)
        await responder.reply(200, ((b"x-of", b"ours"),), b"yes")

    async with serving(handler) as server:
        answer = await response_to(server.port, post(b"body", b"/a%20b?c=%20d", b"X-Request-ID: r1\r\n" + CLOSING))
    assert answer.startswith(b"HTTP/1.1 200 OK\r\nx-of: ours\r\ncontent-length: 3\r\n")
    assert answer.endswith(b"\r\n\r\nyes")
    (request,) = seen
    assert (request.method, request.path, request.query, request.body) == ("POST", "/a b", "c=%20d", b"body")
    assert request.header(b"x-request-id") == b"r1"
    assert request.header(b"x-none") is None


@pytest.mark.trio
@pytest.mark.parametrize("step", [1, 7, 64])
async def test_requests_may_come_in_pieces(step: int) -> None:
    data = (
        post(b"first") + b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n" + CLOSING + b"\r\n"
        b"3\r\nabc\r\n4;x=y\r\ndefg\r\n0\r\n\r\n"
    )
    async with serving(echo) as server, await trio.open_tcp_stream(LOCAL, server.port) as stream:
        for at in range(0, len(data), step):
            await stream.send_all(data[at : at + step])
            await wait_all_tasks_blocked()
        answer = b"".join([piece async for piece in stream])
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert b"POST /p  first" in answer
    assert answer.endswith(b"POST /c  abcdefg")


@pytest.mark.trio
async def test_a_stream_is_chunks_and_ends() -> None:
    async def handler(request: HttpRequest, responder: Responder) -> None:
        await responder.begin(200, (EVENT_STREAM,))
        await responder.send(b"data: 1\n\n")
        await responder.send(b"")
        await responder.send(b"data: 2\n\n")
        await responder.end()

    async with serving(handler) as server:
        answer = await response_to(server.port, post(b"", headers=CLOSING))
        old = await response_to(server.port, b"GET / HTTP/1.0\r\n\r\n")
    assert b"transfer-encoding: chunked" in answer
    assert answer.endswith(b"\r\n\r\n9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\n0\r\n\r\n")
    assert b"transfer-encoding" not in old
    assert old.endswith(b"\r\n\r\ndata: 1\n\ndata: 2\n\n")


@pytest.mark.trio
async def test_a_reset_is_a_hang_up(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(request: HttpRequest, responder: Responder) -> None:
        await responder.begin(200)
        while True:
            await responder.send(b"x" * 1_000)

    async with serving(handler) as server:
        for _ in range(20):
            with socket.create_connection((LOCAL, server.port)) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.sendall(post(b""))
                await wait_all_tasks_blocked()
        while server.connections:
            await trio.sleep(0.001)
    assert not caplog.records


@pytest.mark.trio
async def test_who_has_answered_may_put_things_in_order_when_the_client_leaves() -> None:
    left = trio.Event()
    settled = trio.Event()

    async def handler(request: HttpRequest, responder: Responder) -> None:
        await responder.begin(200)
        await responder.send(b"x")
        await responder.end()
        await left.wait()
        assert responder.gone
        settled.set()

    async with serving(handler) as server:
        async with await trio.open_tcp_stream(LOCAL, server.port) as stream:
            await stream.send_all(post(b""))
            await until(stream, b"0\r\n\r\n")
        await wait_all_tasks_blocked()
        left.set()
        while server.connections:
            await trio.sleep(0.001)
    assert settled.is_set()


@pytest.mark.trio
async def test_a_shielded_handler_settles_before_it_is_cancelled() -> None:
    steps: list[str] = []
    settle = trio.Event()

    async def handler(request: HttpRequest, responder: Responder) -> None:
        await responder.begin(200)
        await responder.send(b"x")
        with trio.CancelScope(shield=True):
            await settle.wait()
            steps.append("gone" if responder.gone else "there")
            await responder.send(b"to nobody")
            steps.append("settled")
        await responder.send(b"to nobody")
        steps.append("never")

    async with serving(handler) as server, await trio.open_tcp_stream(LOCAL, server.port) as stream:
        await stream.send_all(post(b""))
        await until(stream, b"x\r\n")
        await stream.aclose()
        await wait_all_tasks_blocked()
        settle.set()
        while server.connections:
            await trio.sleep(0.001)
    assert steps == ["gone", "settled"]


@pytest.mark.trio
@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET / HTTP/1.1\r\nHost x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.0\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\nConnection: keep-alive\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n", 400),
        (CHUNKED + b"xyz\r\n", 400),
        (CHUNKED + b"F" * 16, 400),
        (CHUNKED + b"0" * 5_000, 400),
        (CHUNKED + b"1;" + b"e" * 5_000, 400),
        (CHUNKED + b"7FFFFFFF\r\n", 413),
        (CHUNKED + b"3\r\nabcd\r\n", 400),
        (CHUNKED + b"0\r\n" + b"T: t\r\n" * 180 + b"\r\n", 431),
        (b"POST / HTTP/1.1\r\nContent-Length: 1001\r\n\r\n", 413),
        (CHUNKED + b"3e8\r\n" + b"b" * 1000 + b"\r\n1\r\n", 413),
        (b"POST / HTTP/1.1\r\nExpect: miracles\r\nContent-Length: 1\r\n\r\n", 417),
        (b"GET /" + b"u" * 1001, 431),
        (b"GET / HTTP/1.1\r\nX: " + b"h" * 1001, 431),
        (b"GET / HTTP/1.1\r\n" + b"X: h\r\n" * 180 + b"\r\n", 431),
    ],
)
async def test_what_is_wrong_is_refused_in_openai_shape(data: bytes, status: int) -> None:
    async with serving(echo, SMALL) as server:
        answer = await response_to(server.port, data)
        assert await response_to(server.port, post(b"others", headers=CLOSING)), "the others are served"
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in head
    assert body.startswith(b'{"error":{"message":"')
    kind = b"invalid_request_error" if status < 500 else b"server_error"
    assert b'"type":"%b","param":null,"code":null}}' % kind in body


@pytest.mark.trio
async def test_a_slow_request_is_answered_408_and_an_idle_connection_is_closed(autojump_clock: MockClock) -> None:
    async with serving(echo, HttpLimits(request_s=10, idle_s=100)) as server:
        async with await trio.open_tcp_stream(LOCAL, server.port) as slow:
            await slow.send_all(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Le")
            await trio.sleep(9)
            await slow.send_all(b"ngth: 4\r\n\r\nbod")  # a drop of bytes buys no time
            answer = b"".join([piece async for piece in slow])
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert 10 <= trio.current_time() < 13
            began = trio.current_time()
        async with await trio.open_tcp_stream(LOCAL, server.port) as idle:
            await idle.send_all(post(b""))
            assert b"".join([piece async for piece in idle]).count(b"HTTP/1.1") == 1
            assert 100 <= trio.current_time() - began < 101


@pytest.mark.trio
@pytest.mark.parametrize(
    ("data", "end_s", "status"),
    [
        (b"GET /" + b"u" * 200, 5, b"408"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 300\r\n\r\n" + b"b" * 200, 50, b"408"),
        (CHUNKED + b"1\r\nb\r\n" * 200, 50, b"408"),
        (b"\r\n" * 200, 100, b""),
    ],
)
async def test_no_byte_buys_time(autojump_clock: MockClock, data: bytes, end_s: float, status: bytes) -> None:
    limits = HttpLimits(head_s=5, request_s=50, idle_s=100)
    async with serving(echo, limits) as server, await trio.open_tcp_stream(LOCAL, server.port) as stream:
        answers: list[bytes] = []

        async def receive(nursery: trio.Nursery) -> None:
            with suppress(trio.BrokenResourceError):
                async for piece in stream:
                    answers.append(piece)
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive, nursery)
            head = data.rfind(b"\r\n\r\n", 0, 100) + 4 if data.startswith(b"POST") else 1
            await stream.send_all(data[:head])
            for at in range(head, len(data)):
                await trio.sleep(1)
                with suppress(trio.BrokenResourceError):
                    await stream.send_all(data[at : at + 1])
        assert b"".join(answers)[9:12] == status
        assert end_s <= trio.current_time() < end_s + 4


@pytest.mark.trio
async def test_a_client_that_takes_nothing_is_given_up(autojump_clock: MockClock) -> None:
    gone = trio.Event()

    async def handler(request: HttpRequest, responder: Responder) -> None:
        await responder.begin(200)
        try:
            while True:
                await responder.send(b"x" * 1_000_000)
        finally:
            gone.set()

    limits = HttpLimits(write_s=5)
    async with serving(handler, limits) as server, await trio.open_tcp_stream(LOCAL, server.port) as stream:
        await stream.send_all(post(b""))
        await gone.wait()
        while server.connections:
            await trio.sleep(0.001)


@pytest.mark.trio
async def test_a_failed_handler_is_500_and_openai_errors_are_answers(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(request: HttpRequest, responder: Responder) -> None:
        async with trio.open_nursery():
            if request.path == "/bug":
                raise KeyError("secret")
            if request.path == "/model":
                raise OpenAIError(404, "no such model", param="model", code="model_not_found")

    async with serving(handler) as server:
        bug = await response_to(server.port, post(b"", b"/bug", CLOSING))
        model = await response_to(server.port, post(b"", b"/model", CLOSING))
        silent = await response_to(server.port, post(b"", b"/silent", CLOSING))
    assert bug.startswith(b"HTTP/1.1 500 ")
    assert b"secret" not in bug
    assert model.startswith(b"HTTP/1.1 404 ")
    assert model.endswith(
        b'{"error":{"message":"no such model","type":"not_found_error","param":"model","code":"model_not_found"}}'
    )
    assert silent.startswith(b"HTTP/1.1 500 ")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == [
        "POST /bug: internal error",
        "POST /silent: the handler returned without an answer, which is a bug of pdflow",
    ]


@pytest.mark.trio
async def test_a_stream_that_fails_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(request: HttpRequest, responder: Responder) -> None:
        await responder.begin(200)
        await responder.send(b"half")
        raise ValueError("no more")

    async with serving(handler) as server:
        answer = await response_to(server.port, post(b""))
    assert answer.endswith(b"4\r\nhalf\r\n"), "and no last chunk"
    assert caplog.records


@pytest.mark.trio
async def test_100_continue_is_sent_before_the_body_arrives() -> None:
    async with serving(echo) as server, await trio.open_tcp_stream(LOCAL, server.port) as stream:
        await stream.send_all(b"POST /p HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n")
        assert await until(stream, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await stream.send_all(b"body")
        assert (await until(stream, b"body")).startswith(b"HTTP/1.1 200 OK\r\n")
        await stream.aclose()


@pytest.mark.trio
async def test_an_upgrade_is_not_made_and_its_body_is_read() -> None:
    # As `curl --http2` and Java's HttpClient ask; the connection goes on.
    asks = b"POST /up HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    asks += b"HTTP2-Settings: AAMA\r\n"
    whole = asks + b"Content-Length: 4\r\n\r\nbody"
    chunked = asks + b"Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n"
    bodiless = b"GET /up HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    async with serving(echo) as server:
        answer = await response_to(server.port, whole + chunked + bodiless + post(b"next", headers=CLOSING))
    bodies = [response.partition(b"\r\n\r\n")[2] for response in answer.split(b"HTTP/1.1 200 OK\r\n")[1:]]
    assert bodies == [b"POST /up  body", b"POST /up  body", b"GET /up  ", b"POST /p  next"]


@pytest.mark.trio
async def test_a_connection_that_closes_closes_after_an_upgrade_is_refused() -> None:
    async with serving(echo) as server:
        answer = await response_to(
            server.port, b"GET /up HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: h2c\r\n\r\n"
        )
    assert CLOSING in answer


@pytest.mark.trio
async def test_head_has_no_body() -> None:
    async with serving(echo) as server:
        answer = await response_to(server.port, b"HEAD / HTTP/1.1\r\nHost: x\r\n" + CLOSING + b"\r\n")
    assert b"content-length: 8\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.trio
async def test_draining_ends_the_idle_and_finishes_the_rest() -> None:
    go_on = trio.Event()

    async def handler(request: HttpRequest, responder: Responder) -> None:
        await responder.begin(200)
        await responder.send(b"begun")
        await go_on.wait()
        await responder.send(b"whole")
        await responder.end()

    async with serving(handler) as server, AsyncExitStack() as streams:
        idle, busy, begun = [await connected(server, streams) for _ in range(3)]
        await busy.send_all(post(b""))
        await until(busy, b"begun\r\n")
        await begun.send_all(b"POST /p HT")
        await wait_all_tasks_blocked()
        unseen = await connected(server, streams)
        await unseen.send_all(post(b""))
        server.drain()
        assert await idle.receive_some() == b""
        go_on.set()
        await begun.send_all(b"TP/1.1\r\nHost: x\r\n\r\n")
        for stream in (busy, begun, unseen):
            assert b"".join([piece async for piece in stream]).endswith(b"5\r\nwhole\r\n0\r\n\r\n")
        with pytest.raises(OSError, match="connect"):
            await connected(server, streams)
        assert not server.connections


@pytest.mark.trio
async def test_headers_that_would_be_two_are_refused() -> None:
    raised: list[ValueError] = []

    async def handler(request: HttpRequest, responder: Responder) -> None:
        try:
            await responder.reply(200, ((b"x", b"a\r\nset-cookie: b"),))
        except ValueError as error:
            raised.append(error)
        await responder.reply(204)

    async with serving(handler) as server:
        answer = await response_to(server.port, post(b"", headers=CLOSING))
    assert raised
    assert answer == b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n"


@pytest.mark.trio
async def test_a_request_that_the_end_of_the_server_interrupts_is_reported() -> None:
    reported: list[EndedRequest] = []
    begun = trio.Event()

    async def never_done(request: HttpRequest, responder: Responder) -> None:
        begun.set()
        await trio.sleep_forever()

    with trio.fail_after(10):
        async with serving(never_done, ended=reported.append) as server, AsyncExitStack() as streams:
            client = await connected(server, streams)
            await client.send_all(post(b"", b"/long"))
            await begun.wait()
    assert [(request.path, request.status) for request in reported] == [("/long", 0)]


@pytest.mark.trio
@pytest.mark.parametrize("status", [400, 429, 503])
async def test_a_refusal_for_now_names_when_to_try_again(status: int) -> None:
    async def refuse(request: HttpRequest, responder: Responder) -> None:
        raise OpenAIError(status, "too much")

    async with serving(refuse) as server, AsyncExitStack() as streams:
        client = await connected(server, streams)
        await client.send_all(post(b""))
        assert (b"retry-after: 1\r\n" in await until(client, b"}")) == (status != 400)
