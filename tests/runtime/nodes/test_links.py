"""Streams between ranks: what strangers say harms nobody, and what breaks is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from pdflow.protocol.effects import Fence, Handshake, Send
from pdflow.protocol.events import HandshakeEnded, PeerLost, Received
from pdflow.protocol.ids import Reg, Shards
from pdflow.protocol.messages import Cancel, Register, Release
from pdflow.protocol.values import Allocation, Instant
from pdflow.protocol.wire.limits import MAX_BLOCKS
from pdflow.protocol.wire.strict import VERSION, Hello, encode_frame
from pdflow.serving.core import Port
from pdflow_runtime.nodes import links
from pdflow_runtime.nodes.links import RankLinks
from pdflow_runtime.nodes.node import LiveNode


class RecordingEndpoint:
    """An endpoint that only remembers."""

    timed = False

    def __init__(self) -> None:
        self.events: list[Any] = []

    def handle(self, event: Any, now: Instant) -> tuple[Any, ...]:
        self.events.append(event)
        return ()

    def wake_at(self) -> Instant | None:
        return None

    async def get(self, kind: type, count: int = 1) -> list[Any]:
        with trio.fail_after(10):
            while len(found := [event for event in self.events if type(event) is kind]) < count:
                await trio.sleep(0.005)
        return found


class Memory:
    """A rank, as far as links know one."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.transport = SimpleNamespace(fences="revoke")
        self.connected: list[tuple[str, bytes]] = []

    def metadata_for(self, peer: str) -> bytes:
        return f"about {self.address}".encode()

    async def connect(self, peer: str, metadata: bytes) -> None:
        self.connected.append((peer, metadata))
        if peer == "unreachable.r0":
            raise ValueError("no such memory")


class Side:
    """One engine's streams. `port` of its only rank; `tcp` is where it hears."""

    def __init__(self, engine: str, incarnation: int, guarded: dict[str, Any]) -> None:
        self.node = LiveNode(engine)
        self.endpoint = RecordingEndpoint()
        self.address = f"{engine}.r0"
        self.memory = Memory(self.address)
        self.port: Port = self.node.add(self.address, self.endpoint, incarnation)
        self.links = RankLinks(self.node, {self.address: self.memory})  # type: ignore[dict-item]
        self.links.secret, self.links.tls = guarded.get("secret"), guarded.get("tls")
        self.tcp = 0


@asynccontextmanager
async def sides(*engines: str, **guarded: Any) -> AsyncIterator[list[Side]]:
    """`guarded`: by which secret and certificates they know each other."""
    made = [Side(engine, 100 + number, guarded) for number, engine in enumerate(engines)]
    async with trio.open_nursery() as nursery:
        for side in made:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            side.tcp = listener.socket.getsockname()[1]
            await nursery.start(side.links.run, listener)
            nursery.start_soon(side.node.run)
            for other in made:
                other.links.book[side.node.name] = ("127.0.0.1", side.tcp)
        yield made
        nursery.cancel_scope.cancel()


async def connected(d: Side, p: Side) -> None:
    d.links.handshake(d.port, Handshake(p.address))
    assert await d.endpoint.get(HandshakeEnded) == [HandshakeEnded(p.address, True, p.port.incarnation)]


CANCEL = Cancel(Reg("d", 100, 1, "r"), 1)


@pytest.mark.trio
async def test_hello_carries_the_address_and_memory_metadata_both_ways() -> None:
    async with sides("d", "p") as (d, p):
        await connected(d, p)
        assert d.memory.connected == [("p.r0", b"about p.r0")]
        p.links.handshake(p.port, Handshake("d.r0"))
        assert await p.endpoint.get(HandshakeEnded) == [HandshakeEnded("d.r0", True, 100)]
        assert p.memory.connected == [("d.r0", b"about d.r0")]
        for number in range(50):
            d.links.send(d.port, Send("p.r0", Release(f"x{number}")))
        frames = await p.endpoint.get(Received, 50)
        assert frames == [Received("d.r0", 100, Release(f"x{number}")) for number in range(50)]
        p.links.send(p.port, Send("d.r0", CANCEL))
        assert await d.endpoint.get(Received) == [Received("p.r0", 101, CANCEL)]


@pytest.mark.trio
async def test_who_is_not_there_or_is_somebody_else_is_no_peer() -> None:
    async with sides("d", "p") as (d, p):
        d.links.book["nowhere"] = ("127.0.0.1", 1)
        d.links.book["impostor"] = ("127.0.0.1", p.tcp)
        for peer in ("nowhere.r0", "impostor.r0", "unheard-of.r0"):
            d.links.handshake(d.port, Handshake(peer))
        ended = await d.endpoint.get(HandshakeEnded, 3)
        assert {(event.peer, event.ok) for event in ended} == {
            ("nowhere.r0", False),
            ("impostor.r0", False),
            ("unheard-of.r0", False),
        }
        p.links.book.clear()
        p.links.handshake(p.port, Handshake("d.r0"))
        assert await p.endpoint.get(HandshakeEnded) == [HandshakeEnded("d.r0", False, 0)]


@pytest.mark.trio
async def test_only_an_address_where_no_process_listens_has_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that is closed, one that nothing is read from, another engine and an unknown address prove nothing."""
    monkeypatch.setattr(links, "HELLO_TIMEOUT_S", 0.3)
    async with sides("d", "p") as (d, p), trio.open_nursery() as nursery:
        for kind, seconds in (("closes", 0.0), ("silent", 60.0)):

            async def answer(stream: trio.SocketStream, seconds: float = seconds) -> None:
                async with stream:
                    await trio.sleep(seconds)

            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, answer, [listener])
            d.links.book[kind] = ("127.0.0.1", listener.socket.getsockname()[1])
        (gone,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        d.links.book["gone"] = ("127.0.0.1", gone.socket.getsockname()[1])
        await gone.aclose()
        d.links.book["impostor"] = ("127.0.0.1", p.tcp)
        peers = ["gone", "closes", "silent", "impostor", "unknown"]
        for peer in peers:
            d.links.handshake(d.port, Handshake(f"{peer}.r0"))
        ended = await d.endpoint.get(HandshakeEnded, len(peers))
        nursery.cancel_scope.cancel()
    assert {(event.peer, event.ok, event.refused) for event in ended} == {
        (f"{peer}.r0", False, peer == "gone") for peer in peers
    }


def test_a_host_with_several_addresses_has_refused_when_all_of_them_have() -> None:
    def attempts(*errors: OSError) -> OSError:
        error = OSError("all attempts to connect failed")
        error.__cause__ = ExceptionGroup("all attempts to connect failed", errors)
        return error

    assert links.is_refusal(attempts(ConnectionRefusedError(), ConnectionRefusedError()))
    assert not links.is_refusal(attempts(ConnectionRefusedError(), TimeoutError()))
    assert not links.is_refusal(OSError("no such host"))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100,
        encode_frame(CANCEL),
        encode_frame(Hello("d.r0", 1, 1, 0, "p.r7")),
        encode_frame(Hello("d.r0", 1, 1, 0)),
        b"",
    ],
)
@pytest.mark.trio
async def test_an_unauthenticated_connection_is_closed_and_others_are_not_affected(data: bytes) -> None:
    async with sides("d", "p") as (d, p):
        await connected(d, p)
        unauthenticated = await trio.open_tcp_stream("127.0.0.1", p.tcp)
        async with unauthenticated:
            await unauthenticated.send_all(data)
            await unauthenticated.send_eof()
            with trio.fail_after(10):
                while await unauthenticated.receive_some():
                    pass
        d.links.send(d.port, Send("p.r0", CANCEL))
        assert await p.endpoint.get(Received) == [Received("d.r0", 100, CANCEL)]
        assert not [event for event in p.endpoint.events if type(event) is PeerLost]


@pytest.mark.trio
async def test_silent_pending_connections_do_not_keep_peers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever held all places was waited for, and every peer hung up on."""
    monkeypatch.setattr(links, "MAX_PENDING", 4)
    monkeypatch.setattr(links, "HELLO_TIMEOUT_S", 3600)
    async with sides("d", "p") as (d, p):
        silent = [await trio.open_tcp_stream("127.0.0.1", p.tcp) for _ in range(4)]
        with trio.fail_after(20):
            await connected(d, p)
            assert not await silent[0].receive_some()
            silent += [await trio.open_tcp_stream("127.0.0.1", p.tcp) for _ in range(5)]
            for stream in silent[1:5]:
                assert not await stream.receive_some()
        d.links.send(d.port, Send("p.r0", CANCEL))
        assert await p.endpoint.get(Received) == [Received("d.r0", 100, CANCEL)]
        for stream in silent:
            await stream.aclose()


def many_blocks() -> bytes:
    """A registration of more blocks than any may have, as no peer of ours can make it."""
    target = Allocation(1, tuple(range(MAX_BLOCKS + 1)))
    body = msgspec.msgpack.encode(Register(CANCEL.reg, "x", 0, Shards(1, 1, 1), target, 0, MAX_BLOCKS + 1, 0, 0, 0))
    return (1 + len(body)).to_bytes(4, "big") + bytes((VERSION,)) + body


@pytest.mark.parametrize("nonsense", [b"\xff" * 50, many_blocks()], ids=["no frame", "too many blocks"])
@pytest.mark.trio
async def test_nonsense_behind_hello_ends_that_stream_alone(nonsense: bytes) -> None:
    async with sides("d", "p") as (d, p):
        await connected(d, p)
        other = await trio.open_tcp_stream("127.0.0.1", p.tcp)
        async with other:
            await other.send_all(encode_frame(Hello("other.r0", 7, 1, 0, "p.r0")) + encode_frame(CANCEL) + nonsense)
            with trio.fail_after(10):
                while await other.receive_some():
                    pass
        assert await p.endpoint.get(PeerLost) == [PeerLost("other.r0")]
        assert await p.endpoint.get(Received) == [Received("other.r0", 7, CANCEL)]
        d.links.send(d.port, Send("p.r0", CANCEL))
        assert (await p.endpoint.get(Received, 2))[1] == Received("d.r0", 100, CANCEL)


@pytest.mark.trio
async def test_a_broken_stream_is_reported_and_a_fence_is_not() -> None:
    async with sides("d", "p") as (d, p):
        await connected(d, p)
        d.links.fence(d.port, Fence("p.r0"))
        assert await p.endpoint.get(PeerLost) == [PeerLost("d.r0")]
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert not [event for event in d.endpoint.events if type(event) is PeerLost]
        d.links.send(d.port, Send("p.r0", CANCEL))
        d.links.handshake(d.port, Handshake("p.r0"))
        await d.endpoint.get(HandshakeEnded, 2)
        d.links.send(d.port, Send("p.r0", CANCEL))
        assert await p.endpoint.get(Received) == [Received("d.r0", 100, CANCEL)]


@pytest.mark.trio
async def test_a_new_stream_of_a_peer_replaces_the_old_one() -> None:
    """A peer that has restarted, or whose old stream nobody has seen break yet."""
    async with sides("d", "p") as (d, p):
        await connected(d, p)
        again = await trio.open_tcp_stream("127.0.0.1", p.tcp)
        async with again:
            await again.send_all(encode_frame(Hello("d.r0", 555, 9, 0, "p.r0")) + encode_frame(CANCEL))
            assert await p.endpoint.get(PeerLost) == [PeerLost("d.r0")]
            assert await p.endpoint.get(Received) == [Received("d.r0", 555, CANCEL)]
            assert p.links.incarnation_of("p.r0", "d.r0") == 555
            assert await d.endpoint.get(PeerLost) == [PeerLost("p.r0")]


@pytest.mark.trio
async def test_who_takes_no_frames_is_lost_and_nobody_waits() -> None:
    async with sides("p") as (p,):
        silent = await trio.open_tcp_stream("127.0.0.1", p.tcp)
        async with silent:
            await silent.send_all(encode_frame(Hello("silent.r0", 7, 1, 0, "p.r0")))
            with trio.fail_after(10):
                while p.links.incarnation_of("p.r0", "silent.r0") is None:
                    await trio.sleep(0.005)
            large = Release("x" * 500)
            for _ in range(60_000):
                p.links.send(p.port, Send("silent.r0", large))
                if not _ % 1000:
                    await trio.sleep(0)
            assert await p.endpoint.get(PeerLost) == [PeerLost("silent.r0")]


@pytest.mark.trio
async def test_a_stream_that_ends_during_connect_fails_the_handshake() -> None:
    """Its end has been told by then: an endpoint that heard of success afterwards would talk to nobody for ever."""
    async with sides("d", "p") as (d, p):
        connecting, go_on = trio.Event(), trio.Event()
        connect = d.memory.connect

        async def slowly(peer: str, metadata: bytes) -> None:
            connecting.set()
            await go_on.wait()
            await connect(peer, metadata)

        d.memory.connect = slowly  # type: ignore[method-assign]
        d.links.handshake(d.port, Handshake(p.address))
        await connecting.wait()
        p.links.fence(p.port, Fence(d.address))
        await d.endpoint.get(PeerLost)
        go_on.set()
        assert await d.endpoint.get(HandshakeEnded) == [HandshakeEnded(p.address, False, 0)]


@pytest.mark.parametrize("fences", ["close", "revoke"])
@pytest.mark.trio
async def test_a_hello_that_may_be_void_leads_nowhere_and_ends_its_stream(fences: str) -> None:
    """Where fences close: it may have been said before one, and whoever tries it again would never get there."""
    async with sides("unreachable", "p") as (d, p):
        p.memory.transport.fences = fences
        await connected(d, p)
        p.links.handshake(p.port, Handshake(d.address))
        assert await p.endpoint.get(HandshakeEnded) == [HandshakeEnded(d.address, False, 0)]
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert bool([event for event in d.endpoint.events if event == PeerLost(p.address)]) == (fences == "close")


@pytest.mark.trio
async def test_a_new_engine_address_is_tried_before_the_next_request() -> None:
    async with sides("d", "p") as (d, p):
        d.links.book["p"] = ("127.0.0.1", 1)
        d.links.handshake(d.port, Handshake(p.address))
        assert await d.endpoint.get(HandshakeEnded) == [HandshakeEnded(p.address, False, 0, True)]
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(d.links.update_address, "p", "127.0.0.1", p.tcp)
        assert (await d.endpoint.get(HandshakeEnded, 2))[1:] == [HandshakeEnded(p.address, True, p.port.incarnation)]
        await d.links.update_address("p", "127.0.0.1", p.tcp)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert len(d.endpoint.events) == 2
