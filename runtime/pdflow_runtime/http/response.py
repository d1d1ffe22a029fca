"""The answer of an upstream server: its head, and its body either as it came or decoded.

`receive` gives the body with its framing (chunk sizes and all), which is what a relay passes on: the parser sees every
byte, but only to know where the answer ends and that it is well formed, and it sees it first, so that nothing malformed
is passed on. `read` and `pieces` give the body itself.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncGenerator
from itertools import count

import httptools

from pdflow_runtime.http.errors import UpstreamError
from pdflow_runtime.http.messages import Header, Headers, first
from pdflow_runtime.http.pump import Take, carry
from pdflow_runtime.http.sockets import receive
from pdflow_runtime.tls_socket import failure_text

_HEAD_END = b"\r\n\r\n"


class Response:
    """A response whose `status` and `headers` are there from the start, and whose body is received on demand."""

    def __init__(self, sock: socket.socket) -> None:
        self.status = 0
        self.headers: Headers = ()
        self.complete = False
        """Whether the last byte has come."""
        self._sock = sock
        self._lines: list[Header] = []
        self._waiting = b""
        """What came behind the head, with its framing."""
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._decoding = False
        self._keep_alive = False
        self._malformed = False
        self._last = b""
        """What was accepted last."""
        # The parser calls these for every chunk: counters in C, a third of what methods of ours would cost.
        self._begun, self._ended = count(), count()
        self.on_chunk_header = self._begun.__next__
        self.on_chunk_complete = self._ended.__next__
        self._parser = httptools.HttpResponseParser(self)

    def header(self, name: bytes) -> bytes | None:
        return first(self.headers, name)

    @property
    def reusable(self) -> bool:
        """True if the connection can carry another request."""
        return self.complete and self._keep_alive and not self._malformed

    @property
    def chunked(self) -> bool:
        return self.header(b"transfer-encoding") is not None

    @property
    def framing(self) -> Headers:
        """The headers that say how the body ends: none for one that ends with its connection."""
        return tuple(header for header in self.headers if header[0] in (b"transfer-encoding", b"content-length"))

    def broke_between_chunks(self) -> bool:
        """True if all that was accepted ends with a whole chunk, or is nothing: another chunk could follow.

        Call it once, after the end: each call advances the counters. False for a malformed answer, where it is unknown.
        """
        whole = next(self._begun) == next(self._ended) and self._last[-2:] in (b"", b"\r\n")
        return self.chunked and whole and not self._malformed

    async def receive(self) -> bytes:
        """Return the next bytes of the body with its framing, b"" after the last. UpstreamError where it breaks off."""
        if self.complete:
            return b""
        data, self._waiting = self._waiting, b""
        if not data:
            try:
                data = await receive(self._sock)
            except OSError as error:
                raise broken(error) from error
        self.accept(data)
        return data

    async def carry(self, take: Take) -> None:
        """Receive by the pump: gives `take` the next bytes, for it to `accept`, until it returns False or raises."""
        data, self._waiting = self._waiting, b""
        if data and not take(data):
            return
        try:
            await carry(self._sock, take)
        except OSError as error:
            raise broken(error) from error

    def accept(self, data: bytes) -> None:
        """Take the next bytes that came, b"" for the end of the connection. UpstreamError if the answer is malformed or
        ends early."""
        if data:
            self.feed(data)
            self._last = data
        elif self.chunked or self.header(b"content-length"):
            raise UpstreamError("closed", "the response ended early", began=True)
        else:
            self.complete = True

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Yield the body without its framing, as it comes."""
        self._decoding = True
        while not self.complete:
            await self.receive()
            body, self._body = self._body, []
            for piece in body:
                yield piece

    async def read(self, limit_bytes: int = 16 << 20) -> bytes:
        """Return the whole body."""
        self._decoding = True
        while not self.complete:
            await self.receive()
            if self._body_bytes > limit_bytes:
                raise UpstreamError("too large", f"the response exceeds {limit_bytes} bytes", began=True)
        return b"".join(self._body)

    def close(self) -> None:
        """Release the parser. Breaks the reference cycle with it, which would else last until a garbage collection."""
        del self._parser

    def feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._malformed = True
            raise UpstreamError("malformed", f"the response is not HTTP: {error}", began=True) from error

    def begin_body(self, data: bytes) -> None:
        """Take the bytes that came behind the head."""
        self._waiting = data
        if data and self.complete:
            raise UpstreamError("malformed", "unexpected bytes after the response", began=True)

    def on_message_begin(self) -> None:
        if self.complete:
            raise httptools.HttpParserError("unexpected bytes after the response")
        self._lines = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._lines.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.headers = tuple(self._lines)

    def on_body(self, body: bytes) -> None:
        if self._decoding:
            self._body.append(body)
            self._body_bytes += len(body)

    def on_message_complete(self) -> None:
        if self.status >= 200:
            self.complete = True
            self._keep_alive = self._parser.should_keep_alive()


def broken(error: OSError, what: str = "the connection broke during the response", began: bool = True) -> UpstreamError:
    """Return what follows from an error of the socket. A server with TLS 1.3 refuses the client's certificate after the
    handshake has ended for the client."""
    if isinstance(error, ssl.SSLError):
        return UpstreamError("tls", f"{what}: {failure_text(error)}", began=began)
    return UpstreamError("closed", f"{what}: {error}", began=began)


async def read_head(sock: socket.socket, limit_bytes: int) -> Response:
    """Return the response, once its head is here; interim answers (1xx) are passed over. UpstreamError where none
    comes."""
    response = Response(sock)
    data = b""
    began = False
    while True:
        end = data.find(_HEAD_END) + len(_HEAD_END)
        if end >= len(_HEAD_END):
            response.feed(data[:end])
            data = data[end:]
            if response.status >= 200:
                response.begin_body(data)
                return response
            continue
        if len(data) > limit_bytes:
            raise UpstreamError("too large", f"the response's headers exceed {limit_bytes} bytes", began=True)
        try:
            more = await receive(sock)
        except OSError as error:
            raise broken(error, "no response", began) from error
        if not more:
            raise UpstreamError("closed", "the peer closed the connection before its response", began=began)
        began = True
        data += more
