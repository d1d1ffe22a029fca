"""What shm and tcp share: an agent that listens, opens streams, posts, answers, fences.

Whoever receives bytes decides whether they land. A WRITE is a message to the memory's owner, who checks the token, the
bounds and the generation, moves the bytes itself, tells the notice and answers; so a fence at the owner is local, hard,
and needs no one. A fence at the writer ends the stream, and holds when the owner has let go of its end: it does so only
after every byte that it was moving has landed, and a dead one does so by dying.

How bytes move (mapped, or behind the message) is the subclasses'.
"""

from __future__ import annotations

import errno
import logging
import secrets
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, Literal

import trio

from pdflow.layout.descriptors import Descriptor
from pdflow.protocol.values import Address
from pdflow.protocol.wire.limits import MAX_NAME_BYTES
from pdflow.protocol.wire.malformed import Malformed
from runtime.transports.base import Ended, Fenced, Flushed, Noticed, PeerGone, Stopped, Tell, TransportError
from runtime.transports.copying import Copy, Mapped
from runtime.transports.links import Guest, Link, Waiting
from runtime.transports.messages import (
    MAX_HELLO_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_NOTICE_BYTES,
    TOKEN_BYTES,
    VERSION,
    Answer,
    Data,
    Description,
    Hello,
    Pieces,
    Read,
    Welcome,
    Write,
    frame,
    pack,
    parse_description,
    same_token,
    unpack_pieces,
)
from runtime.transports.stream import Parcel, Stream, StreamBrokenError

log = logging.getLogger(__name__)

GREETING_S: Final = 5.0
"""For a stranger to say who it is, and for a peer to answer."""
MAX_STRANGERS: Final = 64
"""Streams that have not said who they are yet."""
_OUT_OF_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class StreamAgent(ABC):
    """Args: me, the name by which peers know this rank; tell, which takes note of what happened."""

    done_means: Final[Literal["remote", "local"]] = "remote"
    fences: Final[Literal["revoke", "close"]] = "revoke"

    def __init__(self, me: Address, tell: Tell) -> None:
        self.me: Final = me
        self.life: Final = secrets.randbits(63)
        self.token: Final = secrets.token_bytes(TOKEN_BYTES)
        self._tell: Final = tell
        self._memory: Mapped | None = None
        self._listener: socket.socket | None = None
        self._nursery: trio.Nursery | None = None
        self._finished = trio.Event()
        self._links: dict[Address, Link] = {}
        self._closing: set[Link] = set()
        """Links that are ours no more, but may still be the peer's."""
        self._guests: set[Guest] = set()
        self._strangers = 0
        self._copies: set[Copy] = set()
        """What is moving between mapped regions, in either direction."""
        self._floors: dict[Address, int] = {}
        """By peer: the newest generation that none of its WRITEs may reach any more."""
        self._fences: list[Waiting] = []
        self._flushes: dict[Address, deque[Waiting]] = {}

    # How bytes move.

    @property
    @abstractmethod
    def name(self) -> str:
        """As scenario files call it, and descriptions."""

    @abstractmethod
    def allocate(self, nbytes: int) -> memoryview: ...

    @abstractmethod
    def describe(self) -> bytes: ...

    @abstractmethod
    async def _dial(self, about: Description) -> socket.socket:
        """A connected socket. OSError, TransportError."""

    @abstractmethod
    def _reach(self, about: Description) -> Mapped | None:
        """The memory of a peer that we have connected to. TransportError."""

    @abstractmethod
    def _admit(self, hello: Hello, sock: socket.socket) -> Mapped | None:
        """The memory of a peer that has shown the token. TransportError if it may not come in."""

    @abstractmethod
    def _payload(self, pieces: Pieces) -> Iterable[memoryview]:
        """What follows a Write."""

    @abstractmethod
    async def _receive(self, guest: Guest, message: Write) -> bool:
        """Move a guest's bytes; whether all have landed."""

    @abstractmethod
    async def _serve_read(self, guest: Guest, message: Read) -> None: ...

    @abstractmethod
    async def _receive_data(self, link: Link, message: Data) -> None: ...

    @abstractmethod
    def _post_read(self, op: int, link: Link, pieces: Pieces) -> None: ...

    @abstractmethod
    def read_word(self, op: int, peer: Address, address: int) -> None: ...

    async def _attend_link(self, link: Link) -> None:  # noqa: B027 (not every transport has anything to do)
        """Beside the link's own tasks, until it ends."""

    def _hide(self) -> None:  # noqa: B027
        """Take away what others could see of this agent."""

    # Life.

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        assert self._listener is not None, "allocate comes first"
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._accept, self._listener)
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None
            self._shut()

    async def aclose(self) -> None:
        for copy in self._copies:
            copy.halted = True
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
        self._hide()
        self._finished.set()

    # Our side of streams: what we post.

    async def connect(self, peer: Address, about: bytes) -> None:
        described = parse_description(about)
        if isinstance(described, Malformed):
            raise TransportError(f"{peer} does not say how it is reached: {described.reason}")
        if described.transport != self.name:
            raise TransportError(f"{peer} moves KV over {described.transport!r}, and {self.me} over {self.name!r}")
        if self._nursery is None:
            raise TransportError(f"{self.me} is not running, and cannot reach {peer}")
        if self._reached(peer, described):
            return
        stream = await self._knock(peer, described)
        try:
            remote = self._reach(described)
        except TransportError as error:
            stream.close()
            raise TransportError(f"{peer} cannot be reached over {self.name}: {error}") from None
        if self._nursery is None:
            stream.close()
            raise TransportError(f"{self.me} is closing, and does not reach {peer} any more")
        if self._reached(peer, described):
            stream.close()
            return
        before = self._links.get(peer)
        if before is not None:
            self._let_go(before)
        link = self._links[peer] = Link(peer, described, stream, remote)
        self._nursery.start_soon(self._run_link, link)

    def _reached(self, peer: Address, about: Description) -> bool:
        link = self._links.get(peer)
        return link is not None and link.about.life == about.life

    async def _knock(self, peer: Address, about: Description) -> Stream:
        """Open a stream and be welcome on it. TransportError."""
        stream: Stream | None = None
        why = f"it does not answer within {GREETING_S:g} s"
        try:
            with trio.move_on_after(GREETING_S):
                stream = Stream(await self._dial(about))
                stream.post(Parcel(frame(self._hello(about))))
                if isinstance(await stream.message(MAX_HELLO_BYTES), Welcome):
                    greeted, stream = stream, None
                    return greeted
                why = "it answers something else than a welcome"
        except (OSError, StreamBrokenError) as error:
            why = str(error)
        finally:
            if stream is not None:
                stream.close()
        raise TransportError(f"{peer} cannot be reached over {self.name} at {about.host}:{about.port}: {why}")

    def _hello(self, about: Description) -> Hello:
        return Hello(VERSION, self.me, self.life, about.life, about.token, "", 0)

    def write(
        self, op: int, peer: Address, pieces: Sequence[Descriptor], generation: int, notice: bytes | None
    ) -> None:
        link = self._links.get(peer)
        listed = self._listed(op, link, pieces, writing=True)
        if link is None or listed is None or self._memory is None:
            self._tell(Ended(op, False))
            return
        packed, checked = listed
        link.writes.add(op)
        parcel = Parcel(frame(Write(op, generation, packed, notice)), self._payload(checked), op)
        if not link.stream.post(parcel):
            log.warning("%s: %s does not take what is posted to it", self.me, peer)
            self._ended(link, op, False)

    def read(self, op: int, peer: Address, pieces: Sequence[Descriptor]) -> None:
        link = self._links.get(peer)
        listed = self._listed(op, link, pieces, writing=False)
        if link is None or listed is None:
            self._tell(Ended(op, False))
        else:
            self._post_read(op, link, listed[1])

    def _listed(
        self, op: int, link: Link | None, pieces: Sequence[Descriptor], writing: bool
    ) -> tuple[bytes, Pieces] | None:
        """The pieces packed and checked; None if there is no link, or they do not lie in both regions."""
        if link is None or self._memory is None:
            return None
        ours, theirs = self._memory.nbytes, link.about.nbytes
        try:
            packed = pack(pieces)
        except OverflowError:
            packed = b"?"
        checked = unpack_pieces(packed, *((ours, theirs) if writing else (theirs, ours)))
        if isinstance(checked, Pieces) and len(packed) <= MAX_MESSAGE_BYTES - MAX_NOTICE_BYTES - 64:
            return packed, checked
        why = checked.reason if isinstance(checked, Malformed) else f"{len(checked.lengths)} pieces are too many"
        log.warning("%s: operation %d with %s is not posted: %s", self.me, op, link.peer, why)
        return None

    def stop(self, op: int) -> None:
        for link in self._links.values():
            if link.take_back(op):
                self._tell(Stopped(op))
                self._settled(op)
                return

    def flush(self, peer: Address) -> None:
        link = self._links.get(peer)
        if link is None:
            self._tell(Flushed(peer, False))
            return
        self._flushes.setdefault(peer, deque()).append(Waiting(peer, set(link.operations())))
        self._settled(None)

    def fence(self, peer: Address, newest_generation: int) -> None:
        self._floors[peer] = max(newest_generation, self._floors.get(peer, -1))
        waiting = Waiting(peer, set())
        for copy in self._copies:
            if copy.peer == peer and copy.generation <= newest_generation:
                copy.halted = True
                waiting.of.add(copy)
        link = self._links.get(peer)
        if link is not None:
            self._drop_reads(link)
            if link.writes:
                self._let_go(link)
        waiting.of.update(link for link in self._closing if link.peer == peer)
        self._fences.append(waiting)
        self._settled(None)

    def forget(self, peer: Address) -> None:
        links = [link for link in (*self._links.values(), *self._closing) if link.peer == peer]
        self._links.pop(peer, None)
        moving = [copy for copy in self._copies if copy.peer == peer]
        for copy in moving:
            copy.halted = True
        for link in links:
            link.open = False
            self._closing.discard(link)
            link.stream.close()
            self._fail(link)
            self._settled(link)
        for guest in [guest for guest in self._guests if guest.name == peer]:
            self._guests.discard(guest)
            if not moving:  # Otherwise whoever moves its bytes closes it afterwards: its end says that none moves.
                guest.stream.close()

    # What becomes of it.

    async def _run_link(self, link: Link) -> None:
        unexpected = False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.stream.pump)
            nursery.start_soon(self._attend_link, link)
            try:
                await self._hear_answers(link)
            except StreamBrokenError as broken:
                unexpected = link.open
                await self._link_broke(link, broken)
            nursery.cancel_scope.cancel()
        link.stream.close()
        self._closing.discard(link)
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
        self._fail(link)
        self._settled(link)
        if unexpected:
            self._perhaps_gone(link.peer)

    async def _hear_answers(self, link: Link) -> None:
        while True:
            message = await link.stream.message()
            if isinstance(message, Answer):
                if message.op in link.writes or message.op in link.reads:
                    self._ended(link, message.op, message.ok and message.op in link.writes)
            elif isinstance(message, Data):
                await self._receive_data(link, message)
            else:
                raise StreamBrokenError(f"{type(message).__name__} is no answer")

    async def _link_broke(self, link: Link, broken: StreamBrokenError) -> None:
        """The peer may still be moving what we posted: let go, and wait until it has."""
        if broken.finished or link.stream.closed:
            return
        log.warning("%s: the stream to %s is closed: %s", self.me, link.peer, broken)
        if link.open:
            self._let_go(link)
        self._fail(link)
        await link.stream.wait_for_end()

    def _let_go(self, link: Link) -> None:
        """Nothing more of ours leaves on it."""
        link.open = False
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
        self._closing.add(link)
        link.stream.end_sending()

    def _ended(self, link: Link, op: int, ok: bool) -> None:
        link.writes.discard(op)
        link.reads.pop(op, None)
        self._tell(Ended(op, ok))
        self._settled(op)

    def _fail(self, link: Link) -> None:
        """Everything that is open on it. Its flushes fail too."""
        failed = link.operations()
        flushes = self._flushes.get(link.peer, deque())
        for waiting in [waiting for waiting in flushes if not waiting.of.isdisjoint(failed)]:
            flushes.remove(waiting)
            self._tell(Flushed(link.peer, False))
        self._drop_reads(link)
        for op in tuple(link.writes):
            self._ended(link, op, False)

    def _drop_reads(self, link: Link) -> None:
        """They end here and now; a copy that runs is halted, and dropped by whoever runs it."""
        copies = tuple(link.copies)
        link.copies.clear()
        for op, copy in copies:
            copy.halted = True
            self._ended(link, op, False)
        for op in tuple(link.reads):
            self._ended(link, op, False)

    def _settled(self, what: object) -> None:
        """Something has ended: so may flushes and fences that waited for it."""
        for peer, flushes in tuple(self._flushes.items()):
            for flush in flushes:
                flush.of.discard(what)
            while flushes and not flushes[0].of:
                flushes.popleft()
                self._tell(Flushed(peer, True))
            if not flushes:
                self._flushes.pop(peer, None)
        for fence in tuple(self._fences):
            fence.of.discard(what)
            if not fence.of and fence in self._fences:
                self._fences.remove(fence)
                self._tell(Fenced(fence.peer))

    def _perhaps_gone(self, peer: Address) -> None:
        streams = (*self._links.values(), *self._closing)
        if all(link.peer != peer for link in streams) and all(guest.name != peer for guest in self._guests):
            self._tell(PeerGone(peer))

    async def _move(self, copy: Copy) -> bool:
        """Whether all of it has landed, with no fence in between."""
        self._copies.add(copy)
        try:
            await copy.run()
        finally:
            self._copies.discard(copy)
            self._settled(copy)
        return not copy.halted

    # Their side of streams: what they post.

    async def _accept(self, listener: socket.socket) -> None:
        assert self._nursery is not None
        while True:
            await trio.lowlevel.wait_readable(listener)
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno in _OUT_OF_FILES:
                    log.warning("%s: a stream cannot be accepted: %s", self.me, error.strerror)
                    await trio.sleep(0.1)
                continue
            if self._strangers >= MAX_STRANGERS:
                sock.close()
                continue
            self._strangers += 1
            self._nursery.start_soon(self._serve, Stream(sock))

    async def _serve(self, stream: Stream) -> None:
        guest: Guest | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.pump)
                try:
                    guest = await self._greet(stream)
                    await self._attend(guest)
                except StreamBrokenError as broken:
                    if not broken.finished and not stream.closed:
                        log.warning("%s: a stream of %s is closed: %s", self.me, guest and guest.name, broken)
                nursery.cancel_scope.cancel()
        finally:
            stream.close()
        if guest is not None and guest in self._guests:
            self._guests.discard(guest)
            self._perhaps_gone(guest.name)

    async def _greet(self, stream: Stream) -> Guest:
        try:
            with trio.move_on_after(GREETING_S) as patience:
                hello = await stream.message(MAX_HELLO_BYTES)
        finally:
            self._strangers -= 1
        if patience.cancelled_caught:
            raise StreamBrokenError(f"it has not said who it is within {GREETING_S:g} s")
        if not isinstance(hello, Hello) or hello.version != VERSION or not 0 < len(hello.name) <= MAX_NAME_BYTES:
            raise StreamBrokenError("it does not begin as a peer does")
        if hello.target_life != self.life or not same_token(hello.token, self.token):
            raise StreamBrokenError("it has not been told of this memory")
        try:
            guest = Guest(hello.name, stream, self._admit(hello, stream.sock))
        except TransportError as error:
            raise StreamBrokenError(str(error)) from None
        self._guests.add(guest)
        stream.post(Parcel(frame(Welcome())))
        return guest

    async def _attend(self, guest: Guest) -> None:
        while True:
            message = await guest.stream.message()
            if isinstance(message, Write):
                landed = await self._receive(guest, message)
                if guest not in self._guests:
                    raise StreamBrokenError("it is forgotten here", finished=True)
                if landed and message.notice is not None:
                    self._tell(Noticed(guest.name, message.notice))
                if not guest.stream.post(Parcel(frame(Answer(message.op, landed)))):
                    raise StreamBrokenError("it does not read its answers")
            elif isinstance(message, Read):
                await self._serve_read(guest, message)
            else:
                raise StreamBrokenError(f"{type(message).__name__} is no order")

    def _revoked(self, guest: Guest, generation: int) -> bool:
        return generation <= self._floors.get(guest.name, -1)
