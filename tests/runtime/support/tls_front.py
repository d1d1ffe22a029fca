"""TLS in front of a server that has none, by threads: what a Valkey built with TLS does at its tls-port."""

from __future__ import annotations

import select
import socket
import ssl
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from tests.runtime.support.threaded_server import threaded_server

LIMIT_S = 20
CHUNK_BYTES = 1 << 16


def accepting(folder: Path, *, demands: bool) -> ssl.SSLContext:
    """By the files of `certify`. Args: `demands`, a certificate of each client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls_cert", folder / "tls_key")
    context.load_verify_locations(folder / "tls_ca")
    context.verify_mode = ssl.CERT_REQUIRED if demands else ssl.CERT_NONE
    return context


def tls_front(port: int, context: ssl.SSLContext) -> AbstractContextManager[int]:
    """The port whose connections are relayed, decrypted, to `port`."""
    return threaded_server(lambda connection: _relay(connection, port, context))


def _relay(connection: socket.socket, port: int, context: ssl.SSLContext) -> None:
    """Until one side closes."""
    connection.settimeout(LIMIT_S)
    try:
        outer = context.wrap_socket(connection, server_side=True)
    except OSError:
        return  # it has sent the reason, and is closed
    with outer, socket.create_connection(("127.0.0.1", port), LIMIT_S) as inner, suppress(OSError):
        while True:
            ready = [outer] if outer.pending() else select.select([outer, inner], [], [], LIMIT_S)[0]
            for source in ready:
                if not (data := source.recv(CHUNK_BYTES)):
                    return
                (inner if source is outer else outer).sendall(data)
