"""The base of transports with streams over TCP, and what the break of a stream proves of the bytes behind its messages.

A stream that was reset proves nothing about the bytes that had been sent on it: the peer may still have them to read.
Proof is what answers at the same port afterwards: the same agent, which welcomes us only once it has let go of the old
stream; another agent, or nobody, and then the old one is gone, as it had the port to itself.
"""

from __future__ import annotations

import logging
import socket
from typing import Final

import trio

from pdflow.protocol.values import Address
from pdflow_runtime.security.tls import Tls
from pdflow_runtime.tls_socket import accepted_with, opened_with
from pdflow_runtime.transports.agent import StreamAgent
from pdflow_runtime.transports.base import EventSink, TransportError
from pdflow_runtime.transports.streams.dialling import AgentGoneError, open_stream
from pdflow_runtime.transports.streams.links import AgentLink
from pdflow_runtime.transports.streams.messages import Description
from pdflow_runtime.transports.streams.sockets import dialled

log = logging.getLogger(__name__)

FIRST_AGAIN_S: Final = 0.02
LAST_AGAIN_S: Final = 1.0
"""The longest pause between two attempts to learn whether a peer has let go; each is twice as long as the one
before."""


class TcpStreams(StreamAgent):
    """Args: `host`, an address of this machine that peers can reach; `tls`, with which streams are encrypted, if they
    are."""

    def __init__(self, me: Address, on_event: EventSink, host: str = "127.0.0.1", tls: Tls | None = None) -> None:
        super().__init__(me, on_event)
        self._host: Final = host
        self._tls: Final = tls

    async def _dial(self, description: Description) -> socket.socket:
        sock = await dialled(description.host, description.port)
        return sock if self._tls is None else opened_with(self._tls.opening(), sock, description.host)

    def _secured(self, sock: socket.socket) -> socket.socket:
        return sock if self._tls is None else accepted_with(self._tls.accepting(), sock)

    async def _confirm_end(self, link: AgentLink) -> None:
        """Connect again and again, until an agent answers, or surely none is there. A link opened meanwhile proves as
        much."""
        pause_s = FIRST_AGAIN_S
        while link in self._closing:
            async with self._connecting.setdefault(link.peer, trio.Lock()):
                if self._reached(link.peer, link.description.incarnation):
                    return
                try:
                    hello = self._hello(link.description)
                    stream = await open_stream(self._dial, self.name, link.peer, link.description, hello)
                except AgentGoneError:
                    return
                except TransportError as error:
                    log.warning(
                        "%s: %s; WRITEs posted to it may still land, so their blocks stay in use; retrying",
                        self.label,
                        error,
                    )
                else:
                    stream.close()
                    return
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_AGAIN_S)
