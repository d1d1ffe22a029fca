"""TCP sockets as the transports want them: addresses that peers can use, ports that belong to one process at a time."""

from __future__ import annotations

import errno
import os
import socket
from typing import Final

import trio

from pdflow_runtime.transports.base import TransportError

BACKLOG: Final = 128
IDLE_S: Final = 5
"""The time of silence before the kernel asks whether the other host is still there; it asks three times, as far
apart."""

ESTABLISHED: Final = 1
"""The state that TCP_INFO begins with."""


def listening(host: str) -> socket.socket:
    """Return a socket that listens at a free port of this address. TransportError if it is no address of this
    machine."""
    if host in ("", "0.0.0.0", "::"):
        raise TransportError(f"{host!r} is not an address that peers can connect to: use an address of this host")
    listener = socket.socket(_family(host))
    listener.setblocking(False)
    try:
        # No SO_REUSEADDR: a port that can be bound belongs to nobody else any more.
        listener.bind((host, 0))
    except OSError as error:
        listener.close()
        raise TransportError(f"cannot listen on {host}: {error.strerror}") from None
    listener.listen(BACKLOG)
    return listener


async def dialled(host: str, port: int) -> socket.socket:
    """Return a connected socket. OSError, TransportError."""
    family = _family(host)
    try:
        socket.inet_pton(family, host)
    except (OSError, ValueError):
        raise TransportError("its address is invalid") from None
    sock = socket.socket(family)
    sock.setblocking(False)
    try:
        refused = sock.connect_ex((host, port))
        if refused == errno.EINPROGRESS:
            await trio.lowlevel.wait_writable(sock)
            refused = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if refused:
            raise OSError(refused, os.strerror(refused))
        tune(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def tune(sock: socket.socket) -> None:
    """Set options of a socket: an answer does not wait for a full packet, and a host that vanished is noticed while
    nothing is sent to it."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        sock.setsockopt(socket.IPPROTO_TCP, option, IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def is_whole(sock: socket.socket) -> bool:
    """True if neither side has ended the connection, whatever may still have to be read from it."""
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == ESTABLISHED
    except OSError:
        return False


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
