"""Sockets with TLS that are used as plain non-blocking ones are: the rest of the server and of the client does not know
the difference.

What would block raises BlockingIOError, as for a plain socket. A record has 16 KiB at most, and is sent or is not: what
`send` returns is never more than was encrypted, and the next `send` must begin with the same bytes, as every caller
here does that is to lose none.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeAlias, cast

from trio.lowlevel import wait_readable, wait_writable

TlsNow: TypeAlias = Callable[[], ssl.SSLContext]
"""Returns what the next connection is made with."""
RECORD_BYTES: Final = 16 << 10
"""The most of one TLS record (RFC 8446 5.1)."""
_WRONG_TIME: Final = (9, 10)
"""X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED (openssl/x509_vfy.h)."""


class PlainHttpError(OSError):
    """The client does not use TLS."""


class TlsSocket(ssl.SSLSocket):
    """One end of a connection with TLS, before or after its handshake."""

    @property
    def needs_certificate(self) -> bool:
        """Whether the peer must present a certificate."""
        return self.context.verify_mode is ssl.CERT_REQUIRED

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


def failure_text(error: ssl.SSLError, authority: str = "") -> str:
    """Return why a client has no TLS with a server, and what to do. `authority`: where the file with the servers'
    authority is set; needed for errors of a handshake only."""
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if isinstance(error, ssl.SSLCertVerificationError):
        text = f"certificate verify failed: {error.verify_message}"
        if error.verify_code in _WRONG_TIME:
            return f"{text}: renew the server's certificate, or correct this host's clock"
        return f"{text}; {authority} names the file with its authority"
    if reason == "wrong version number":
        return "the server answers without TLS"
    if " alert " in reason:
        return f"the server refuses this side's certificate: {reason.partition(' alert ')[2]}"
    return reason


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
