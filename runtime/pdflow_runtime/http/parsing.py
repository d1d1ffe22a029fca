"""A parser that cuts a connection's bytes into requests, within limits. Nothing after the first fault is parsed.

httptools parses, and gets a request in pieces: its head, then its body, whose end is found here. So a request that asks
for a protocol upgrade can be parsed again without that (httptools skips its body), chunks are checked before httptools
sees them, and a body never runs into the next request. What follows a whole request is left to the caller: unparsed, it
takes no more memory than its bytes.
"""

from __future__ import annotations

from collections import deque
from typing import Final
from urllib.parse import unquote

import httptools

from pdflow_runtime.http.chunks import ChunkFraming, body_too_large
from pdflow_runtime.http.messages import Header, HttpLimits, HttpRequest, Refusal

HEADERS: Final = 256
"""Of one request: a header of a few bytes takes some twenty times as many in memory."""
_HEAD_END = b"\r\n\r\n"
_UPGRADE = frozenset((b"upgrade", b"http2-settings"))
"""Headers, and options of Connection, that ask for another protocol."""


class _Refused(Exception):  # noqa: N818 - it never leaves this file: it stops the parser from inside a callback
    pass


class RequestParser:
    """A parser of the bytes given to `feed`; requests, and at most one Refusal after them, are taken from `ready`."""

    def __init__(self, limits: HttpLimits) -> None:
        self.ready: deque[HttpRequest | Refusal] = deque()
        self.within = False
        """Whether a request has begun and is not whole."""
        self.expects_continue = False
        """Whether the client waits for `100 Continue` before it sends the body; not if some of it has come."""
        self._limits = limits
        self._parser = httptools.HttpRequestParser(self)
        self._refusal: Refusal | None = None
        self._in_head = True
        self._head_fed = 0
        self._tail = b""
        """The last bytes of an unfinished head, of which the end may have begun."""
        self._body_left = 0
        self._chunks: ChunkFraming | None = None
        self._upgrades = False
        """Whether the head that was parsed asks for another protocol."""
        self._clear()

    @property
    def in_head(self) -> bool:
        """Whether a request has begun whose head is not whole."""
        return self.within and self._in_head

    @property
    def arriving_bytes(self) -> int:
        """Bytes that are held of a body that is not whole."""
        return len(self._body) if self.within else 0

    def _clear(self) -> None:
        self._target = b""
        self._headers: list[Header] = []
        self._body = bytearray()

    def feed(self, data: bytes) -> int:
        """Parse up to the end of a request, or of the data; return the number of bytes. After a fault all count."""
        at, before = 0, len(self.ready)
        try:
            while at < len(data) and self._refusal is None and len(self.ready) == before:
                at += self._feed_head(data, at) if self._in_head else self._feed_body(data, at)
        except (_Refused, httptools.HttpParserError) as error:
            self._refuse(self._refusal or Refusal(400, f"not HTTP: {error}"))
        return at if self._refusal is None else len(data)

    def _feed_head(self, data: bytes, at: int) -> int:
        """Parse up to the end of the head, or of the data; return the number of bytes."""
        found = (self._tail + data[at : at + 3]).find(_HEAD_END) if self._tail else -1
        if found >= 0:
            stop = at + found + len(_HEAD_END) - len(self._tail)
        else:
            found = data.find(_HEAD_END, at)
            stop = len(data) if found < 0 else found + len(_HEAD_END)
        piece = data if at == 0 and stop == len(data) else data[at:stop]
        self._tail = (self._tail + piece[-3:])[-3:] if found < 0 else b""
        self._head_fed += len(piece)
        if self._head_fed > self._limits.head_bytes:
            self._stop(self._head_too_large())
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            self._without_upgrade()
        return stop - at

    def _without_upgrade(self) -> None:
        """Parse the head again without its wish for another protocol: the request is answered as it is, which is the
        server's right (RFC 9110 7.8)."""
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._stop(Refusal(400, "CONNECT is not supported: this server is no proxy"))
        version = self._parser.get_http_version().encode("ascii")
        lines = [b"%b %b HTTP/%b\r\n" % (method, self._target, version)]
        for name, value in self._headers:
            kept = value
            if name == b"connection":
                kept = b", ".join(o for o in map(bytes.strip, value.split(b",")) if o.lower() not in _UPGRADE)
            if name not in _UPGRADE and (kept or not value):
                lines.append(b"%b: %b\r\n" % (name, kept))
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(b"".join(lines) + b"\r\n")

    def _feed_body(self, data: bytes, at: int) -> int:
        """Parse up to the end of the body, or of the data; return the number of bytes."""
        chunks = self._chunks
        rest = data[at:] if at else data
        if chunks is None:
            piece = rest[: self._body_left]
            self._body_left -= len(piece)
            ended = not self._body_left
        else:
            piece = rest[: chunks.scan(rest)]
            if chunks.refusal:
                self._stop(chunks.refusal)
            ended = chunks.ended
        self._parser.feed_data(piece)
        if ended is self.within:
            self._stop(Refusal(400, "not HTTP: the end of the body is not where its framing says"))
        return len(piece)

    def close(self) -> None:
        """Release the parser. Breaks the reference cycle with httptools, which would else last until a garbage
        collection."""
        del self._parser

    def give_up(self, refusal: Refusal) -> None:
        """Refuse the request whose rest will not come."""
        self._refuse(refusal)

    def _refuse(self, refusal: Refusal) -> None:
        self._refusal = refusal
        self.within = False
        self._clear()
        self.ready.append(refusal)

    def _head_too_large(self) -> Refusal:
        return Refusal(431, f"the request's headers exceed {self._limits.head_bytes} bytes")

    def on_message_begin(self) -> None:
        if not self._in_head:
            self._stop(Refusal(400, "not HTTP: a request within the body of another one"))
        self.within = True
        self._clear()

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))
        if len(self._headers) > HEADERS:
            self._stop(Refusal(431, f"the request has more than {HEADERS} headers"))

    def on_headers_complete(self) -> None:
        self._upgrades = self._parser.should_upgrade()
        if self._upgrades:
            return
        self._in_head = False
        self._head_fed = 0
        hosts = 0
        is_old = self._parser.get_http_version() != "1.1"
        for name, value in self._headers:
            if name == b"host":
                hosts += 1
            elif name == b"content-length":
                self._body_left = int(value)
                if self._body_left > self._limits.body_bytes:
                    self._stop(body_too_large(self._limits))
            elif name == b"transfer-encoding":
                self._check_encoding(value, is_old)
                self._chunks = ChunkFraming(self._limits)
            elif name == b"expect" and not is_old:
                if value.lower() != b"100-continue":
                    self._stop(Refusal(417, "only the expectation 100-continue is supported"))
                self.expects_continue = True
        if hosts > 1 or (not hosts and not is_old):
            # RFC 9112 3.2.
            self._stop(Refusal(400, f"the request has {hosts or 'no'} Host headers, expected one"))

    def _check_encoding(self, value: bytes, is_old: bool) -> None:
        """Refuse a body that a proxy between the client and us may have framed otherwise (RFC 9112 6.1): where it sees
        another end, it takes the rest for a request of another client."""
        if is_old:
            self._stop(Refusal(400, "a request of HTTP/1.0 cannot have Transfer-Encoding: use Content-Length"))
        if value.lower() != b"chunked":
            self._stop(Refusal(501, "only the Transfer-Encoding chunked is supported"))

    def on_body(self, body: bytes) -> None:
        self.expects_continue = False
        self._body += body
        if len(self._body) > self._limits.body_bytes:
            self._stop(body_too_large(self._limits))

    def on_message_complete(self) -> None:
        if self._upgrades:
            return
        self.within = self.expects_continue = False
        self._in_head, self._chunks, self._body_left = True, None, 0
        path, query = _split(self._target)
        parser = self._parser
        self.ready.append(
            HttpRequest(
                method=parser.get_method().decode("ascii"),
                path=path,
                query=query,
                headers=tuple(self._headers),
                body=bytes(self._body),
                keep_alive=parser.should_keep_alive(),
                chunked_ok=parser.get_http_version() == "1.1",
            )
        )
        self._clear()

    def _stop(self, refusal: Refusal) -> None:
        self._refusal = refusal
        raise _Refused


def _split(target: bytes) -> tuple[str, str]:
    """Return path and query of a request's target, which may be a whole URL (RFC 9112 3.2.2)."""
    text = target.decode("latin-1")
    if not text.startswith("/") and "://" in text:
        text = "/" + text.partition("://")[2].partition("/")[2]
    path, _, query = text.partition("?")
    return unquote(path) if "%" in path else path, query
