"""The agent that all transports build on: it posts to peers on streams that it has opened, and serves theirs (host.py).

A WRITE is a message to the memory's owner, who moves the bytes (host.py), so a fence at the writer ends the stream, and
holds when the owner has let go of its end of it: it does so only when nothing of it moves any more, and a dead one does
so by dying. How bytes move, mapped or behind the message, is the subclasses'.
"""

from __future__ import annotations

import logging
import socket
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

import trio

from pdflow.layout.descriptors import Descriptor
from pdflow.protocol.values import Address
from pdflow.protocol.wire.malformed import Malformed
from pdflow_runtime.transports.base import (
    DoneMeans,
    Ended,
    EventSink,
    Fences,
    Flushed,
    PeerGone,
    Stopped,
    TransportError,
    WordArrived,
)
from pdflow_runtime.transports.host import Host
from pdflow_runtime.transports.streams.dialling import open_stream
from pdflow_runtime.transports.streams.links import AgentLink, Remote
from pdflow_runtime.transports.streams.messages import (
    MAX_NOTIFICATION_BYTES,
    VERSION,
    AgentHello,
    Data,
    Description,
    OperationEnded,
    PackedPieces,
    Ready,
    WordValue,
    Write,
    frame,
    pack_checked,
    parse_description,
)
from pdflow_runtime.transports.streams.stream import (
    OutgoingMessage,
    StreamBrokenError,
    StreamFinishedError,
    StreamLostError,
)

log = logging.getLogger(__name__)


class StreamAgent(Host):
    """The posting side of a transport's agent, over the serving side. Args: `me`, the name by which peers know this
    rank; `on_event`, which takes note of what happened."""

    done_means: ClassVar[DoneMeans] = "remote"
    fences: ClassVar[Fences] = "revoke"

    def __init__(self, me: Address, on_event: EventSink) -> None:
        super().__init__(me, on_event)
        self._listener: socket.socket | None = None
        self._nursery: trio.Nursery | None = None
        self._finished = trio.Event()
        self._links: dict[Address, AgentLink] = {}
        self._connecting: dict[Address, trio.Lock] = {}
        """Allows one attempt to connect to a peer at a time: a second stream would end the first."""
        self._closing: set[AgentLink] = set()
        """Links on which nothing more is posted, but on whose operations the peer may still be working."""

    # How bytes move.

    @property
    @abstractmethod
    def name(self) -> str:
        """The transport's name in scenario files and descriptions."""

    @abstractmethod
    def allocate(self, nbytes: int) -> memoryview: ...

    @abstractmethod
    def describe(self) -> bytes: ...

    @abstractmethod
    async def _dial(self, description: Description) -> socket.socket:
        """Return a connected socket. OSError, TransportError."""

    @abstractmethod
    def _reach(self, description: Description, hello: AgentHello) -> Remote | None:
        """Return the memory of a peer that was connected to with this greeting. TransportError."""

    def _payload(self, pieces: PackedPieces) -> Iterable[memoryview]:
        """Return the bytes that follow a Write message; none unless the subclass sends them so."""
        return ()

    async def _receive_data(self, link: AgentLink, message: Data) -> None:
        """Move the bytes of a READ that was asked for on the link."""
        raise StreamBrokenError("the peer sent bytes that no READ asked for")

    def _send_data(self, link: AgentLink, op: int, pieces: PackedPieces) -> None:
        """Send the bytes of a WRITE, for which the owner of the memory is ready."""
        raise StreamBrokenError("the peer is ready for a WRITE that was not announced")

    @abstractmethod
    def _post_read(self, op: int, link: AgentLink, pieces: PackedPieces) -> None: ...

    @abstractmethod
    def _post_word(self, op: int, link: AgentLink, address: int) -> None: ...

    async def _confirm_end(self, link: AgentLink) -> None:
        """Wait for proof that the peer has let go of a stream that broke, where breaking alone is no proof."""

    async def _attend(self) -> None:
        """Run beside all links for as long as the agent runs."""

    async def _attend_link(self, link: AgentLink) -> None:
        """Run beside the link's own tasks, until the link ends."""

    def _hide(self) -> None:
        """Remove whatever others could see of this agent."""

    # Life.

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        assert self._listener is not None, "call allocate first"
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._accept, self._listener, nursery)
                nursery.start_soon(self._attend)
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None
            self._shut()

    async def aclose(self) -> None:
        for motion in self._motions:
            motion.halt()
        if self._nursery is None:
            self._shut()
        else:
            self._nursery.cancel_scope.cancel()
            await self._finished.wait()

    def _shut(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for link in (*self._links.values(), *self._closing):
            link.stream.close()
            self._fail(link)
        self._links.clear()
        self._closing.clear()
        if not self._finished.is_set():  # whoever was cancelled may still be closed
            self._hide()
        self._finished.set()

    # Our side of streams: what we post.

    async def connect(self, peer: Address, description: bytes) -> None:
        described = parse_description(description)
        if isinstance(described, Malformed):
            raise TransportError(f"the description of {peer} is malformed: {described.reason}")
        if described.transport != self.name:
            raise TransportError(f"{peer} uses transport {described.transport!r}, {self.me} uses {self.name!r}")
        if self._nursery is None:
            raise TransportError(f"{self.me} is not running, so it cannot connect to {peer}")
        async with self._connecting.setdefault(peer, trio.Lock()):
            if not self._reached(peer, described.incarnation):
                await self._open(peer, described)

    def _reached(self, peer: Address, incarnation: int) -> bool:
        link = self._links.get(peer)
        return link is not None and link.description.incarnation == incarnation

    async def _open(self, peer: Address, description: Description) -> None:
        hello = self._hello(description)
        stream = await open_stream(self._dial, self.name, peer, description, hello)
        try:
            if self._nursery is None:
                raise TransportError("this agent is closing")
            link = AgentLink(peer, description, stream, self._reach(description, hello))
        except TransportError as error:
            stream.close()
            raise TransportError(f"cannot connect to {peer} over {self.name}: {error}") from None
        before = self._links.get(peer)
        if before is not None:
            self._close_link(before)
        self._links[peer] = link
        self._nursery.start_soon(self._run_link, link)

    def _hello(self, description: Description) -> AgentHello:
        return AgentHello(VERSION, self.me, self.incarnation, description.incarnation, description.token, "", 0)

    def write(
        self, op: int, peer: Address, pieces: Sequence[Descriptor], generation: int, notification: bytes | None
    ) -> None:
        assert notification is None or len(notification) <= MAX_NOTIFICATION_BYTES
        link = self._links.get(peer)
        listed = self._listed(op, link, pieces, writing=True)
        if link is None or listed is None or self._memory is None:
            self._on_event(Ended(op, False))
            return
        packed, checked = listed
        link.writes[op] = checked
        outgoing = OutgoingMessage(frame(Write(op, generation, packed, notification)), self._payload(checked), op)
        if not link.stream.post(outgoing):
            log.warning("%s: too many messages wait to be sent to %s; the WRITE fails", self.label, peer)
            self._ended(link, op, False)

    def read(self, op: int, peer: Address, pieces: Sequence[Descriptor]) -> None:
        link = self._links.get(peer)
        listed = self._listed(op, link, pieces, writing=False)
        if link is None or listed is None:
            self._on_event(Ended(op, False))
        else:
            self._post_read(op, link, listed[1])

    def read_word(self, op: int, peer: Address, address: int) -> None:
        link = self._links.get(peer)
        if link is None or not 0 <= address < link.description.nbytes:
            self._on_event(WordArrived(op, None))
        else:
            self._post_word(op, link, address)

    def _listed(
        self, op: int, link: AgentLink | None, pieces: Sequence[Descriptor], writing: bool
    ) -> tuple[bytes, PackedPieces] | None:
        """Pack and check the pieces; None if there is no link, or they do not lie in both regions."""
        if link is None or self._memory is None:
            return None
        ours, theirs = self._memory.extent, link.extent
        source, target = (ours, theirs) if writing else (theirs, ours)
        listed = pack_checked(pieces, source, target)
        if isinstance(listed, Malformed):
            log.warning(
                "%s: operation %d with %s fails before it is posted: %s", self.label, op, link.peer, listed.reason
            )
            return None
        return listed

    def stop(self, op: int) -> None:
        for link in self._links.values():
            if link.take_back(op):
                self._on_event(Stopped(op))
                self._waits.ended(op)
                return

    def flush(self, peer: Address) -> None:
        link = self._links.get(peer)
        if link is None:
            self._on_event(Flushed(peer, False))
        else:
            self._waits.flush(peer, link.operations())

    def fence(self, peer: Address, newest_generation: int) -> None:
        self._floors[peer] = max(newest_generation, self._floors.get(peer, -1))
        moving = [m for m in self._motions if m.peer == peer and m.generation <= newest_generation]
        for motion in moving:
            motion.halt()
        link = self._links.get(peer)
        if link is not None:
            self._drop_reads(link)
            if link.writes:
                self._close_link(link)
        self._waits.fence(peer, (*moving, *(link for link in self._closing if link.peer == peer)))

    def forget(self, peer: Address) -> None:
        links = [link for link in (*self._links.values(), *self._closing) if link.peer == peer]
        self._links.pop(peer, None)
        for link in links:
            link.open = False
            self._closing.discard(link)
            self._detach(link)
            self._fail(link)
            self._waits.ended(link)
        for guest in [guest for guest in self._guests if guest.name == peer]:
            self._dismiss(guest)

    def _detach(self, link: AgentLink) -> None:
        """Leave a forgotten peer's stream."""
        link.stream.close()

    # What becomes of it.

    async def _run_link(self, link: AgentLink) -> None:
        unexpected = False
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(link.stream.pump)
                nursery.start_soon(self._attend_link, link)
                try:
                    await self._read_answers(link)
                except StreamBrokenError as broken:
                    unexpected = link.open
                    link.lost = link.lost or (link.open and not isinstance(broken, StreamFinishedError))
                    await self._link_broke(link, broken)
                nursery.cancel_scope.cancel()
        finally:
            link.stream.close()
        self._closing.discard(link)
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
        self._let_be(link.remote)
        self._fail(link)
        self._waits.ended(link)
        if link.lost:
            await self._end_guests(link)
        if unexpected or link.lost:
            self._perhaps_gone(link.peer)

    async def _end_guests(self, link: AgentLink) -> None:
        """Close the peer's streams to us after ours to it has broken: both sides know then that they must connect anew.

        Not called if the peer has ended our stream in order: then it did so on purpose, or is dead.
        """
        there = (link.peer, link.description.incarnation)
        for guest in [guest for guest in self._guests if (guest.name, guest.incarnation) == there]:
            self._dismiss(guest)
            await guest.left.wait()

    def _lose(self, link: AgentLink) -> None:
        """Close a link whose remote memory cannot be reached any more, whatever becomes of the stream of messages."""
        link.lost = True
        self._drop_reads(link)
        if link.open:
            self._close_link(link)

    async def _read_answers(self, link: AgentLink) -> None:
        while True:
            message = await link.stream.message()
            if isinstance(message, OperationEnded):
                if message.op in link.writes or message.op in link.reads:
                    self._ended(link, message.op, message.ok and message.op in link.writes)
            elif isinstance(message, Data):
                await self._receive_data(link, message)
            elif isinstance(message, Ready) and message.op in link.writes:
                self._send_data(link, message.op, link.writes[message.op])
            elif isinstance(message, WordValue):
                if message.op in link.word_reads:
                    self._word_arrived(link, message.op, message.value)
            else:
                raise StreamBrokenError(f"unexpected message from the peer: {type(message).__name__}")

    async def _link_broke(self, link: AgentLink, broken: StreamBrokenError) -> None:
        """Let go of a link that broke, and wait until the peer has let go of what we posted, which it may still be
        moving."""
        if isinstance(broken, StreamFinishedError) or link.stream.closed:
            return
        log.warning("%s: closing the connection to %s: %s", self.label, link.peer, broken)
        posted = bool(link.writes) or not link.open
        if link.open:
            self._close_link(link)
        self._fail(link)
        lost = isinstance(broken, StreamLostError) or not await link.stream.wait_for_end()
        if lost and posted:
            await self._confirm_end(link)

    def _close_link(self, link: AgentLink) -> None:
        """Send nothing more on the link."""
        link.open = False
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
        self._closing.add(link)
        link.stream.end_sending()

    def _ended(self, link: AgentLink, op: int, ok: bool) -> None:
        link.writes.pop(op, None)
        link.reads.pop(op, None)
        self._on_event(Ended(op, ok))
        self._waits.ended(op)

    def _word_arrived(self, link: AgentLink, op: int, value: int | None) -> None:
        link.word_reads.discard(op)
        self._on_event(WordArrived(op, value))
        self._waits.ended(op)

    def _fail(self, link: AgentLink) -> None:
        """Fail everything that is open on the link, its flushes too."""
        self._waits.broke(link.peer, link.operations())
        self._drop_reads(link)
        for op in tuple(link.writes):
            self._ended(link, op, False)

    def _drop_reads(self, link: AgentLink) -> None:
        """End the link's READs here and now; a copy that runs is halted, and dropped by the task that runs it."""
        motions = tuple(link.motions)
        link.motions.clear()
        for op, motion in motions:
            motion.halt()
            if op not in link.word_reads:
                self._ended(link, op, False)
        for op in tuple(link.reads):
            self._ended(link, op, False)
        for op in tuple(link.word_reads):
            self._word_arrived(link, op, None)

    def _perhaps_gone(self, peer: Address) -> None:
        streams = (*self._links.values(), *self._closing)
        if all(link.peer != peer for link in streams) and all(guest.name != peer for guest in self._guests):
            self._on_event(PeerGone(peer))
