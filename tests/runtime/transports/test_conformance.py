"""What base.py promises, held against every transport."""

from __future__ import annotations

import random

import pytest
import trio

from pdflow_runtime.transports.base import (
    Ended,
    Fenced,
    Flushed,
    NotificationArrived,
    PeerGone,
    Stopped,
    TransportError,
    WordArrived,
)
from tests.runtime.transports.agents import ALL, REGION_BYTES, TIMEOUT_S, Agent, agents, pair, untouched

pytestmark = pytest.mark.trio
MIB = 1 << 20


@pytest.fixture(params=ALL)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def scrambled(agent: Agent, seed: int = 0) -> None:
    agent.memory[:] = random.Random(seed).randbytes(len(agent.memory))


async def test_a_write_lands_at_its_addresses_and_nowhere_else(kind: str) -> None:
    async with pair(kind) as (p, d):
        scrambled(p)
        assert await p.landed(p.write("d.r0", [(100, 5000, 300), (4096, 0, 1)], notification=b"done"))
        expected = bytearray(REGION_BYTES)
        expected[5000:5300] = p.memory[100:400]
        expected[0:1] = p.memory[4096:4097]
        assert d.memory == expected
        assert d.notifications() == [b"done"]


@pytest.mark.parametrize("length", [0, 1, 4095, 65_537, 5 * MIB])
async def test_pieces_of_any_length_arrive_before_their_notification(kind: str, length: int) -> None:
    async with pair(kind) as (p, d):
        scrambled(p)
        p.write("d.r0", [(7, 11, length)], notification=b"n")
        await d.wait_for(NotificationArrived("p.r0", b"n"))
        assert d.memory[11 : 11 + length] == p.memory[7 : 7 + length]
        assert d.memory[11 + length] == 0


async def test_a_notification_needs_no_bytes(kind: str) -> None:
    async with pair(kind) as (p, d):
        assert await p.landed(p.write("d.r0", [], notification=b"nothing but this"))
        assert d.events == [NotificationArrived("p.r0", b"nothing but this")]


async def test_a_write_without_notification_does_not_notify_its_target(kind: str) -> None:
    async with pair(kind) as (p, d):
        assert await p.landed(p.write("d.r0", [(0, 0, 8)]))
        assert d.events == []


@pytest.mark.parametrize("length", [8, 700])
async def test_ten_thousand_descriptors(kind: str, length: int) -> None:
    order = list(range(10_000))
    random.Random(1).shuffle(order)
    pieces = [(at * length, to * length, length) for at, to in enumerate(order)]
    async with pair(kind) as (p, d):
        scrambled(p)
        assert await p.landed(p.write("d.r0", pieces, notification=b"n"))
        assert d.notifications() == [b"n"]
        for at, to, _ in pieces:
            assert d.memory[to : to + length] == p.memory[at : at + length]
        d.memory[:] = bytes(REGION_BYTES)
        assert await d.ended(d.read("p.r0", pieces))
        for at, to, _ in pieces:
            assert d.memory[to : to + length] == p.memory[at : at + length]


async def test_a_read_brings_what_is_there(kind: str) -> None:
    async with pair(kind) as (p, d):
        scrambled(p)
        for length in (0, 1, 4097, 3 * MIB):
            assert await d.ended(d.read("p.r0", [(9, 5, length), (0, 4 * MIB, 2)]))
            assert d.memory[5 : 5 + length] == p.memory[9 : 9 + length]
        assert p.events == []


async def test_many_posts_at_once_each_end_once(kind: str) -> None:
    async with pair(kind) as (p, d):
        scrambled(p)
        size = 16_384
        ops = [p.write("d.r0", [(i * size, i * size, size)], notification=b"%d" % i) for i in range(256)]
        backward = [d.write("p.r0", [(i * size, 4 * MIB + i * size, 1)]) for i in range(64)]
        assert all([await p.landed(op) for op in ops])
        assert all([await d.landed(op) for op in backward])
        assert d.memory[: 256 * size] == p.memory[: 256 * size]
        assert sorted(d.notifications()) == sorted(b"%d" % i for i in range(256))
        assert len([event for event in p.events if isinstance(event, Ended)]) == 256


async def test_a_large_write_holds_up_no_other_peer(kind: str) -> None:
    async with agents(kind, "p.r0", "q.r0", "d.r0") as (p, q, d):
        await p.transport.connect("d.r0", d.transport.describe())
        await q.transport.connect("d.r0", d.transport.describe())
        large = [p.write("d.r0", [(0, 0, REGION_BYTES)]) for _ in range(30)]
        assert await q.landed(q.write("d.r0", [], notification=b"small"))
        assert p.done_is_local or not all(Ended(op, True) in p.events for op in large)
        assert all([await p.landed(op) for op in large])


async def test_both_directions_of_a_pair_at_once(kind: str) -> None:
    async with pair(kind) as (p, d):
        scrambled(p, 1)
        scrambled(d, 2)
        half = REGION_BYTES // 2
        from_p, from_d = bytes(p.memory[:half]), bytes(d.memory[:half])
        ops = [p.write("d.r0", [(0, half, half)]) for _ in range(4)]
        back = [d.write("p.r0", [(0, half, half)]) for _ in range(4)]
        reads = [d.read("p.r0", [(0, half, half)]) for _ in range(4)]
        assert all([await p.landed(op) for op in ops])
        assert all([await d.landed(op) for op in back])
        assert all([await d.ended(op) for op in reads])
        assert d.memory[half:] == from_p
        assert p.memory[half:] == from_d


async def test_a_lease_word_is_read(kind: str) -> None:
    async with pair(kind) as (p, d):
        p.words[64:72] = (2**64 - 2).to_bytes(8, "little")
        d.transport.read_word(1, "p.r0", p.words_at + 64)
        await d.wait_for(WordArrived(1, 2**64 - 2))
        end = p.words_at + len(p.words)
        for op, address in enumerate((-8, p.words_at + 4, end - 7, end, 2**64), start=2):
            d.transport.read_word(op, "p.r0", address)
            await d.wait_for(WordArrived(op, None))
        d.transport.read_word(9, "nobody.r0", 0)
        await d.wait_for(WordArrived(9, None))


@pytest.mark.parametrize(
    "piece",
    [
        (0, REGION_BYTES, 1),
        (REGION_BYTES, 0, 1),
        (0, REGION_BYTES - 9, 10),
        (0, 2**64 - 1, 8),
        (2**64 - 8, 0, 8),
        (0, 0, 2**64 - 1),
        (0, -1, 1),
        (0, 2**64, 1),
    ],
)
async def test_what_lies_outside_is_refused(kind: str, piece: tuple[int, int, int]) -> None:
    async with pair(kind) as (p, d):
        scrambled(p)
        assert not await p.landed(p.write("d.r0", [(0, 0, 8), piece], notification=b"n"))
        assert not await d.ended(d.read("p.r0", [(0, 0, 8), piece]))
        assert untouched(d)
        assert d.notifications() == []
        assert await p.landed(p.write("d.r0", [(0, 0, 8)], notification=b"still reached"))


async def test_whoever_is_not_connected_is_not_reached(kind: str) -> None:
    async with agents(kind, "p.r0", "d.r0") as (p, d):
        assert not await p.landed(p.write("d.r0", [(0, 0, 8)]))
        assert not await d.ended(d.read("p.r0", [(0, 0, 8)]))
        p.transport.flush("d.r0")
        await p.wait_for(Flushed("d.r0", False))
        p.transport.fence("d.r0", 3)
        await p.wait_for(Fenced("d.r0"))


async def test_fence_then_no_byte_lands(kind: str) -> None:
    async with pair(kind) as (p, d):
        p.memory[:] = b"\xff" * REGION_BYTES
        ops = [p.write("d.r0", [(0, 0, REGION_BYTES)], generation=5, notification=b"old") for _ in range(20)]
        while untouched(d):
            await trio.lowlevel.checkpoint()
        d.transport.fence("p.r0", 5)
        await d.wait_for(Fenced("p.r0"))
        d.memory[:] = bytes(REGION_BYTES)
        seen = len(d.notifications())
        landed = [await p.landed(op) for op in ops]
        assert untouched(d)
        assert len(d.notifications()) == seen
        assert not landed[-1]


async def test_a_fence_keeps_out_what_its_transport_declares(kind: str) -> None:
    """revoke: older generations and no others, whenever they are posted. close: whoever was connected before."""
    async with pair(kind) as (p, d):
        scrambled(p)
        before = d.transport.describe()
        d.transport.fence("p.r0", 5)
        await d.wait_for(Fenced("p.r0"))
        assert not await p.landed(p.write("d.r0", [(0, 0, 64)], generation=5, notification=b"old"))
        if d.transport.fences == "close":
            assert not await p.landed(
                p.write("d.r0", [(0, 0, 64)], generation=6, notification=b"over the old connection")
            )
            await reconnects(p, d, before)
        elif p.done_is_local:
            await forgives(p)
        assert await p.landed(p.write("d.r0", [(0, 64, 64)], generation=6, notification=b"new"))
        d.transport.fence("p.r0", 3)
        if d.transport.fences == "revoke":
            assert not await p.landed(p.write("d.r0", [(0, 0, 64)], generation=4))
        assert d.notifications() == [b"new"]
        assert not any(d.memory[:64])


async def reconnects(p: Agent, d: Agent, before: bytes) -> None:
    """By what it was told before the fence it may not come in again; by what it is told now it may."""
    with trio.fail_after(TIMEOUT_S):
        while "d.r0" in p.transport._links:
            await trio.lowlevel.checkpoint()
    with pytest.raises(TransportError):
        await p.transport.connect("d.r0", before)
    await p.transport.connect("d.r0", d.transport.describe())


async def forgives(p: Agent) -> None:
    """A flush has failed: so do all, up to the next fence."""
    assert not await p.flushed("d.r0")
    p.transport.fence("d.r0", 0)
    await p.wait_for(Fenced("d.r0"))


async def test_a_fence_of_one_peer_is_not_another_s(kind: str) -> None:
    async with agents(kind, "p.r0", "q.r0", "d.r0") as (p, q, d):
        await p.transport.connect("d.r0", d.transport.describe())
        await q.transport.connect("d.r0", d.transport.describe())
        d.transport.fence("p.r0", 5)
        assert not await p.landed(p.write("d.r0", [(0, 0, 64)]))
        assert await q.landed(q.write("d.r0", [(0, 0, 64)]))


async def test_a_fence_ends_our_reads(kind: str) -> None:
    async with pair(kind) as (p, d):
        p.memory[:] = b"\xff" * REGION_BYTES
        ops = [d.read("p.r0", [(0, 0, REGION_BYTES)]) for _ in range(20)]
        while untouched(d):
            await trio.lowlevel.checkpoint()
        d.transport.fence("p.r0", 0)
        await d.wait_for(Fenced("p.r0"))
        assert [event.op for event in d.events if isinstance(event, Ended)] == ops
        d.memory[:] = bytes(REGION_BYTES)
        p.memory[8:] = bytes(REGION_BYTES - 8)
        assert await d.ended(d.read("p.r0", [(0, 16, 8)]))
        assert bytes(d.memory[:32]) == bytes(16) + b"\xff" * 8 + bytes(8)
        assert not any(d.memory[32:])


async def test_a_writer_s_fence_ends_what_it_posted(kind: str) -> None:
    async with pair(kind) as (p, d):
        p.memory[:] = b"\xff" * REGION_BYTES
        ops = [p.write("d.r0", [(0, 0, REGION_BYTES)], notification=b"n") for _ in range(20)]
        p.transport.fence("d.r0", 0)
        await p.wait_for(Fenced("d.r0"))
        fenced_at = p.events.index(Fenced("d.r0"))
        ended = [event for event in p.events[:fenced_at] if isinstance(event, Ended)]
        assert sorted(event.op for event in ended) == ops
        assert p.done_is_local or len(d.notifications()) == sum(event.ok for event in ended)
        d.memory[:] = bytes(REGION_BYTES)
        assert not await p.landed(p.write("d.r0", [(0, 0, 8)]))
        await p.transport.connect("d.r0", d.transport.describe())
        assert await p.landed(p.write("d.r0", [(0, 0, 8)], notification=b"again"))
        assert d.notifications()[-1] == b"again"
        assert not any(d.memory[8:])


async def test_a_fence_with_nothing_open_ends_at_once(kind: str) -> None:
    async with pair(kind) as (p, _):
        p.transport.fence("d.r0", 1)
        assert p.events == [Fenced("d.r0")]
        assert await p.landed(p.write("d.r0", [(0, 0, 8)]))


async def test_a_flush_ends_behind_what_was_posted_before(kind: str) -> None:
    async with pair(kind) as (p, d):
        scrambled(p)
        first = p.write("d.r0", [(0, 0, 4 * MIB)])
        p.transport.flush("d.r0")
        second = p.write("d.r0", [(0, 4 * MIB, 4 * MIB)])
        p.transport.flush("d.r0")
        await p.wait_for(Flushed("d.r0", True))
        assert d.memory[: 4 * MIB] == p.memory[: 4 * MIB]
        with trio.fail_after(TIMEOUT_S):
            while p.events.count(Flushed("d.r0", True)) < 2:
                await trio.lowlevel.checkpoint()
        assert d.memory[4 * MIB :] == p.memory[: 4 * MIB]
        if not p.done_is_local:
            assert p.events == [Ended(first, True), Flushed("d.r0", True), Ended(second, True), Flushed("d.r0", True)]
        p.transport.flush("d.r0")
        assert p.events[-1] == Flushed("d.r0", True)
        assert len(p.events) == 5


async def test_done_means_what_its_transport_declares(kind: str) -> None:
    """remote: it has landed by then. local: its source may be reused, and after a flush what was there has landed."""
    async with pair(kind) as (p, d):
        for number, length in enumerate((1, 4097, 3 * MIB)):
            scrambled(p, number)
            written = bytes(p.memory[:length])
            op = p.write("d.r0", [(0, 0, length)], notification=b"%d" % number)
            assert await p.ended(op)
            if p.done_is_local:
                p.memory[:length] = bytes(length)
                assert await p.flushed("d.r0")
            assert d.memory[:length] == written
            assert d.notifications()[-1] == b"%d" % number


async def test_no_flush_ends_well_behind_what_may_be_lost(kind: str) -> None:
    """Not over a new connection either: what was reported as done, and went with the old one, has not landed."""
    async with pair(kind) as (p, d):
        ops = [p.write("d.r0", [(0, 0, REGION_BYTES)], notification=b"n") for _ in range(4)]
        p.transport._lose(p.transport._links["d.r0"])
        await p.wait_for(PeerGone("d.r0"))
        await p.transport.connect("d.r0", d.transport.describe())
        done = [op for op in ops if await p.ended(op)]
        assert not p.done_is_local or done == ops
        if len(done) > len(d.notifications()):
            await forgives(p)
        assert await p.landed(p.write("d.r0", [(0, 0, 8)]))


async def test_what_is_stopped_before_it_was_posted_never_is(kind: str) -> None:
    async with pair(kind) as (p, d):
        p.memory[:] = b"\xff" * REGION_BYTES
        first = p.write("d.r0", [(0, 0, 4 * MIB)])
        ops = [p.write("d.r0", [(i, 0, 1) for i in range(10_000)], notification=b"n") for _ in range(20)]
        p.transport.stop(ops[-1])
        p.transport.flush("d.r0")
        await p.wait_for(Flushed("d.r0", True))
        stopped = Stopped(ops[-1]) in p.events
        assert stopped or p.done_is_local
        assert len(d.notifications()) == 20 - stopped
        assert Ended(first, True) in p.events
        p.transport.stop(first)
        p.transport.stop(12345)


async def test_forgetting_ends_everything_with_that_peer(kind: str) -> None:
    async with pair(kind) as (p, d):
        ops = [p.write("d.r0", [(0, 0, REGION_BYTES)]) for _ in range(5)]
        p.transport.flush("d.r0")
        p.transport.forget("d.r0")
        assert {event.op for event in p.events if isinstance(event, Ended)} == set(ops)
        await p.wait_for(Flushed("d.r0", False))
        assert not await p.landed(p.write("d.r0", [(0, 0, 8)]))
        await p.transport.connect("d.r0", d.transport.describe())
        assert await p.landed(p.write("d.r0", [(0, 0, 8)]))


async def test_closing_with_work_in_flight(kind: str) -> None:
    async with pair(kind) as (p, d):
        ops = [p.write("d.r0", [(0, 0, REGION_BYTES)], notification=b"n") for _ in range(20)]
        reads = [d.read("p.r0", [(0, 0, REGION_BYTES)]) for _ in range(20)]
        await trio.lowlevel.checkpoint()
        await p.transport.aclose()
        assert sorted(event.op for event in p.events if isinstance(event, Ended)) == ops
        for op in reads:
            await d.ended(op)
        p.memory[:8] = b"still us"
        assert not await d.ended(d.read("p.r0", [(0, 0, 8)]))
        with pytest.raises(TransportError):
            await d.transport.connect("p.r0", p.transport.describe())


async def test_a_lost_peer_is_reported_on_both_sides_and_can_reconnect(kind: str) -> None:
    async with pair(kind) as (p, d):
        p.transport._lose(p.transport._links["d.r0"])
        await p.wait_for(PeerGone("d.r0"))
        await d.wait_for(PeerGone("p.r0"))
        assert not await d.ended(d.read("p.r0", [(0, 0, 8)]))
        await d.transport.connect("p.r0", p.transport.describe())
        await p.transport.connect("d.r0", d.transport.describe())
        p.memory[:8] = b"met anew"
        assert await d.ended(d.read("p.r0", [(0, 8, 8)]))
        assert await p.landed(p.write("d.r0", [(0, 16, 8)], notification=b"n"))
        assert bytes(d.memory[:24]) == bytes(8) + b"met anew" * 2
