"""The transport between hosts over TCP: bytes go behind their messages, and are received straight into the region.

The socket reads of a payload are ours, one after the other in trio's thread, and each is preceded by the question
whether the bytes are still wanted; so a fence holds from the moment it is asked for, and what comes later is read and
thrown away.

With `tls` all of it is encrypted, between peers that have certificates of one authority, and what was changed on its
way reaches no region. Without, it is for hosts that trust their network.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from typing import Final

from pdflow.protocol.wire.malformed import Malformed
from pdflow_runtime.transports.adopting import MappedSegments, Segment
from pdflow_runtime.transports.asking import ANYWHERE, AskingAgent, anonymous
from pdflow_runtime.transports.base import TransportError
from pdflow_runtime.transports.copying import Mapped
from pdflow_runtime.transports.streams.links import AgentLink, Guest
from pdflow_runtime.transports.streams.messages import (
    AgentHello,
    Data,
    Description,
    PackedPieces,
    Write,
    frame,
    unpack_pieces,
)
from pdflow_runtime.transports.streams.sockets import tune
from pdflow_runtime.transports.streams.stream import OutgoingMessage, StreamBrokenError


class TcpTransport(AskingAgent):
    name: Final = "tcp"

    def adopt(self, segments: Sequence[Segment], own_bytes: int) -> memoryview:
        """Use memory of this process that somebody else has allocated; see `transports/adopting.py`."""
        for segment in segments:
            if segment.gpu is not None:
                raise TransportError(f"tcp cannot move memory of a GPU (a segment on GPU {segment.gpu}); use nixl")
        return self._over(MappedSegments(segments, anonymous(own_bytes) if own_bytes else memoryview(bytearray())))

    def _reach(self, description: Description, hello: AgentHello) -> None:
        return None

    def _admit(self, hello: AgentHello, sock: socket.socket) -> None:
        tune(sock)

    def _payload(self, pieces: PackedPieces) -> Iterable[memoryview]:
        assert isinstance(self._memory, Mapped | MappedSegments)
        sources, _, lengths = pieces.lists()
        return self._memory.views(sources, lengths)

    def _landing(self, pieces: PackedPieces) -> Iterable[memoryview]:
        assert isinstance(self._memory, Mapped | MappedSegments)
        _, targets, lengths = pieces.lists()
        return self._memory.views(targets, lengths)

    async def _receive(self, guest: Guest, message: Write) -> bool:
        assert self._memory is not None
        pieces = unpack_pieces(message.pieces, ANYWHERE, self._memory.extent)
        if isinstance(pieces, Malformed):
            raise StreamBrokenError(pieces.reason)

        def keep_reading() -> bool:
            return self._welcome(guest, message.generation)

        return await guest.stream.fill(self._landing(pieces), keep_reading) and keep_reading()

    def _data(self, guest: Guest, op: int, pieces: PackedPieces) -> OutgoingMessage:
        return OutgoingMessage(frame(Data(op, pieces.nbytes)), self._payload(pieces))

    async def _receive_data(self, link: AgentLink, message: Data) -> None:
        op, pieces = message.op, self._asked(link, message)
        if pieces is None:
            await link.stream.discard(message.nbytes)
        elif await link.stream.fill(self._landing(pieces), lambda: link.reads.get(op) is pieces) and op in link.reads:
            self._ended(link, op, True)
