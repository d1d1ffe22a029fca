"""Any bytes, cut anywhere, are requests and at most one refusal behind them; or an answer, or an UpstreamError."""

from __future__ import annotations

import socket
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdflow_runtime.http.chunks import ChunkFraming
from pdflow_runtime.http.errors import UpstreamError
from pdflow_runtime.http.messages import HttpLimits, HttpRequest, Refusal
from pdflow_runtime.http.parsing import RequestParser
from pdflow_runtime.http.response import read_head

LIMITS = HttpLimits(head_bytes=300, body_bytes=100)
POST = b"POST /v1/p?q HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody"
CHUNKS = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n1;e=1\r\nd\r\n0\r\nT: t\r\n\r\n"
OLD = b"GET http://h/p HTTP/1.0\r\n\r\n"
UPGRADE = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\nhi"
EXPECT = b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\nx"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody"
ANSWER_IN_CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n1;e=1\r\nd\r\n0\r\nT: t\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
OPEN_ENDED = b"HTTP/1.1 200 OK\r\n\r\nto the end"


def corrupted(*good: bytes) -> st.SearchStrategy[bytes]:
    """Some of them in a row, with a few bytes exchanged somewhere, or none."""
    rows = st.lists(st.sampled_from(good) | st.binary(max_size=5), min_size=1, max_size=3).map(b"".join)
    broken = st.tuples(rows, st.integers(0, 300), st.integers(0, 3), st.binary(max_size=4)).map(
        lambda given: given[0][: given[1]] + given[3] + given[0][given[1] + given[2] :]
    )
    return rows | broken


def parsed(pieces: list[bytes]) -> list[HttpRequest | Refusal]:
    parser = RequestParser(LIMITS)
    for piece in pieces:
        rest = piece
        while rest:
            rest = rest[parser.feed(rest) :]
    return list(parser.ready)


@given(
    data=corrupted(POST, CHUNKS, OLD, UPGRADE, EXPECT, b"\r\n"), boundaries=st.lists(st.integers(0, 300), max_size=4)
)
@example(data=UPGRADE + POST, boundaries=[])
@example(data=b"GET / HTTP/1.1\r\nContent-Length: 18446744073709551616\r\n\r\n", boundaries=[])
@example(data=b"CONNECT a:1 HTTP/1.1\r\n\r\n" + POST, boundaries=[])
def test_any_bytes_are_requests_and_at_most_a_refusal(data: bytes, boundaries: list[int]) -> None:
    bounds = [0, *sorted(boundaries), len(data)]
    items = parsed([data[start:end] for start, end in pairwise(bounds)])
    assert all(isinstance(item, HttpRequest) for item in items[:-1])
    for item in items:
        if isinstance(item, HttpRequest):
            assert len(item.body) <= LIMITS.body_bytes
            assert item.path.isprintable() or "%" in data.decode("latin-1")
        else:
            assert 400 <= item.status <= 501
    whole = parsed([data])
    assert [item for item in items if isinstance(item, HttpRequest)] == [
        item for item in whole if isinstance(item, HttpRequest)
    ]


@pytest.mark.trio
@given(data=corrupted(ANSWER, ANSWER_IN_CHUNKS, INTERIM, OPEN_ENDED))
@example(data=ANSWER)
async def test_any_bytes_are_an_answer_or_an_upstream_error(data: bytes) -> None:
    upstream, sock = socket.socketpair()
    with upstream, sock:
        sock.setblocking(False)
        upstream.sendall(data)
        upstream.shutdown(socket.SHUT_WR)
        try:
            response = await read_head(sock, 1_000)
            body = await response.read(1_000)
        except UpstreamError:
            return
        assert response.status >= 200
        assert len(body) <= len(data)
        assert response.complete


def test_a_trailer_may_arrive_in_pieces_of_any_size() -> None:
    body = b"3\r\nabc\r\n0\r\nX-Trailer: t\r\n\r\n"
    for middle in range(len(body)):
        framing = ChunkFraming(HttpLimits())
        assert framing.scan(body[:middle]) == middle
        assert not framing.ended
        framing.scan(body[middle:])
        assert framing.ended
        assert framing.refusal is None
