"""The base of transports where the receiver fetches: a guest's WRITE and a READ of ours are the same motion, done
here."""

from __future__ import annotations

from abc import abstractmethod

import trio

from pdflow.protocol.values import Address
from pdflow.protocol.wire.malformed import Malformed
from pdflow_runtime.transports.agent import StreamAgent
from pdflow_runtime.transports.copying import Motion
from pdflow_runtime.transports.streams.links import AgentLink, Guest, Remote
from pdflow_runtime.transports.streams.messages import PackedPieces, Write, unpack_pieces
from pdflow_runtime.transports.streams.stream import StreamBrokenError


class FetchingAgent(StreamAgent):
    @abstractmethod
    def _motion(self, owner: object, peer: Address, generation: int, remote: Remote, pieces: PackedPieces) -> Motion:
        """Return the motion that brings these pieces of the peer's memory into ours."""

    async def _receive(self, guest: Guest, message: Write) -> bool:
        assert self._memory is not None
        assert guest.remote is not None
        pieces = unpack_pieces(message.pieces, guest.remote.extent, self._memory.extent)
        if isinstance(pieces, Malformed):
            raise StreamBrokenError(pieces.reason)
        if not self._welcome(guest, message.generation):
            return False
        motion = self._motion(guest, guest.name, message.generation, guest.remote, pieces)
        landed = await self._move(motion)
        if motion.failed:
            raise StreamBrokenError("its bytes cannot be read")
        return landed

    def _post_read(self, op: int, link: AgentLink, pieces: PackedPieces) -> None:
        assert link.remote is not None
        link.motions.append((op, self._motion(link, link.peer, -1, link.remote, pieces)))
        link.bell.set()

    async def _attend_link(self, link: AgentLink) -> None:
        """Run our READs of this peer, one after the other."""
        while True:
            while link.motions:
                op, motion = link.motions[0]
                self._fetching(link, op)
                landed = await self._move(motion)
                self._fetched(link, op)
                if link.motions and link.motions[0][1] is motion:
                    link.motions.popleft()
                    self._read_over(op, link, landed)
                if motion.failed:
                    self._lose(link)
            link.bell = trio.Event()
            await link.bell.wait()

    def _read_over(self, op: int, link: AgentLink, landed: bool) -> None:
        self._ended(link, op, landed)

    def _fetching(self, link: AgentLink, op: int) -> None:
        """Called when a READ begins."""

    def _fetched(self, link: AgentLink, op: int) -> None:
        """Called when a READ moves nothing any more."""
