"""A parser that cuts a connection's bytes into requests, within limits. Nothing after the first fault is parsed.

httptools keeps no offset and cannot pause, so a read may yield several requests: they queue in `ready`. A head's length
is measured by what was fed while it was open, for httptools gathers a long header before it hands it over.
"""

from __future__ import annotations

from collections import deque
from urllib.parse import unquote

import httptools
import msgspec

from pdflow_runtime.http.messages import Header, HttpLimits, HttpRequest


class Refusal(msgspec.Struct, frozen=True):
    """An error with which the server itself answers a request; the connection ends with it."""

    status: int
    message: str


class _Refused(Exception):  # noqa: N818 - it never leaves this file: it stops the parser from inside a callback
    pass


class RequestParser:
    """A parser of the bytes given to `feed`; requests, and at most one Refusal behind them, are taken from `ready`."""

    def __init__(self, limits: HttpLimits) -> None:
        self.ready: deque[HttpRequest | Refusal] = deque()
        self.within = False
        """Whether a request has begun and is not whole."""
        self.expects_continue = False
        """Whether the client waits for `100 Continue` before it sends the body."""
        self._limits = limits
        self._parser = httptools.HttpRequestParser(self)
        self._refusal: Refusal | None = None
        self._in_head = True
        self._head_fed = 0
        self._clear()

    def _clear(self) -> None:
        self._target = b""
        self._headers: list[Header] = []
        self._body: list[bytes] = []
        self._body_bytes = 0

    def feed(self, data: bytes) -> None:
        if self._refusal:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Nobody here changes protocols, which is the server's right (RFC 9110 7.8): the request is answered as
            # it is, and the connection ends, for httptools leaves the rest of it unparsed.
            self._last()
        except httptools.HttpParserError as error:
            self._refuse(self._refusal or Refusal(400, f"not HTTP: {error}"))
        if self._in_head and self.within:
            self._head_fed += len(data)
            if self._head_fed > self._limits.head_bytes:
                self._refuse(self._head_too_large())

    def close(self) -> None:
        """Release the parser. Breaks the reference cycle with httptools, which would else last until a garbage
        collection."""
        del self._parser

    def ahead(self) -> bool:
        """True if enough waits in `ready`: as many requests as may, or as many bytes as one may have."""
        ready = self.ready
        if len(ready) < 2:
            return False
        held = sum(len(item.body) for item in ready if isinstance(item, HttpRequest))
        return len(ready) >= self._limits.pipelined or held >= self._limits.body_bytes

    def give_up(self, refusal: Refusal) -> None:
        """Refuse the request whose rest will not come."""
        self._refuse(refusal)

    def _refuse(self, refusal: Refusal) -> None:
        self._refusal = refusal
        self.within = False
        self.ready.append(refusal)

    def _last(self) -> None:
        last = self.ready[-1] if self.ready else None
        if self.within or not isinstance(last, HttpRequest):
            self._refuse(Refusal(400, "a protocol upgrade without a complete request"))
            return
        self.ready[-1] = msgspec.structs.replace(last, keep_alive=False)
        self._refusal = Refusal(400, "a request after one that closes the connection")

    def _head_too_large(self) -> Refusal:
        return Refusal(431, f"the request's headers exceed {self._limits.head_bytes} bytes")

    def _body_too_large(self) -> Refusal:
        return Refusal(413, f"the request's body exceeds {self._limits.body_bytes} bytes")

    def on_message_begin(self) -> None:
        self.within = True
        self._in_head = True
        self._head_fed = 0
        self._clear()

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        length = len(self._target) + sum(len(name) + len(value) + 4 for name, value in self._headers)
        if length > self._limits.head_bytes:
            self._stop(self._head_too_large())
        for name, value in self._headers:
            if name == b"content-length" and int(value) > self._limits.body_bytes:
                self._stop(self._body_too_large())
            if name == b"expect":
                if value.lower() != b"100-continue":
                    self._stop(Refusal(417, "only the expectation 100-continue is supported"))
                self.expects_continue = True

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.body_bytes:
            self._stop(self._body_too_large())
        self._body.append(body)

    def on_message_complete(self) -> None:
        self.within = self.expects_continue = False
        path, query = _split(self._target)
        parser = self._parser
        self.ready.append(
            HttpRequest(
                method=parser.get_method().decode("ascii"),
                path=path,
                query=query,
                headers=tuple(self._headers),
                body=self._body[0] if len(self._body) == 1 else b"".join(self._body),
                keep_alive=parser.should_keep_alive(),
                chunked_ok=parser.get_http_version() == "1.1",
            )
        )

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
