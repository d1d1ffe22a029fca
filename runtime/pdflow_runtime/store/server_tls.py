"""TLS of the connections to a store's server: which certificates are accepted and presented, and what failed.

The library's own connections with TLS are not used: they begin with the system's authorities and add the file that they
are given, so that, as names are not checked within a cluster, any certificate of a public authority would be accepted.
"""

from __future__ import annotations

import socket
import ssl
from typing import Any, Final

import attrs

from pdflow_runtime.security.tls import AUTHORITY, Tls
from pdflow_runtime.tls_socket import TlsNow, client_context, failure_text

SYSTEM: Final = "SSL_CERT_FILE"


class HandshakeTimeoutError(ssl.SSLError):
    """Raised when the server accepts a connection, and does not answer the handshake in time."""


@attrs.frozen
class ServerTls:
    """Args: `opening` returns the context of the next connection; `authority` says where the server's authority is set;
    `presents`, whether this side has a certificate."""

    opening: TlsNow
    authority: str
    presents: bool

    @classmethod
    def of(cls, tls: Tls | None) -> ServerTls:
        """Return TLS by the cluster's certificates, which are read again when they change; without them, TLS with a
        server whose name a system's authority has certified."""
        if tls is not None:
            return cls(tls.opening, AUTHORITY, presents=True)
        context = client_context()
        return cls(lambda: context, SYSTEM, presents=False)

    def connections(self, library: Any) -> Any:
        """Return the client library's class of connections, with TLS."""
        opening = self.opening

        class TlsConnection(library.Connection):  # type: ignore[misc]  # the library is optional, and so Any
            def _connect(self) -> ssl.SSLSocket:
                sock: socket.socket = super()._connect()
                try:
                    return opening().wrap_socket(sock, server_hostname=self.host)
                except TimeoutError:
                    raise HandshakeTimeoutError(f"{self.socket_timeout:g} s") from None
                finally:
                    sock.close()  # without effect if TLS has it now

        return TlsConnection

    def problem(self, error: ssl.SSLError) -> str:
        """Return what failed, and what to do."""
        if isinstance(error, HandshakeTimeoutError):
            return (
                f"the server does not answer the TLS handshake within {error.args[0]}; if its port has no TLS, write "
                "valkey:// or redis://"
            )
        if isinstance(error, ssl.SSLEOFError):
            return f"the server closed the connection; {self.remedy}"
        text = failure_text(error, self.authority)
        if "protocol version" in text or "unsupported protocol" in text:
            return f"{text}; it must offer TLS {'1.3' if self.presents else '1.2'} or later (tls-protocols)"
        if text.endswith("does not use TLS"):
            return f"{text}; write valkey:// or redis://, or the port that has TLS"
        return f"{text}; {self.remedy}" if text.startswith("the server ") else text

    @property
    def remedy(self) -> str:
        """What to do if the server refuses this side's certificate."""
        if self.presents:
            return "the server's tls-ca-cert-file must name the authority of serve.tls_cert"
        return "if it demands a certificate (tls-auth-clients), set serve.tls_cert, tls_key and tls_ca"
