"""What is cheap to send and dear to keep or to parse is refused: headers and chunks of a few bytes."""

from __future__ import annotations

from pdflow_runtime.http.chunks import CHUNKS
from pdflow_runtime.http.messages import HttpLimits, HttpRequest, Refusal
from pdflow_runtime.http.parsing import HEADERS, RequestParser


def parsed(data: bytes) -> HttpRequest | Refusal | None:
    parser = RequestParser(HttpLimits())
    try:
        for at in range(0, len(data), 65_536):
            parser.feed(data[at : at + 65_536])
        return parser.ready[0] if parser.ready else None
    finally:
        parser.close()


def with_headers(count: int) -> bytes:
    return b"GET / HTTP/1.1\r\nHost: x\r\n" + b"ab:cd\r\n" * (count - 1)


def test_a_head_has_only_so_many_headers() -> None:
    assert isinstance(parsed(with_headers(HEADERS) + b"\r\n"), HttpRequest)
    refused = parsed(with_headers(HEADERS + 2))
    assert isinstance(refused, Refusal), "before the head is whole"
    assert refused.status == 431


def test_a_body_has_only_so_many_chunks() -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    whole = parsed(head + b"1\r\na\r\n" * (CHUNKS - 1) + b"0\r\n\r\n")
    assert isinstance(whole, HttpRequest)
    assert whole.body == b"a" * (CHUNKS - 1)
    refused = parsed(head + b"1\r\na\r\n" * (CHUNKS + 1))
    assert isinstance(refused, Refusal)
    assert (refused.status, refused.message) == (400, f"the request's body has more than {CHUNKS} chunks")
