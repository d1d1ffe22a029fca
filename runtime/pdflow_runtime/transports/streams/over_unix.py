"""The base of transports between processes of one machine and one user: streams over a Unix socket beside a file in
shared memory.

The kernel ends such a stream when the process at its other end has ended, and breaks it for no other reason. So its end
is proof that nothing of the peer moves, and what came before it can be read first.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from pathlib import Path
from typing import Final

import trio

from pdflow.protocol.values import Address
from pdflow_runtime.transports.agent import StreamAgent
from pdflow_runtime.transports.base import EventSink, TransportError
from pdflow_runtime.transports.region import FOLDER, OwnedRegion, check_path
from pdflow_runtime.transports.streams.messages import Description

BACKLOG: Final = 128
_CREDENTIALS: Final = struct.Struct("3i")
"""pid, uid and gid of the process at the other end (SO_PEERCRED)."""


class UnixStreams(StreamAgent):
    """Args: `folder`, of a tmpfs; tests use another."""

    def __init__(self, me: Address, on_event: EventSink, folder: Path = FOLDER) -> None:
        super().__init__(me, on_event)
        self._folder: Final = folder
        self._own: OwnedRegion | None = None
        """The file whose name our socket has. It holds memory of ours that peers map, or nothing."""

    def _listen_beside(self, own: OwnedRegion) -> None:
        self._own = own
        listener = self._listener = socket.socket(socket.AF_UNIX)
        listener.setblocking(False)
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(str(self._socket_path))
        listener.listen(BACKLOG)

    @property
    def _socket_path(self) -> Path:
        assert self._own is not None
        return self._own.path.with_suffix(".sock")

    def _hide(self) -> None:
        if self._own is not None:
            self._own.close()
            self._socket_path.unlink(missing_ok=True)

    async def _dial(self, description: Description) -> socket.socket:
        check_path(description.host, "sock", self._folder)
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        try:
            # A full backlog refuses a Unix socket at once (EAGAIN) instead of letting it wait.
            while (refused := sock.connect_ex(description.host)) == errno.EAGAIN:
                await trio.sleep(0.001)
            if refused:
                raise OSError(refused, os.strerror(refused))
        except BaseException:
            sock.close()
            raise
        return sock


def check_user(sock: socket.socket) -> None:
    """Raise TransportError for a peer that runs as another user."""
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        raise TransportError(f"it runs as another user ({uid})")
