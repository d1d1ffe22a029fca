"""The control streams of one engine's ranks: HELLO, frames in and out, and what follows when a stream breaks.

There is one stream for each pair of ranks. D opens it when its endpoint wants a handshake; P listens, and answers. Both
sides learn from the other's HELLO its engine's incarnation, and how its memory is reached. A P rank's own handshake
opens no new stream: it uses the one that D has opened, and without one D cannot be reached.

Where the cluster has a secret, a peer must prove that it knows it (`proving.py`), and where it has certificates, all of
it goes by TLS (`tls.py`).

Writing never waits: each stream has a queue, and a peer that does not take what is in it is lost (S9). Bytes that
cannot be parsed end their stream, with a line in the log; other streams are not affected.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from typing import Final

import trio

from pdflow.protocol.effects import Fence, Handshake, Send
from pdflow.protocol.events import HandshakeEnded, PeerLost, Received
from pdflow.protocol.ids import engine_of
from pdflow.protocol.values import Address, EngineId
from pdflow.protocol.wire.limits import MAX_HANDSHAKE_BYTES
from pdflow.protocol.wire.malformed import Malformed
from pdflow.protocol.wire.strict import LENGTH_BYTES, Frame, FrameDecoder, Hello, encode_frame
from pdflow.serving.core import Port
from pdflow_runtime.clock import within
from pdflow_runtime.nodes.node import LiveNode
from pdflow_runtime.nodes.ranks import Rank
from pdflow_runtime.security.pending_connections import PendingConnections
from pdflow_runtime.security.proving import MAGIC, Proof, prove_as_acceptor, prove_as_opener
from pdflow_runtime.security.secret import MAC_BYTES, Secret
from pdflow_runtime.security.tls import Tls
from pdflow_runtime.transports.base import TransportError

log = logging.getLogger(__name__)

MOST_UNSENT: Final = 1024
"""The most frames that wait for one peer to take them."""
HELLO_TIMEOUT_S: Final = 5.0
"""The time in which a peer's HELLO must come."""
READ_BYTES: Final = 65_536
MAX_HELLO_BYTES: Final = MAX_HANDSHAKE_BYTES + 4096
"""The size of the largest HELLO that is read."""
MOST_ADDRESSES: Final = 16_384
"""The most addresses that are noted: ranks of 1,000 engines of 16."""
MAX_PENDING: Final = 1024
"""The most streams on which no HELLO has come yet. An engine that starts anew is connected to by all ranks at once."""


class RankLink:
    """The control stream between two ranks. `port` and the peer's `hello` are known once HELLOs have been exchanged."""

    def __init__(self, stream: trio.abc.Stream, secret: Secret | None) -> None:
        self.stream: Final = stream
        self.secret: Final = secret
        self.proof: Proof | None = None
        """The proof that the peer knows the secret, if the cluster has one."""
        self.port: Port
        self.hello: Hello
        self.early: list[Frame | Malformed] = []
        """Frames that came directly behind the peer's HELLO."""
        self._unread: Final = bytearray()
        """Bytes that were received and not parsed yet."""
        self.decoder: Final = FrameDecoder()
        self.frames, self.unsent = trio.open_memory_channel[bytes](MOST_UNSENT)
        self.scope: Final = trio.CancelScope()

    @property
    def key(self) -> tuple[Address, Address]:
        return (self.port.address, self.hello.address)

    async def prove(self, opens: bool) -> None:
        """Prove to each other that both sides know the secret, if there is one. ValueError if the peer does not."""
        if self.secret is not None:
            prove = prove_as_opener if opens else prove_as_acceptor
            self.proof = await prove(self.secret, self.stream.send_all, self._take)

    async def send_hello(self, hello: bytes) -> None:
        await self.stream.send_all(hello if self.proof is None else self.proof.ours(hello) + hello)

    async def receive_hello(self) -> Hello:
        """Receive the peer's first frame. ValueError if it is not a HELLO, or comes from a peer that does not know the
        secret."""
        claimed = b"" if self.proof is None else await self._take(MAC_BYTES)
        head = await self._take(LENGTH_BYTES)
        length = int.from_bytes(head, "big")
        if self.secret is None and head == MAGIC[:LENGTH_BYTES]:
            raise ValueError(
                "the peer has a cluster secret, and this side has none: set serve.secret_file or PDFLOW_SECRET on both"
            )
        if length > MAX_HELLO_BYTES:
            raise ValueError(f"a HELLO of {length:,} bytes exceeds the limit of {MAX_HELLO_BYTES:,}")
        data = head + await self._take(length)
        if self.proof is not None:
            self.proof.check(claimed, data)
        frames = self.decoder.feed(data)
        first = frames[0] if frames else None
        if not isinstance(first, Hello):
            raise ValueError(first.reason if isinstance(first, Malformed) else "its first frame is not HELLO")
        self.hello = first
        self.early = self.decoder.feed(bytes(self._unread))
        self._unread.clear()
        return first

    async def _take(self, count: int) -> bytes:
        """Receive exactly this many bytes. ValueError if the stream ends before."""
        while len(self._unread) < count:
            data = await self.stream.receive_some(READ_BYTES)
            if not data:
                raise ValueError("the peer disconnected before its HELLO")
            self._unread.extend(data)
        taken = bytes(self._unread[:count])
        del self._unread[:count]
        return taken


class RankLinks:
    """The control streams of a node's ranks. Args: the node and its ranks. `send`, `handshake` and `fence` execute the
    effects of these names. `secret` and `tls` are set before any stream is opened."""

    def __init__(self, node: LiveNode, ranks: Mapping[Address, Rank]) -> None:
        self.node: Final = node
        self.ranks: Final = ranks
        self.secret: Secret | None = None
        self.tls: Tls | None = None
        self._pending: Final = PendingConnections(MAX_PENDING, trio.CancelScope.cancel)
        self.book: dict[EngineId | Address, tuple[str, int]] = {}
        """The address at which each engine listens, or each rank where ranks are processes of their own, by the latest
        request that named it. At most MOST_ADDRESSES."""
        self._unreached: dict[EngineId | Address, set[tuple[Port, Address]]] = {}
        """Pairs of a rank of ours and a peer that could not be reached at the address known of it or its engine."""
        self._again: dict[EngineId | Address, trio.Event] = {}
        """Set when those pairs have been tried at the new address."""
        self.links: dict[tuple[Address, Address], RankLink] = {}
        """Open streams by our rank and the peer's."""
        self._nursery: trio.Nursery

    def incarnation_of(self, me: Address, peer: Address) -> int | None:
        """Return the peer's incarnation, if there is a stream to it."""
        link = self.links.get((me, peer))
        return None if link is None else link.hello.incarnation

    async def run(
        self, listener: trio.SocketListener, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.serve_listeners(self._accepted, [listener], handler_nursery=nursery)

    async def update_address(self, name: EngineId | Address, host: str, tcp_port: int) -> None:
        """Note the address at which the ranks of an engine listen, or one rank, as a request has named it.

        An engine whose address has changed has restarted. Endpoints that have failed to reach it would not try again
        for up to a minute, and fail this request at once: so its ranks are tried at the new address first.
        """
        if self.book.get(name) != (host, tcp_port):
            self.note_address(name, (host, tcp_port))
            if (pairs := self._unreached.pop(name, None)) is not None:
                self._again[name] = tried = trio.Event()
                self._nursery.start_soon(self._try_again, name, pairs, tried)
        if (trying := self._again.get(name)) is not None:
            await trying.wait()

    def needs_retry(self, name: EngineId | Address, address: tuple[str, int]) -> bool:
        """Whether `update_address` would try this new address first, and wait for the outcome."""
        return name in self._again or (self.book.get(name) != address and name in self._unreached)

    def note_address(self, name: EngineId | Address, address: tuple[str, int]) -> None:
        """Note an address as the latest one. The oldest is forgotten where there are too many: names come from
        requests."""
        self.book.pop(name, None)
        if len(self.book) >= MOST_ADDRESSES:
            oldest = next(iter(self.book))
            del self.book[oldest]
            self._unreached.pop(oldest, None)
        self.book[name] = address

    def _name_of(self, peer: Address) -> EngineId | Address:
        """Return the name by which the peer's address is noted, if it is: its own or its engine's."""
        return peer if peer in self.book else engine_of(peer)

    async def _try_again(self, name: EngineId | Address, pairs: set[tuple[Port, Address]], tried: trio.Event) -> None:
        async with trio.open_nursery() as nursery:
            for port, peer in pairs:
                nursery.start_soon(self._open, port, peer, *self.book[name])
        if self._again.get(name) is tried:
            del self._again[name]
        tried.set()

    # Effects. None waits.

    def send(self, port: Port, effect: Send) -> None:
        link = self.links.get((port.address, effect.to))
        if link is None:
            return  # its PeerLost is on the way; whatever counts is said again
        assert isinstance(effect.message, Frame), "live endpoints use the strict dialect"
        try:
            link.frames.send_nowait(encode_frame(effect.message))
        except trio.WouldBlock:
            log.warning("%s: %s does not read its frames: closing the connection to it", port.address, effect.to)
            link.scope.cancel()

    def handshake(self, port: Port, effect: Handshake) -> None:
        link = self.links.get((port.address, effect.peer))
        if link is not None:
            self._nursery.start_soon(self._connect_memory, link)
        elif (address := self.book.get(self._name_of(effect.peer))) is not None:
            self._nursery.start_soon(self._open, port, effect.peer, *address)
        else:
            log.warning("%s: the address of %s is unknown: no request has named it yet", port.address, effect.peer)
            self.node.put(port, HandshakeEnded(effect.peer, False, 0))

    def fence(self, port: Port, effect: Fence) -> None:
        """Close the stream to a fenced peer: what follows begins with a handshake."""
        link = self.links.pop((port.address, effect.peer), None)
        if link is not None:
            link.scope.cancel()

    def lose(self, me: Address, peer: Address) -> None:
        """Close the stream to a peer whose memory cannot be reached any more: both sides begin with a handshake."""
        link = self.links.get((me, peer))
        if link is not None:
            link.scope.cancel()

    # Streams.

    async def _open(self, port: Port, peer: Address, host: str, tcp_port: int) -> None:
        """Connect to a peer at that address, and report the handshake's end."""
        try:
            link = await within(HELLO_TIMEOUT_S, lambda: self._reached(port, peer, host, tcp_port))
        except (OSError, trio.TooSlowError, trio.BrokenResourceError, ValueError) as error:
            log.warning("%s: cannot connect to %s at %s:%d: %s", port.address, peer, host, tcp_port, reason_of(error))
            self._unreached.setdefault(self._name_of(peer), set()).add((port, peer))
            self.node.put(port, HandshakeEnded(peer, False, 0, is_refusal(error)))
            return
        self._adopt(link)
        self._nursery.start_soon(self._serve, link)
        await self._connect_memory(link)

    async def _reached(self, port: Port, peer: Address, host: str, tcp_port: int) -> RankLink:
        stream: trio.abc.Stream = await trio.open_tcp_stream(host, tcp_port)
        try:
            link = RankLink(stream if self.tls is None else self.tls.opened(stream), self.secret)
            link.port = port
            await self._greet(link, peer)
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return link

    async def _greet(self, link: RankLink, peer: Address) -> None:
        """Run the opener's half of the handshake. ValueError if another rank answers."""
        nonce = secrets.randbits(63) | 1
        await link.prove(True)
        await link.send_hello(self._hello(link.port, nonce, 0, peer))
        hello = await link.receive_hello()
        if hello.address != peer or hello.echo != nonce:
            raise ValueError(f"{hello.address} answers at this address")

    async def _accepted(self, stream: trio.SocketStream) -> None:
        scope = trio.CancelScope()
        self._pending.add(scope)
        link = RankLink(stream if self.tls is None else self.tls.accepted(stream), self.secret)
        try:
            with scope, trio.fail_after(HELLO_TIMEOUT_S):
                await self._welcome(link)
        except (OSError, trio.TooSlowError, trio.BrokenResourceError, ValueError) as error:
            log.warning("%s: rejected an incoming connection: %s", self.node.name, reason_of(error))
            return
        finally:
            self._pending.leave(scope)
        if scope.cancelled_caught:
            return
        self._adopt(link)
        await self._serve(link)

    async def _welcome(self, link: RankLink) -> None:
        """Run the acceptor's half of the handshake. ValueError for a peer that does not authenticate, or that asks for
        a rank that is not here."""
        await link.prove(False)
        hello = await link.receive_hello()
        port = self.node.ports.get(hello.to)
        if port is None or hello.to not in self.ranks:
            raise ValueError(f"{hello.address} wants {hello.to!r}, which does not run here")
        link.port = port
        await link.send_hello(self._hello(port, secrets.randbits(63) | 1, hello.nonce, hello.address))

    def _hello(self, port: Port, nonce: int, echo: int, to: Address) -> bytes:
        return encode_frame(
            Hello(port.address, port.incarnation, nonce, echo, to, self.ranks[port.address].metadata_for(to))
        )

    def _adopt(self, link: RankLink) -> None:
        """Make this the stream between the two ranks, in place of any before."""
        before = self.links.get(link.key)
        self.links[link.key] = link
        if before is not None:
            before.scope.cancel()
            self.node.put(link.port, PeerLost(link.hello.address))

    async def _connect_memory(self, link: RankLink) -> None:
        """Connect to the memory of the rank at the other end, and report the handshake's end."""
        rank, hello = self.ranks[link.port.address], link.hello
        ok = True
        try:
            await within(HELLO_TIMEOUT_S, lambda: rank.connect(hello.address, hello.metadata))
        except (OSError, trio.TooSlowError, TransportError, ValueError) as error:
            log.warning("%s: cannot connect to the KV memory of %s: %s", rank.address, hello.address, reason_of(error))
            ok = False
            if rank.transport.fences == "close":
                link.scope.cancel()  # its HELLO may be older than the peer's last fence, and void
        if self.incarnation_of(rank.address, hello.address) != hello.incarnation:
            ok = False  # its stream has ended meanwhile, and nothing would tell of that any more
        self.node.put(link.port, HandshakeEnded(hello.address, ok, hello.incarnation if ok else 0))

    async def _serve(self, link: RankLink) -> None:
        """Read and write frames until the stream ends."""
        try:
            with link.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write, link)
                    await self._read(link)
                    nursery.cancel_scope.cancel()
        finally:
            if self.links.get(link.key) is link:
                del self.links[link.key]
                self.node.put(link.port, PeerLost(link.hello.address))
            await trio.aclose_forcefully(link.stream)

    async def _read(self, link: RankLink) -> None:
        frames = link.early
        while True:
            for frame in frames:
                if isinstance(frame, Malformed | Hello):
                    why = frame.reason if isinstance(frame, Malformed) else "a second HELLO"
                    log.warning("%s: closing the connection of %s: %s", link.port.address, link.hello.address, why)
                    return
                await self.node.offer(link.port, Received(link.hello.address, link.hello.incarnation, frame))
            try:
                data = await link.stream.receive_some(READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return
            if not data:
                return
            frames = link.decoder.feed(bytes(data))

    async def _write(self, link: RankLink) -> None:
        try:
            async for first in link.unsent:
                batch = [first]
                try:
                    while True:
                        batch.append(link.unsent.receive_nowait())
                except trio.WouldBlock:
                    pass
                await link.stream.send_all(b"".join(batch))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            link.scope.cancel()


def is_refusal(error: BaseException) -> bool:
    """True if this error proves that no process listens: every address that a host's name stands for has refused."""
    if isinstance(error, OSError) and isinstance(error.__cause__, ExceptionGroup):
        return all(map(is_refusal, error.__cause__.exceptions))
    return isinstance(error, ConnectionRefusedError)


def reason_of(error: BaseException) -> str:
    """Return a text for people of an error that may have none."""
    if is_refusal(error):
        return "connection refused"
    if isinstance(error, trio.TooSlowError):
        return f"no answer within {HELLO_TIMEOUT_S:g} s"
    return str(error) or (str(error.__cause__) if error.__cause__ else type(error).__name__)
