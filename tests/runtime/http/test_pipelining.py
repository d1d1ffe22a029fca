"""Requests that a client sends before the answer to an earlier one: each is answered in turn, and little of them is
read before that."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack
from itertools import pairwise

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from pdflow_runtime.http.messages import HttpLimits, HttpRequest
from pdflow_runtime.http.responder import Responder
from tests.runtime.http.world import LOCAL, connected, echo, post, response_to, serving, until

CLOSING = b"connection: close\r\n"


@pytest.mark.trio
async def test_pipelined_requests_are_answered_in_order() -> None:
    count = 100  # more than may wait, so that reading pauses and goes on
    expected = [b"POST /p  %d" % n for n in range(count)]
    data = b"".join(post(b"%d" % n) for n in range(count - 1)) + post(b"%d" % (count - 1), headers=CLOSING)
    async with serving(echo, HttpLimits(behind_bytes=1_000)) as server:
        answer = await response_to(server.port, data)
    bodies = [response.partition(b"\r\n\r\n")[2] for response in answer.split(b"HTTP/1.1 200 OK\r\n")[1:]]
    assert bodies == expected


@pytest.mark.trio
async def test_no_more_is_read_behind_an_answer_than_a_limit() -> None:
    go_on = trio.Event()

    async def handler(request: HttpRequest, responder: Responder) -> None:
        await go_on.wait()
        await echo(request, responder)

    body = b"b" * 500_000
    limits = HttpLimits(behind_bytes=20_000)
    async with serving(handler, limits) as server, await trio.open_tcp_stream(LOCAL, server.port) as stream:
        await stream.send_all(post(b"first"))
        await wait_all_tasks_blocked()
        (connection,) = server.connections
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send_all, post(body) + post(b"last", headers=CLOSING))
            await wait_all_tasks_blocked()
            assert len(connection._behind) == limits.behind_bytes
            assert not connection._parser.within, "what waits is not parsed"
            go_on.set()
            answer = b"".join([piece async for piece in stream])
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert body in answer
    assert answer.endswith(b"POST /p  last")


@pytest.mark.trio
async def test_the_bodies_of_all_answered_requests_are_bounded_together() -> None:
    async def handler(request: HttpRequest, responder: Responder) -> None:
        await responder.begin(200)
        await responder.send(b"begun")
        await trio.sleep_forever()

    limits = HttpLimits(answered_bytes=250_000)
    async with serving(handler, limits) as server, AsyncExitStack() as streams:
        holding = [await connected(server, streams) for _ in range(2)]
        for stream in holding:
            await stream.send_all(post(b"b" * 100_000))
            await until(stream, b"begun\r\n")
        assert (await response_to(server.port, post(b"b" * 100_000, headers=CLOSING))).startswith(b"HTTP/1.1 429 ")
        short = await connected(server, streams)
        await short.send_all(post(b"b"))
        await until(short, b"begun\r\n")
        await holding[0].aclose()
        await wait_all_tasks_blocked()
        again = await connected(server, streams)
        await again.send_all(post(b"b" * 100_000))
        await until(again, b"begun\r\n")


@pytest.mark.trio
async def test_a_hang_up_cancels_the_answer_even_with_requests_waiting() -> None:
    cancelled: list[str] = []

    async def handler(request: HttpRequest, responder: Responder) -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            cancelled.append(request.path)
            raise

    async with serving(handler) as server, await trio.open_tcp_stream(LOCAL, server.port) as stream:
        await stream.send_all(post(b"", b"/1") + post(b"", b"/2") + b"GET /unfini")
        await wait_all_tasks_blocked()
        assert len(server.connections) == 1
        await stream.aclose()
        with trio.fail_after(5):
            while server.connections:
                await trio.sleep(0.001)
    assert cancelled == ["/1"]


@pytest.mark.trio
async def test_a_fault_behind_good_requests_is_refused_after_their_answers() -> None:
    async with serving(echo) as server:
        answer = await response_to(server.port, post(b"good") + b"nonsense\r\n\r\n")
    assert b"POST /p  good" in answer
    assert answer.index(b"200 OK") < answer.index(b"400 Bad Request")


@pytest.mark.trio
async def test_100_continue_follows_the_answer_before_and_not_the_body() -> None:
    go_on = trio.Event()

    async def handler(request: HttpRequest, responder: Responder) -> None:
        await go_on.wait()
        await echo(request, responder)

    asks = b"POST /p HTTP/1.%d\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n"
    async with serving(handler) as server, await trio.open_tcp_stream(LOCAL, server.port) as stream:
        await stream.send_all(post(b"first") + asks % 1)
        await wait_all_tasks_blocked()
        go_on.set()
        # The client sends nothing until it is allowed to.
        got = await until(stream, b"100 Continue\r\n\r\n")
        assert got.startswith(b"HTTP/1.1 200 OK\r\n")
        await stream.send_all(b"body")
        assert (await until(stream, b"body")).startswith(b"HTTP/1.1 200 OK\r\n")
        await stream.send_all(asks % 1 + b"bo")
        await wait_all_tasks_blocked()
        await stream.send_all(b"dy" + asks % 0 + b"body")
        assert b"100 Continue" not in b"".join([piece async for piece in stream])


@pytest.mark.trio
async def test_a_malformed_request_behind_an_answer_is_refused_while_more_arrives() -> None:
    """Both tasks of the connection become runnable in one pass: only one of them may receive."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)

        async def handler(request: HttpRequest, responder: Responder) -> None:
            await trio.lowlevel.wait_readable(ours)
            ours.recv(1)
            await responder.reply(200, (), b"ok")

        async with serving(handler) as server:
            for _ in range(20):
                client = socket.create_connection((LOCAL, server.port))
                with client:
                    client.send(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n\x00garbage\r\n\r\n")
                    await wait_all_tasks_blocked(0.005)
                    client.send(b"more")
                    theirs.send(b"1")
                    answer = await trio.to_thread.run_sync(client.makefile("rb").read)
                assert answer.startswith(b"HTTP/1.1 200 ")
                assert b"HTTP/1.1 400 " in answer


@pytest.mark.trio
async def test_others_have_their_turn_between_requests_that_came_together() -> None:
    count, answered, turns = 100, 0, list[int]()

    async def handler(request: HttpRequest, responder: Responder) -> None:
        nonlocal answered
        answered += 1
        await responder.reply(200, (), b"ok")

    async def look() -> None:
        while answered < count:
            turns.append(answered)
            await trio.lowlevel.checkpoint()
        turns.append(answered)

    async with serving(handler) as server, trio.open_nursery() as nursery:
        nursery.start_soon(look)
        data = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n" * (count - 1) + b"GET / HTTP/1.1\r\nhost: a\r\n" + CLOSING + b"\r\n"
        await response_to(server.port, data)
    assert max(after - before for before, after in pairwise(turns)) <= 2
