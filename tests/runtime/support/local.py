"""Transports over TCP that declare what none of the real ones does: DONE that is local, fences that close.

They are for tests: a rank that takes their DONE for more than it says, or an old grant for a valid one, fails here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

import msgspec
import trio

from pdflow.layout.descriptors import Descriptor
from pdflow.protocol.values import Address
from pdflow_runtime.security.tls import Tls
from pdflow_runtime.transports import tcp
from pdflow_runtime.transports.base import DoneMeans, Ended, EventSink, Fenced, Fences, Flushed, TransportEvent
from pdflow_runtime.transports.streams.links import AgentLink, Guest
from pdflow_runtime.transports.streams.messages import AgentHello, Description, Write, frame
from pdflow_runtime.transports.streams.stream import OutgoingMessage
from pdflow_runtime.transports.tcp import TcpTransport

log = logging.getLogger(__name__)

STANDS_IN: Final = "tcp is one whose DONE is local, and whose fences close"
NOBODY: Final = -1
"""No agent's life."""
STEP_S: Final = 0.004
"""How much later one WRITE may leave than another."""


def scattered(op: int) -> float:
    """WRITEs overtake each other."""
    return STEP_S * (1 + op * 3 % 5)


def slowly(op: int) -> float:
    return 0.3


class LocalTransport(TcpTransport):
    """A WRITE ends at once, when its bytes have been copied here, and they leave some time later.

    Losses are counted from one fence of a peer to the next: until then no flush of that peer ends well.
    """

    done_means: ClassVar[DoneMeans] = "local"
    delay_s: ClassVar[Callable[[int], float]] = scattered

    def __init__(self, me: Address, on_event: EventSink, host: str = "127.0.0.1", tls: Tls | None = None) -> None:
        super().__init__(me, self._sift, host, tls)
        self._outer = on_event
        self._done: dict[int, tuple[Address, int]] = {}
        """WRITEs that have ended for whoever posted them, and not at the peer: which, and how many fences of it ago."""
        self._fenced: Counter[Address] = Counter()
        self._lost: set[Address] = set()

    def write(
        self, op: int, peer: Address, pieces: Sequence[Descriptor], generation: int, notification: bytes | None
    ) -> None:
        link = self._links.get(peer)
        listed = self._listed(op, link, pieces, writing=True)
        if link is None or listed is None or self._nursery is None:
            self._outer(Ended(op, False))
            return
        packed, checked = listed
        copied = [bytes(view) for view in self._payload(checked)]
        link.writes[op] = checked
        self._done[op] = (peer, self._fenced[peer])
        outgoing = OutgoingMessage(frame(Write(op, generation, packed, notification)), copied, op)
        self._nursery.start_soon(self._send_later, link, op, outgoing)
        self._outer(Ended(op, True))

    async def _send_later(self, link: AgentLink, op: int, outgoing: OutgoingMessage) -> None:
        await trio.sleep(type(self).delay_s(op))
        if link.open and op in link.writes and not link.stream.post(outgoing):
            self._ended(link, op, False)

    def stop(self, op: int) -> None:
        """A WRITE has ended already."""
        if op not in self._done:
            super().stop(op)

    def flush(self, peer: Address) -> None:
        if any(link.peer == peer and link.writes for link in self._closing):
            self._lost.add(peer)
        super().flush(peer)

    def forget(self, peer: Address) -> None:
        super().forget(peer)
        self._begin_anew(peer)

    def _sift(self, event: TransportEvent) -> None:
        """What has become of WRITEs at the peer is told by flushes alone."""
        if isinstance(event, Ended) and event.op in self._done:
            peer, fenced = self._done.pop(event.op)
            if not event.ok and fenced == self._fenced[peer]:
                self._lost.add(peer)
            return
        if isinstance(event, Flushed) and event.peer in self._lost:
            event = Flushed(event.peer, False)
        elif isinstance(event, Fenced):
            self._begin_anew(event.peer)
        self._outer(event)

    def _begin_anew(self, peer: Address) -> None:
        self._fenced[peer] += 1
        self._lost.discard(peer)


class BoastfulTransport(LocalTransport):
    """Declares what it does not do: bytes that it says have landed have not. What ranks do without a flush."""

    done_means: ClassVar[DoneMeans] = "remote"


class ClosingTransport(TcpTransport):
    """Does not look at generations: a fence ends the peer's connection, and what it was described before leads nowhere.

    Descriptions and HELLOs bring, in place of the path of a mapped region, how many fences there had been.
    """

    fences: ClassVar[Fences] = "close"

    def __init__(self, me: Address, on_event: EventSink, host: str = "127.0.0.1", tls: Tls | None = None) -> None:
        super().__init__(me, on_event, host, tls)
        self._fences = 0
        self._void: dict[Address, int] = {}
        """Whose descriptions are void, and of how many fences."""

    def describe(self) -> bytes:
        description = msgspec.msgpack.decode(super().describe(), type=Description)
        return msgspec.msgpack.encode(msgspec.structs.replace(description, memory=str(self._fences)))

    def _hello(self, description: Description) -> AgentHello:
        return msgspec.structs.replace(super()._hello(description), memory=description.memory)

    def _incarnation_for(self, hello: AgentHello) -> int:
        return NOBODY if int(hello.memory) < self._void.get(hello.name, 0) else self.incarnation

    def _welcome(self, guest: Guest, generation: int) -> bool:
        return guest in self._guests

    def fence(self, peer: Address, newest_generation: int) -> None:
        self._fences += 1
        self._void[peer] = self._fences
        for guest in [guest for guest in self._guests if guest.name == peer]:
            self._dismiss(guest)
        super().fence(peer, newest_generation)


class LocalAndClosing(LocalTransport, ClosingTransport):
    """Both, and bytes that take longer than whatever is said of them."""

    delay_s: ClassVar[Callable[[int], float]] = slowly

    def allocate(self, nbytes: int) -> memoryview:
        log.warning(STANDS_IN)
        return super().allocate(nbytes)


def stand_in_for_tcp() -> None:
    """In this process the transport that scenarios call tcp is that one."""
    tcp.TcpTransport = LocalAndClosing  # type: ignore[misc]
