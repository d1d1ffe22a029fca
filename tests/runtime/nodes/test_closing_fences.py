"""A transport whose fences close does not tell old grants from new ones: the ranks do, by what a description says.

Args of `written`: D has granted generation 5 to P and fenced P, and P has met D anew.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio

from pdflow.layout.shapes import KvShape
from pdflow.protocol.effects import PostWrite
from pdflow.protocol.events import FenceEnded, WriteEnded
from pdflow.protocol.ids import EngineInfo, Op, Reg, Shards
from pdflow.protocol.messages import Done, Register
from pdflow.protocol.values import Allocation
from pdflow_runtime.nodes.ranks import LayoutBook, Rank, RankMetadata
from pdflow_runtime.transports.base import MakeTransport
from pdflow_runtime.transports.tcp import TcpTransport
from tests.runtime.support.local import ClosingTransport

SHAPE = KvShape(2, 2, 64, 4, 16)
SHARDS = Shards(1, 1, 16)


class RecordingRank(Rank):
    """A rank whose endpoint takes note."""

    def __init__(self, engine: str, transport: MakeTransport) -> None:
        self.events: list[Any] = []
        rank_args = (SHAPE, 8, LayoutBook(SHAPE, "push", "exactly-once"), transport, self.events.append, 1)
        super().__init__(EngineInfo(engine, SHARDS), 0, *rank_args)

    async def wait_for(self, event: Any) -> None:
        with trio.fail_after(60):
            while event not in self.events:
                await trio.sleep(0.001)

    async def writes(self, generation: int) -> bool:
        reg = Reg("d", 7, generation, "r")
        op, done = Op(reg, 0, 0), Done(reg, 0, generation, 1, 1)
        registration = Register(reg, "x", 0, SHARDS, Allocation(generation, (0,)), 0, 16, 0, 1, 0)
        self.write(PostWrite(op, "d.r0", Allocation(3, (2,)), registration, 1, done))
        with trio.fail_after(60):
            while not (ends := [e for e in self.events if isinstance(e, WriteEnded) and e.op == op]):
                await trio.sleep(0.001)
        return ends[0].ok


@asynccontextmanager
async def fenced(
    transport: MakeTransport, tamper: Callable[[bytes], bytes] = lambda metadata: metadata
) -> AsyncIterator[tuple[RecordingRank, RecordingRank]]:
    """P and D, which has fenced P at generation 5 and been met anew."""
    p, d = RecordingRank("p", transport), RecordingRank("d", transport)
    p.view[:] = b"\xff" * len(p.view)
    async with trio.open_nursery() as nursery:
        for rank in (p, d):
            await nursery.start(rank.transport.run)
        await p.connect("d.r0", d.metadata_for("p.r0"))
        assert await p.writes(5)
        d.view[:] = bytes(len(d.view))
        d.fence("p.r0", 5)
        await d.wait_for(FenceEnded("p.r0"))
        with trio.fail_after(60):
            while "d.r0" in p.peers and transport is ClosingTransport:
                await trio.sleep(0.001)
        await p.connect("d.r0", tamper(d.metadata_for("p.r0")))
        yield p, d
        for rank in (p, d):
            await rank.transport.aclose()


def without_void(encoded: bytes) -> bytes:
    metadata = msgspec.msgpack.decode(encoded, type=RankMetadata)
    return msgspec.msgpack.encode(msgspec.structs.replace(metadata, void_generation=-1))


@pytest.mark.parametrize("transport", [ClosingTransport, TcpTransport])
@pytest.mark.trio
async def test_a_registration_from_before_a_fence_is_not_written(transport: MakeTransport) -> None:
    async with fenced(transport) as (p, d):
        assert not await p.writes(4)
        assert not any(d.view)
        assert await p.writes(6)
        assert any(d.view)


@pytest.mark.trio
async def test_only_the_metadata_keeps_old_writes_out_of_a_transport_that_closes() -> None:
    """And where the transport revokes, it is said nothing."""
    async with fenced(ClosingTransport, without_void) as (p, d):
        assert await p.writes(4)
        assert any(d.view)
    async with fenced(TcpTransport, without_void) as (p, d):
        assert d.metadata_for("p.r0") == without_void(d.metadata_for("p.r0"))
        assert not await p.writes(4)


@pytest.mark.trio
async def test_a_fence_of_one_peer_is_not_reported_to_another() -> None:
    async with fenced(ClosingTransport) as (_, d):
        void = {
            peer: msgspec.msgpack.decode(d.metadata_for(peer), type=RankMetadata).void_generation
            for peer in ("p.r0", "q.r0")
        }
        assert void == {"p.r0": 5, "q.r0": -1}
