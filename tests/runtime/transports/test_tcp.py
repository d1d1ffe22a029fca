"""What only TCP can do to a stream: break between two hosts that are both alive."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing
import trustme

from pdflow_runtime.transports.agent import StreamAgent
from pdflow_runtime.transports.base import Ended, Fenced, PeerGone, TransportError
from pdflow_runtime.transports.streams.messages import Description
from pdflow_runtime.transports.tcp import TcpTransport
from tests.runtime.support.certificates import certify, tls_in
from tests.runtime.transports.agents import REGION_BYTES, agents, untouched

ENCRYPTED_OR_NOT = pytest.mark.parametrize("kind", ["tcp", "tcp by TLS"])


class Middlebox:
    """Passes on what a writer sends to a target, for as long as it likes; what has passed, the target has to read."""

    def __init__(self, description: bytes) -> None:
        self._target = msgspec.msgpack.decode(description, type=Description)
        self.limit = REGION_BYTES // 2
        self.streams: list[tuple[trio.SocketStream, trio.SocketStream]] = []
        self.open = True
        self.passed = bytearray()
        """All that it has passed on, in both directions."""

    async def run(self, *, task_status: trio.TaskStatus[bytes]) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listeners[0].socket.getsockname()[1]
        task_status.started(msgspec.msgpack.encode(msgspec.structs.replace(self._target, port=port)))
        await trio.serve_listeners(self._pass_on, listeners)

    async def _pass_on(self, writer: trio.SocketStream) -> None:
        if not self.open:
            await trio.aclose_forcefully(writer)
            return
        target = await trio.open_tcp_stream(self._target.host, self._target.port)
        self.streams.append((writer, target))
        async with target, trio.open_nursery() as nursery:
            nursery.start_soon(self._copy, target, writer)
            await self._copy(writer, target, self.limit)
            await trio.sleep_forever()

    async def _copy(self, source: trio.SocketStream, sink: trio.SocketStream, limit: int = 1 << 60) -> None:
        try:
            while limit > 0 and (chunk := await source.receive_some(min(65_536, limit))):
                self.passed += chunk
                await sink.send_all(chunk)
                limit -= len(chunk)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    def reset(self) -> None:
        """The writer's side of the first stream ends at once and without order; the target's goes on."""
        writer = self.streams[0][0].socket
        writer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()


@pytest.mark.trio
@ENCRYPTED_OR_NOT
async def test_a_reset_is_no_proof_that_the_target_has_closed(kind: str) -> None:
    async with agents(kind, "p.r0", "d.r0") as (p, d), trio.open_nursery() as nursery:
        p.memory[:] = b"\x01" * REGION_BYTES
        box = Middlebox(d.transport.describe())
        await p.transport.connect("d.r0", await nursery.start(box.run))
        op = p.write("d.r0", [(0, 0, REGION_BYTES)], notification=b"n")
        while untouched(d):
            await trio.lowlevel.checkpoint()
        box.open = False
        box.reset()
        assert not await p.ended(op)
        p.transport.fence("d.r0", 1)
        await trio.testing.wait_all_tasks_blocked()
        assert Fenced("d.r0") not in p.events
        assert PeerGone("p.r0") not in d.events
        box.open = True
        await p.wait_for(Fenced("d.r0"))
        # Nothing of the old stream lands from here on, though its target's side was never closed by the middlebox.
        d.memory[:] = bytes(REGION_BYTES)
        assert box.streams[0][1].socket.fileno() != -1
        await trio.testing.wait_all_tasks_blocked()
        assert untouched(d)
        assert d.notifications() == []
        nursery.cancel_scope.cancel()


@pytest.mark.trio
@ENCRYPTED_OR_NOT
async def test_a_reset_that_comes_together_with_a_fence_is_no_proof_either(kind: str) -> None:
    """The system reports it once: the end of TLS that the fence sends must not take it from the reader."""
    async with agents(kind, "p.r0", "d.r0") as (p, d), trio.open_nursery() as nursery:
        p.memory[:] = b"\x01" * REGION_BYTES
        box = Middlebox(d.transport.describe())
        await p.transport.connect("d.r0", await nursery.start(box.run))
        op = p.write("d.r0", [(0, 0, REGION_BYTES)])
        while untouched(d):
            await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked()
        box.open = False
        box.reset()
        p.transport.fence("d.r0", 1)
        assert not await p.ended(op)
        await trio.testing.wait_all_tasks_blocked()
        assert Fenced("d.r0") not in p.events
        box.open = True
        await p.wait_for(Fenced("d.r0"))
        nursery.cancel_scope.cancel()


@pytest.mark.trio
@ENCRYPTED_OR_NOT
async def test_a_new_connection_is_proof_as_well(kind: str) -> None:
    async with agents(kind, "p.r0", "d.r0") as (p, d), trio.open_nursery() as nursery:
        box = Middlebox(d.transport.describe())
        description = await nursery.start(box.run)
        await p.transport.connect("d.r0", description)
        p.write("d.r0", [(0, 0, REGION_BYTES)])
        while len(box.streams) == 0:
            await trio.lowlevel.checkpoint()
        box.open = False
        box.reset()
        await p.wait_for(Ended(1, False))
        p.transport.fence("d.r0", 1)
        box.open = True
        box.limit = 1 << 60
        await p.transport.connect("d.r0", description)
        await p.wait_for(Fenced("d.r0"))
        assert await p.ended(p.write("d.r0", [(0, 0, 8)], generation=2))
        nursery.cancel_scope.cancel()


@pytest.mark.trio
@ENCRYPTED_OR_NOT
async def test_a_connection_that_breaks_takes_the_other_direction_with_it(kind: str) -> None:
    """Otherwise the side that can still post would never learn that the other one cannot."""
    async with agents(kind, "p.r0", "d.r0") as (p, d), trio.open_nursery() as nursery:
        box = Middlebox(d.transport.describe())
        await p.transport.connect("d.r0", await nursery.start(box.run))
        await d.transport.connect("p.r0", p.transport.describe())
        while len(box.streams) == 0:
            await trio.lowlevel.checkpoint()
        box.reset()
        await p.wait_for(PeerGone("d.r0"))
        await d.wait_for(Ended(d.read("p.r0", [(0, 0, 8)]), False))
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1"])
def test_an_address_that_is_none_of_ours_is_one_sentence(host: str) -> None:
    with pytest.raises(TransportError, match=r"(is not an address that peers can connect to|cannot listen on)"):
        TcpTransport("p.r0", lambda event: None, host).allocate(4096)


def test_memory_that_cannot_be_had_is_one_sentence() -> None:
    with pytest.raises(TransportError, match=r"cannot allocate [\d,]+ MiB of memory"):
        TcpTransport("p.r0", lambda event: None).allocate(1 << 60)


@pytest.mark.trio
@ENCRYPTED_OR_NOT
async def test_who_reads_the_network_learns_neither_kv_nor_the_token_of_a_memory_with_tls(kind: str) -> None:
    secret = bytes(range(200, 232))
    async with agents(kind, "p.r0", "d.r0") as (p, d), trio.open_nursery() as nursery:
        box = Middlebox(d.transport.describe())
        box.limit = 1 << 60
        await p.transport.connect("d.r0", await nursery.start(box.run))
        p.memory[0:32] = secret
        assert await p.ended(p.write("d.r0", [(0, 64, 32)], notification=b"in the clear"))
        d.memory[128:160] = secret[::-1]
        assert await p.landed(p.read("d.r0", [(128, 256, 32)]))
        assert bytes(d.memory[64:96]) == secret
        assert bytes(p.memory[256:288]) == secret[::-1]
        seen = [text in box.passed for text in (secret, secret[::-1], d.transport.token, b"in the clear")]
        assert seen == [kind == "tcp"] * 4
        nursery.cancel_scope.cancel()


async def refused(peer: StreamAgent, description: bytes) -> str:
    with pytest.raises(TransportError) as error:
        await peer.connect("d.r0", description)
    return str(error.value)


@pytest.mark.trio
async def test_a_peer_without_a_certificate_of_the_authority_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certify(tmp_path, trustme.CA())
    async with agents("tcp by TLS", "p.r0", "d.r0") as (p, d), trio.open_nursery() as nursery:
        plain = TcpTransport("x.r0", lambda event: None)
        foreign = TcpTransport("y.r0", lambda event: None, tls=tls_in(tmp_path))
        for agent in (plain, foreign):
            agent.allocate(4096)
            await nursery.start(agent.run)
        description = d.transport.describe()
        assert "the peer closed the connection" in await refused(plain, description)
        assert "certificate verify failed" in await refused(foreign, description)
        assert "; does it use TLS?" in await refused(p.transport, plain.describe())
        await p.transport.connect("d.r0", description)
        assert await p.ended(p.write("d.r0", [(0, 0, 8)]))
        nursery.cancel_scope.cancel()
    assert "d.r0: closing the connection of an unknown peer: no TLS: the peer does not use TLS" in caplog.text
