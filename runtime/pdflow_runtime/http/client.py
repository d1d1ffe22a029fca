"""Requests to upstream servers, over connections that are kept and used again.

    async with client.request("POST", host, port, "/v1/completions", (JSON,), body) as response:
        whole = await response.read()

Leaving the block before the answer is whole closes the connection, which is how an upstream learns of an abort. A kept
connection may have been closed by the other side meanwhile: it is looked at before it is used, and where it ends
before a byte of the answer came, the request is sent once more on a fresh one (RFC 9110 9.2.2 allows that where the
client knows better: every request to an engine carries its attempt's id).
"""

from __future__ import annotations

import socket
import ssl
from types import TracebackType

import trio

from pdflow_runtime.http.descriptors import EXHAUSTION
from pdflow_runtime.http.errors import UpstreamError
from pdflow_runtime.http.messages import Headers, head
from pdflow_runtime.http.response import Response, broken, read_head
from pdflow_runtime.http.sockets import close, connect, receive_now, send_all, silent, system_reason
from pdflow_runtime.tls_socket import TlsNow, failure_text, opened_with


class HttpClient:
    """Args: `tls`, with which all servers are asked, or what returns it for the next connection; None: they are asked
    without. `authority`: where the file with their authority is set, for messages."""

    def __init__(
        self,
        *,
        connect_s: float = 5.0,
        idle_per_host: int = 256,
        head_bytes: int = 64 << 10,
        tls: ssl.SSLContext | TlsNow | None = None,
        authority: str = "SSL_CERT_FILE",
    ) -> None:
        self._connect_s = connect_s
        self._idle_per_host = idle_per_host
        self._head_bytes = head_bytes
        self._tls = (lambda: tls) if isinstance(tls, ssl.SSLContext) else tls
        self._authority = authority
        self._idle: dict[tuple[str, int], list[socket.socket]] = {}

    def request(
        self, method: str, host: str, port: int, path: str, headers: Headers = (), body: bytes = b""
    ) -> Exchange:
        """Return the exchange of one request, whose response `async with` gives. UpstreamError on entering it where
        none came.

        `headers` go out as they are, with host and content-length added.
        """
        own = ((b"host", _authority(host, port)), (b"content-length", b"%d" % len(body)))
        start = f"{method} {path} HTTP/1.1\r\n"
        if start.count(" ") != 2 or start.count("\r") != 1 or start.count("\n") != 1:
            raise ValueError(f"cannot write this request line: {start!r}")
        return Exchange(self, (host, port), head(start.encode("ascii"), (*own, *headers)) + body)

    def forget(self, host: str, port: int) -> None:
        """Close the idle connections to that server."""
        for sock in self._idle.pop((host, port), ()):
            close(sock)

    def close(self) -> None:
        """Close every kept connection; those in use end with their exchange."""
        for address in tuple(self._idle):
            self.forget(*address)

    async def take(self, address: tuple[str, int]) -> tuple[socket.socket, bool]:
        """Return a connection, and whether it has been used before."""
        idle = self._idle.get(address)
        while idle:
            sock = idle.pop()
            if silent(sock):
                return sock, True
            close(sock)
        return await self.dial(address), False

    async def dial(self, address: tuple[str, int]) -> socket.socket:
        host, port = address
        try:
            with trio.fail_after(self._connect_s):
                return await self._secured(await connect(host, port), host)
        except trio.TooSlowError:
            raise UpstreamError(
                "timeout", f"cannot connect to {host}:{port}: no answer within {self._connect_s:g} s"
            ) from None
        except ssl.SSLError as error:
            problem = failure_text(error, self._authority)
            raise UpstreamError("tls", f"no TLS with {host}:{port}: {problem}") from error
        except OSError as error:
            EXHAUSTION.add(f"connecting to {host}:{port}", error)
            raise UpstreamError("refused", f"cannot connect to {host}:{port}: {system_reason(error)}") from error

    async def _secured(self, sock: socket.socket, host: str) -> socket.socket:
        if self._tls is None:
            return sock
        secured = opened_with(self._tls(), sock, host)
        try:
            await secured.handshake()
        except BaseException:
            close(secured)
            raise
        return secured

    def keep(self, address: tuple[str, int], sock: socket.socket) -> None:
        idle = self._idle.setdefault(address, [])
        if len(idle) < self._idle_per_host:
            idle.append(sock)
        else:
            close(sock)

    async def answer(self, sock: socket.socket, data: bytes) -> Response:
        try:
            await send_all(sock, data)
        except OSError as error:
            raise _refusal(sock) or UpstreamError(
                "closed", f"the connection broke while the request was sent: {system_reason(error)}"
            ) from error
        return await read_head(sock, self._head_bytes)


def _refusal(sock: socket.socket) -> UpstreamError | None:
    """Return why the server has ended the connection, if it has said so by TLS, as for the client's certificate."""
    try:
        receive_now(sock)
    except ssl.SSLError as error:
        return broken(error, "the request was not sent", began=False)
    except OSError:
        pass
    return None


class Exchange:
    """A context manager that sends one request and gives its response."""

    def __init__(self, client: HttpClient, address: tuple[str, int], data: bytes) -> None:
        self._client = client
        self._address = address
        self._data = data
        self._sock: socket.socket | None = None
        self._response: Response | None = None

    async def __aenter__(self) -> Response:
        sock, used = await self._client.take(self._address)
        try:
            return await self._ask(sock)
        except UpstreamError as error:
            if not used or error.kind != "closed" or error.began:
                raise
        return await self._ask(await self._client.dial(self._address))

    async def _ask(self, sock: socket.socket) -> Response:
        try:
            response = await self._client.answer(sock, self._data)
        except BaseException:
            close(sock)
            raise
        self._sock, self._response = sock, response
        return response

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._sock
        assert self._response
        if self._response.reusable:
            self._client.keep(self._address, self._sock)
        else:
            close(self._sock)
        self._response.close()


def _authority(host: str, port: int) -> bytes:
    return f"[{host}]:{port}".encode("ascii") if ":" in host else f"{host}:{port}".encode("ascii")
