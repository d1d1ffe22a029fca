"""Sockets with TLS that are used as plain non-blocking ones are: the rest of the server and of the client does not know
the difference.

What would block raises BlockingIOError, as for a plain socket. A record has 16 KiB at most, and is sent or is not: what
`send` returns is never more than was encrypted, and the next `send` must begin with the same bytes, as every caller
here does that is to lose none.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from typing import Any, Final, cast

from trio.lowlevel import wait_readable, wait_writable

RECORD_BYTES: Final = 16 << 10
"""The most of one TLS record (RFC 8446 5.1)."""


class PlainHttpError(OSError):
    """The client does not use TLS."""


class TlsSocket(ssl.SSLSocket):
    """One end of a connection with TLS, before or after its handshake."""

    async def handshake(self) -> None:
        """Complete the handshake. OSError if the peer does not, or if its certificate is refused."""
        while True:
            try:
                self.do_handshake()
            except ssl.SSLWantReadError:
                await wait_readable(self)
            except ssl.SSLWantWriteError:
                await wait_writable(self)
            except ssl.SSLError as error:
                if error.reason == "HTTP_REQUEST":
                    raise PlainHttpError("the client sent plain HTTP") from None
                raise
            else:
                return

    def recv(self, buflen: int = RECORD_BYTES, flags: int = 0) -> bytes:
        try:
            return super().recv(buflen, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def send(self, data: Any, flags: int = 0) -> int:
        view, sent = memoryview(data), 0
        while sent < len(view):
            try:
                sent += super().send(view[sent : sent + RECORD_BYTES], flags)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if not sent:
                    raise BlockingIOError from None
                break
        return sent

    def send_plain(self, data: bytes) -> None:
        """Send to a client that does not use TLS, which has sent something already."""
        with suppress(OSError):
            socket.socket.send(self, data)
            socket.socket.recv(self, 64 << 10)  # unread bytes would make closing a reset, which takes the answer along
            socket.socket.shutdown(self, socket.SHUT_WR)

    def shutdown(self, how: int) -> None:
        self._notify()
        super().shutdown(how)

    def close(self) -> None:
        self._notify()
        super().close()

    def _notify(self) -> None:
        """Send that nothing follows (close_notify), if that does not have to wait; the peer's is not waited for."""
        with suppress(OSError, ValueError):
            self.unwrap()


def is_buffered(sock: socket.socket) -> bool:
    """True if the socket has decrypted bytes that were not received yet: the system does not report those."""
    return isinstance(sock, ssl.SSLSocket) and sock.pending() > 0


def accepted_with(context: ssl.SSLContext, sock: socket.socket) -> TlsSocket:
    """Return a connected, non-blocking socket as the server's end of a connection with TLS; it takes the socket over.
    OSError if the client has gone."""
    return _wrapped(context, sock, None)


def opened_with(context: ssl.SSLContext, sock: socket.socket, host: str) -> TlsSocket:
    """Return the same for the client's end. `host` is the name that the server's certificate must have."""
    return _wrapped(context, sock, host)


def client_context() -> ssl.SSLContext:
    """Return the context of clients that verify the server. Authorities are the system's, or those of the file that the
    environment's SSL_CERT_FILE names."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _wrapped(context: ssl.SSLContext, sock: socket.socket, host: str | None) -> TlsSocket:
    context.sslsocket_class = TlsSocket
    try:
        made = context.wrap_socket(sock, server_side=host is None, server_hostname=host, do_handshake_on_connect=False)
    except BaseException:
        sock.close()
        raise
    return cast("TlsSocket", made)
