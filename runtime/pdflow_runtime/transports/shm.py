"""The transport between processes of one machine: each region is a file that peers map for reading, and the receiver
copies.

No process maps another's memory for writing, so no peer can write where it may not: a WRITE is a request, which the
owner of the target carries out. Messages go over a Unix socket beside the file, to processes of the same user only.

A READ needs nothing of the peer but its file, which stays as it is even when its owner dies.
"""

from __future__ import annotations

import mmap
import socket
from pathlib import Path
from typing import Final

import msgspec

from pdflow.protocol.values import Address
from pdflow_runtime.transports.base import EventSink, WordArrived
from pdflow_runtime.transports.copying import Copy, Mapped
from pdflow_runtime.transports.moving import FetchingAgent
from pdflow_runtime.transports.region import FOLDER, OwnedRegion, map_region, sweep
from pdflow_runtime.transports.streams.links import AgentLink, Guest, Remote
from pdflow_runtime.transports.streams.messages import (
    AgentHello,
    Description,
    PackedPieces,
    ReadOver,
    ReadRequest,
    ReadWordRequest,
    word_at,
)
from pdflow_runtime.transports.streams.over_unix import UnixStreams, check_user
from pdflow_runtime.transports.streams.stream import OutgoingMessage, StreamBrokenError


class ShmTransport(UnixStreams, FetchingAgent):
    """The transport over shared memory. Args: `folder`, of a tmpfs; tests use another."""

    name: Final = "shm"

    def __init__(self, me: Address, on_event: EventSink, folder: Path = FOLDER) -> None:
        super().__init__(me, on_event, folder)
        self._region: OwnedRegion | None = None

    def allocate(self, nbytes: int) -> memoryview:
        sweep(self._folder)
        region = OwnedRegion(nbytes, self._folder)
        return self._over(region, region)

    def join(self, owner: ShmTransport) -> memoryview:
        """Use another agent's region as this one's, too."""
        assert owner._region is not None, "call allocate first"
        return self._over(owner._region, OwnedRegion(mmap.PAGESIZE, self._folder))

    def _over(self, region: OwnedRegion, own: OwnedRegion) -> memoryview:
        assert self._region is None, "an agent has one region"
        self._region = region
        self._memory = Mapped(region.view)
        # Where the region is another agent's, `own` is an empty page, for its name.
        self._listen_beside(own)
        return region.view

    def describe(self) -> bytes:
        assert self._region is not None, "call allocate first"
        return msgspec.msgpack.encode(
            Description(
                self.name,
                self.incarnation,
                self.token,
                str(self._socket_path),
                0,
                str(self._region.path),
                self._region.nbytes,
            )
        )

    def _hello(self, description: Description) -> AgentHello:
        assert self._region is not None
        region = self._region
        return msgspec.structs.replace(super()._hello(description), memory=str(region.path), nbytes=region.nbytes)

    def _reach(self, description: Description, hello: AgentHello) -> Mapped:
        return Mapped(map_region(description.memory, description.nbytes, self._folder))

    def _admit(self, hello: AgentHello, sock: socket.socket) -> Mapped:
        check_user(sock)
        return Mapped(map_region(hello.memory, hello.nbytes, self._folder))

    def _serve_read(self, guest: Guest, message: ReadRequest | ReadWordRequest | ReadOver) -> OutgoingMessage:
        raise StreamBrokenError("the peer asked for bytes, which over shm it must map")

    def _motion(self, owner: object, peer: Address, generation: int, remote: Remote, pieces: PackedPieces) -> Copy:
        assert isinstance(remote, Mapped)
        assert isinstance(self._memory, Mapped)
        return Copy(owner, peer, generation, remote, self._memory, pieces)

    def _post_word(self, op: int, link: AgentLink, address: int) -> None:
        assert isinstance(link.remote, Mapped)
        self._on_event(WordArrived(op, word_at(link.remote.view, address)))
