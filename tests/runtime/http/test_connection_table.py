"""A full server: which connection gives way, and which requests are answered all the same."""

from __future__ import annotations

import errno
import logging
import socket
from contextlib import AsyncExitStack, ExitStack

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from pdflow_runtime.http import descriptors
from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.connection import Connection
from pdflow_runtime.http.connection_table import counted_address
from pdflow_runtime.http.descriptors import ExhaustionLog
from pdflow_runtime.http.errors import UpstreamError
from pdflow_runtime.http.messages import HttpLimits, HttpRequest
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.http.server import Server
from tests.runtime.http.world import LOCAL, echo, response_to, serving, until

GET = b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
KEPT = b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx"


async def connected(server: Server, streams: AsyncExitStack, data: bytes = b"") -> trio.SocketStream:
    stream = await streams.enter_async_context(await trio.open_tcp_stream(LOCAL, server.port))
    if data:
        await stream.send_all(data)
    await wait_all_tasks_blocked()
    return stream


async def ended(stream: trio.SocketStream) -> bytes:
    """All that still comes, also from a connection that was reset."""
    got = b""
    try:
        async for piece in stream:
            got += piece
    except trio.BrokenResourceError:
        pass
    return got


async def hold(request: HttpRequest, responder: Responder) -> None:
    """Answers operators at once, and others never."""
    if request.path == "/p":
        await responder.begin(200)
        await responder.send(b"begun")
        await trio.sleep_forever()
    await responder.reply(200, (), b"yes")


@pytest.mark.trio
async def test_the_longest_without_a_whole_request_gives_way() -> None:
    async with serving(echo, HttpLimits(fresh_s=0, connections=3)) as server, AsyncExitStack() as streams:
        first = await connected(server, streams, b"POST /p HTTP/1.1\r\nHo")
        second = await connected(server, streams)
        third = await connected(server, streams)
        await first.send_all(b"st: x\r\nContent-Length: 1\r\n\r\nx")
        await until(first, b"POST /p  x")
        fourth = await connected(server, streams, KEPT)
        assert await ended(second) == b"", "first and third have waited less long"
        await until(fourth, b"POST /p  x")
        await connected(server, streams)
        assert await ended(third) == b""
        assert len(server.connections) == 3
        await first.send_all(KEPT)
        await until(first, b"POST /p  x")


@pytest.mark.trio
async def test_connections_without_any_request_are_limited_by_themselves() -> None:
    limits = HttpLimits(fresh_s=0, connections=10, new_connections=2)
    async with serving(echo, limits) as server, AsyncExitStack() as streams:
        kept = [await connected(server, streams, KEPT) for _ in range(4)]
        slow = [await connected(server, streams, b"POST /p HT") for _ in range(3)]
        assert (await ended(slow[0])).startswith(b"HTTP/1.1 503 ")
        assert len(server.connections) == 6
        for stream in (*kept, *kept):
            await until(stream, b"POST /p  x")
            await stream.send_all(KEPT)


@pytest.mark.trio
async def test_a_burst_of_clients_is_served_in_turn() -> None:
    """No connection gives way whose request is on its way, or was not read yet."""
    limits = HttpLimits(connections=3, new_connections=2, reserve=0)
    answers: list[bytes] = []

    async def slowly(request: HttpRequest, responder: Responder) -> None:
        await trio.sleep(0.005)
        await responder.reply(200, (), b"yes")

    async def client() -> None:
        answers.append(await response_to(server.port, GET % b"/"))

    async with serving(slowly, limits) as server, trio.open_nursery() as nursery:
        for _ in range(30):
            nursery.start_soon(client)
    assert [answer[-3:] for answer in answers] == [b"yes"] * 30


@pytest.mark.trio
async def test_a_client_that_is_sending_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest connection has more to be read: a silent one gives way, and at once."""
    async with serving(echo, HttpLimits(fresh_s=0, new_connections=2)) as server, AsyncExitStack() as streams:
        sending = await connected(server, streams, b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nx")
        (uploaded,) = server.connections
        monkeypatch.setattr(Connection, "unread", property(lambda self: self is uploaded))
        silent = await connected(server, streams, b"GET /silent HT")
        with trio.fail_after(2):
            assert (await response_to(server.port, GET % b"/")).endswith(b"GET /  ")
        assert (await ended(silent)).startswith(b"HTTP/1.1 503 ")
        await sending.send_all(b"y")
        await until(sending, b"POST /p  xy")


@pytest.mark.trio
async def test_clients_of_the_backlog_are_accepted_in_one_turn_of_the_event_loop() -> None:
    """Else, where each turn takes long, the backlog is full of clients that open connections fastest."""
    async with serving(echo) as server:
        with ExitStack() as clients:
            for _ in range(50):
                clients.enter_context(socket.create_connection((LOCAL, server.port)))
            for _ in range(4):
                await trio.lowlevel.checkpoint()
            assert len(server.connections) == 50


@pytest.mark.trio
async def test_an_unfinished_request_gives_way_with_a_503() -> None:
    async with serving(echo, HttpLimits(fresh_s=0, connections=1)) as server, AsyncExitStack() as streams:
        slow = await connected(server, streams, b"GET /slow HT")
        await connected(server, streams)
        answer = await ended(slow)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in answer


@pytest.mark.trio
async def test_an_answer_under_way_never_gives_way() -> None:
    limits = HttpLimits(fresh_s=0, connections=2, reserve=1)
    async with serving(hold, limits) as server, AsyncExitStack() as streams:
        answered = [await connected(server, streams, KEPT) for _ in range(2)]
        for stream in answered:
            await until(stream, b"begun\r\n")
        # The reserve: operators are answered, other requests are not.
        assert (await response_to(server.port, GET % b"/health")).endswith(b"yes")
        assert (await response_to(server.port, GET % b"/admin/state")).endswith(b"yes")
        assert (await response_to(server.port, GET % b"/other")).startswith(b"HTTP/1.1 503 ")
        # Slow connections give way in it.
        for _ in range(5):
            await connected(server, streams, b"GET /he")
        assert (await response_to(server.port, GET % b"/health")).endswith(b"yes")
        assert {connection for connection in server.connections if not connection.address} == server.connections
        await answered[0].aclose()
        await wait_all_tasks_blocked()
        await until(await connected(server, streams, KEPT), b"begun\r\n")


@pytest.mark.trio
async def test_where_all_are_answered_clients_wait() -> None:
    async with serving(hold, HttpLimits(fresh_s=0, connections=1, reserve=0)) as server, AsyncExitStack() as streams:
        busy = await connected(server, streams, KEPT)
        await until(busy, b"begun\r\n")
        waiting = await connected(server, streams, KEPT)
        assert len(server.connections) == 1
        await busy.aclose()
        await until(waiting, b"begun\r\n")


class Flood:
    """Answers operators at once, and others with more than a client's buffers take."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    async def __call__(self, request: HttpRequest, responder: Responder) -> None:
        if request.path == "/health":
            await responder.reply(200, (), b"yes")
            return
        await responder.begin(200)
        try:
            while True:
                await responder.send(b"f" * 1_000_000)
        except trio.Cancelled:
            self.cancelled.append(request.path)
            raise


@pytest.mark.trio
async def test_a_client_that_takes_nothing_gives_way_after_a_while(autojump_clock: MockClock) -> None:
    flood = Flood()
    limits = HttpLimits(fresh_s=0, connections=2, reserve=0, stalled_s=5, write_s=1000)
    async with serving(flood, limits) as server, AsyncExitStack() as streams:
        first = await connected(server, streams, GET % b"/1")
        await trio.sleep(3)
        await connected(server, streams, GET % b"/2")
        await trio.sleep(100)
        assert flood.cancelled == [], "nobody needs its place"
        for _ in range(200):  # more than the buffers of both sides
            await first.receive_some()
        await wait_all_tasks_blocked()
        began = trio.current_time()
        assert (await response_to(server.port, GET % b"/health")).endswith(b"yes")
        assert flood.cancelled == ["/2"], "the first one has taken something since"
        await connected(server, streams, GET % b"/3")
        assert (await response_to(server.port, GET % b"/health")).endswith(b"yes")
        assert flood.cancelled == ["/2", "/1"]
        assert trio.current_time() - began < 10


@pytest.mark.trio
async def test_clients_that_take_nothing_give_way_on_the_reserve(autojump_clock: MockClock) -> None:
    flood = Flood()
    limits = HttpLimits(fresh_s=0, connections=1, reserve=2, stalled_s=5, reserved=("/health", "/metrics"))
    async with serving(flood, limits) as server, AsyncExitStack() as streams:
        for path in (b"/busy", b"/metrics", b"/metrics"):
            await connected(server, streams, GET % path)
        assert len(server.connections) == 3
        assert (await response_to(server.port, GET % b"/health")).endswith(b"yes")
        assert flood.cancelled == ["/busy"]


@pytest.mark.trio
async def test_an_address_has_so_many_and_its_own_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdflow_runtime.http.server.counted_address", lambda host: host)
    limits = HttpLimits(fresh_s=0, connections=10, connections_per_address=2)
    async with serving(hold, limits) as server, AsyncExitStack() as streams:
        other = await connected(server, streams)
        assert len(server.connections) == 1
        streams_of_one = [await connected(server, streams) for _ in range(2)]
        assert await ended(other) == b""
        for stream in streams_of_one:
            await stream.send_all(KEPT)
            await until(stream, b"begun\r\n")
        refused = await connected(server, streams)
        assert (await ended(refused)).startswith(b"HTTP/1.1 429 ")


@pytest.mark.trio
async def test_bodies_that_do_not_end_are_bounded_together() -> None:
    body = b"POST /p HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + b"b" * 300_000
    async with serving(echo, HttpLimits(fresh_s=0, arriving_bytes=1_000_000)) as server, AsyncExitStack() as streams:
        bodies = [await connected(server, streams, body) for _ in range(3)]
        assert len(server.connections) == 3
        bodies.append(await connected(server, streams, body))
        assert (await ended(bodies[0])).startswith(b"HTTP/1.1 503 ")
        assert len(server.connections) == 3
        for stream in bodies[1:]:
            await stream.send_all(b"b" * 100)
            await wait_all_tasks_blocked()
        assert len(server.connections) == 3


@pytest.mark.trio
async def test_without_descriptors_the_oldest_gives_way_and_the_log_has_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pdflow_runtime.http.server.EXHAUSTION", ExhaustionLog())
    async with serving(echo, HttpLimits(fresh_s=0)) as server, AsyncExitStack() as streams:
        oldest = await connected(server, streams)
        accept, failures = server._waiting, iter((OSError(errno.EMFILE, "Too many open files"),))

        def scarce() -> tuple[socket.socket, str] | None:
            for failure in failures:
                raise failure
            return accept()

        monkeypatch.setattr(server, "_waiting", scarce)
        assert (await response_to(server.port, GET % b"/")).endswith(b"GET /  ")
        assert await ended(oldest) == b""
    (line,) = [record.getMessage() for record in caplog.records]
    assert "ulimit -n" in line


@pytest.mark.trio
async def test_a_leg_without_a_descriptor_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def connect(host: str, port: int) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("pdflow_runtime.http.client.connect", connect)
    monkeypatch.setattr("pdflow_runtime.http.client.EXHAUSTION", ExhaustionLog())
    for _ in range(3):
        with pytest.raises(UpstreamError, match="too many open files"):
            await HttpClient().dial((LOCAL, 1))
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_one_line_a_second(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    times = iter((5_000_000_000, 5_500_000_000, 5_900_000_000, 6_000_000_000))
    monkeypatch.setattr(descriptors, "now_ns", lambda: next(times))
    exhaustion = ExhaustionLog()
    for _ in range(4):
        exhaustion.add("accepting a connection", OSError(errno.EMFILE, "Too many open files"))
    exhaustion.add("accepting a connection", OSError(errno.ECONNABORTED, "aborted"))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "(2 more since the last line)" in lines[1]


def test_addresses_are_counted_by_who_has_them() -> None:
    assert counted_address("127.0.0.1") == counted_address("::1") == counted_address("::ffff:127.0.0.1") == ""
    assert counted_address("10.0.0.1") == counted_address("::ffff:10.0.0.1") == "10.0.0.1"
    assert counted_address("2001:db8::1") == counted_address("2001:db8::ffff:2") != counted_address("2001:db8:0:1::1")
    assert counted_address("fe80::1%eth0") == "fe80::/64"
