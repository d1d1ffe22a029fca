"""HTTP requests and their limits, and how a head is written. Header names are lower case, names and values are
bytes."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final, TypeAlias

import msgspec

Header: TypeAlias = tuple[bytes, bytes]
Headers: TypeAlias = tuple[Header, ...]

JSON: Final[Header] = (b"content-type", b"application/json")
EVENT_STREAM: Final[Header] = (b"content-type", b"text/event-stream; charset=utf-8")
RETRY_AFTER: Final[Header] = (b"retry-after", b"1")
"""Sent with 429 and 503: seconds."""

STEPS: Final = b"pdflow-steps"
"""A header of an engine's answer to /health: how many steps it has run."""

_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode("ascii") for status in HTTPStatus
}


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits within which the server takes requests of one client."""

    head_bytes: int = 64 << 10
    body_bytes: int = 16 << 20
    behind_bytes: int = 16 << 10
    """Bytes that are read behind a request that is being answered, and kept unparsed until then: 64 MiB of all
    connections."""
    connections: int = 4096
    """Open at once. When one more client connects, the connection that has gone longest without a whole request gives
    way; where every connection is being answered, the client waits in the listener's backlog."""
    new_connections: int = 1024
    """Of these, on which no request has been whole yet: a client sends one as soon as it is connected, and 1,024
    connections take 13 MB."""
    fresh_s: float = 0.25
    """How long a connection never gives way after it began to wait: a client's request needs a round trip to arrive."""
    connections_per_address: int = 0
    """Of these, of one client address that is not loopback; 0: any number."""
    reserve: int = 64
    """Connections beyond `connections`, on which the paths of `reserved` are answered while no other request is."""
    reserved: tuple[str, ...] = ("/health", "/health/", "/ping", "/metrics", "/metrics/", "/admin/")
    """Paths, and beginnings of paths that end with a slash, which are answered however busy the server is."""
    arriving_bytes: int = 256 << 20
    """Bodies of all requests that are not whole; beyond it the connection that has gone longest without a whole request
    gives way."""
    answered_bytes: int = 256 << 20
    """Bodies of all requests that are being answered; beyond it further requests with longer bodies than 64 KiB are
    refused."""
    handshake_s: float = 10.0
    """From the connection to the end of its TLS handshake."""
    head_s: float = 20.0
    """From a request's first byte to the end of its head."""
    request_s: float = 60.0
    """From a request's first byte to its last."""
    idle_s: float = 75.0
    """Between requests of one connection."""
    write_s: float = 60.0
    """How long a client may take nothing of what is sent to it; then its request is cancelled. A byte at a time does
    not renew it: the system reports progress when a third of its buffer, some 30 kB, is free."""
    stalled_s: float = 5.0
    """The same where every connection is being answered and one more client connects. Routers and mobile networks
    recover from most losses within seconds."""


class Refusal(msgspec.Struct, frozen=True):
    """An error with which the server itself answers a request; the connection ends with it."""

    status: int
    message: str


class HttpRequest(msgspec.Struct, frozen=True):
    method: str
    path: str
    """Percent-decoded, without the query."""
    query: str
    """As it was sent."""
    headers: Headers
    body: bytes
    keep_alive: bool
    chunked_ok: bool
    """Whether the client speaks HTTP/1.1: a stream is then chunked, else it ends with the connection."""

    def header(self, name: bytes) -> bytes | None:
        return first(self.headers, name)


def first(headers: Headers, name: bytes) -> bytes | None:
    """Return the value of the first header of that (lower-case) name; None if there is none."""
    for key, value in headers:
        if key == name:
            return value
    return None


def head(start_line: bytes, headers: tuple[Header, ...]) -> bytes:
    """Return a head as bytes. ValueError for a header with a line break in it: what follows would be read as another
    one."""
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    if lines.count(b"\n") != len(headers) or lines.count(b"\r") != len(headers):
        raise ValueError(f"a header contains a line break: {headers!r}")
    return b"%b%b\r\n" % (start_line, lines)


def status_line(status: int) -> bytes:
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
