"""A peer's process dies, or stands still, in the middle of everything."""

from __future__ import annotations

import signal

import pytest
import trio
import trio.testing

from pdflow_runtime.transports.base import Ended, Fenced, NotificationArrived, PeerGone
from tests.runtime.transports.agents import ALL, REGION_BYTES, Agent, Child, agents, child, untouched

pytestmark = pytest.mark.trio


@pytest.fixture(params=ALL)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_a_writer_that_is_killed_is_gone_and_nothing_of_it_lands(kind: str) -> None:
    async with agents(kind, "d.r0") as (d,):
        with child(kind, "p.r0", d.transport.describe().hex()) as p:
            await d.wait_for(NotificationArrived("p.r0", b"whole"))
            p.send_signal(signal.SIGKILL)
            await d.wait_for(PeerGone("p.r0"))
            d.memory[:] = bytes(REGION_BYTES)
            seen = len(d.events)
            await trio.testing.wait_all_tasks_blocked()
            assert untouched(d)
            assert len(d.events) == seen


async def test_every_notification_of_a_killed_writer_is_behind_its_bytes(kind: str) -> None:
    async with agents(kind, "d.r0") as (d,):
        with child(kind, "p.r0", d.transport.describe().hex()) as p:
            while not d.memory[0]:
                await trio.lowlevel.checkpoint()
            p.send_signal(signal.SIGKILL)
            await d.wait_for(PeerGone("p.r0"))
            assert not d.notifications() or all(d.memory)


async def test_a_target_that_is_killed_ends_every_write(kind: str) -> None:
    async with agents(kind, "p.r0") as (p,):
        with child(kind, "d.r0") as d:
            await p.transport.connect("d.r0", d.description)
            ops = [p.write("d.r0", [(0, 0, REGION_BYTES)]) for _ in range(20)]
            await p.ended(ops[0])
            d.send_signal(signal.SIGKILL)
            p.transport.fence("d.r0", 1)
            await p.wait_for(Fenced("d.r0"))
            assert sorted(event.op for event in p.events if isinstance(event, Ended)) == ops
            assert not await p.landed(p.write("d.r0", [(0, 0, 8)]))


async def test_a_killed_target_is_reported_without_a_fence(kind: str) -> None:
    async with agents(kind, "p.r0") as (p,):
        with child(kind, "d.r0") as d:
            await p.transport.connect("d.r0", d.description)
            ops = [p.write("d.r0", [(0, 0, REGION_BYTES)]) for _ in range(20)]
            d.send_signal(signal.SIGKILL)
            await p.wait_for(PeerGone("d.r0"))
            assert sorted(event.op for event in p.events if isinstance(event, Ended)) == ops


async def test_reads_of_a_killed_peer_end(kind: str) -> None:
    async with agents(kind, "d.r0") as (d,):
        with child(kind, "p.r0") as p:
            await d.transport.connect("p.r0", p.description)
            ops = [d.read("p.r0", [(0, 0, REGION_BYTES)]) for _ in range(20)]
            await d.ended(ops[0])
            p.send_signal(signal.SIGKILL)
            await d.wait_for(PeerGone("p.r0"))
            assert [event.op for event in d.events if isinstance(event, Ended)] == ops
            d.memory[:] = bytes(REGION_BYTES)
            assert not await d.ended(d.read("p.r0", [(0, 0, 8)]))
            assert untouched(d)


async def test_a_writer_s_fence_waits_for_a_target_that_stands_still(kind: str) -> None:
    async with agents(kind, "p.r0") as (p,):
        with child(kind, "d.r0") as d:
            await p.transport.connect("d.r0", d.description)
            d.send_signal(signal.SIGSTOP)
            op = p.write("d.r0", [(0, 0, REGION_BYTES)])
            await trio.testing.wait_all_tasks_blocked()
            p.transport.fence("d.r0", 1)
            await trio.testing.wait_all_tasks_blocked()
            assert p.events == [Ended(op, True)] * p.done_is_local
            d.send_signal(signal.SIGCONT)
            await p.wait_for(Fenced("d.r0"))
            assert [event.op for event in p.events if isinstance(event, Ended)] == [op]


async def test_proof_of_death_ends_a_fence_that_waits(kind: str) -> None:
    async with agents(kind, "p.r0") as (p,):
        with child(kind, "d.r0") as d:
            await p.transport.connect("d.r0", d.description)
            d.send_signal(signal.SIGSTOP)
            p.write("d.r0", [(0, 0, REGION_BYTES)])
            p.transport.fence("d.r0", 1)
            p.transport.forget("d.r0")
            assert p.events == [Ended(1, p.done_is_local), Fenced("d.r0")]


async def fenced(d: Agent, p: Child, kind: str) -> None:
    """Wait for the fence. Over NIXL it waits for a READ that has begun, and UCX may need the stopped peer for the rest
    of its bytes: seen once, on a machine that was overloaded. Then the peer goes on."""
    if kind.startswith("nixl"):
        with trio.move_on_after(10):
            await d.wait_for(Fenced("p.r0"))
            return
        p.send_signal(signal.SIGCONT)
    await d.wait_for(Fenced("p.r0"))


async def test_a_writer_that_wakes_up_behind_a_fence_changes_nothing(kind: str) -> None:
    """H6: it had checked its lease, and was paused before it wrote."""
    async with agents(kind, "d.r0") as (d,):
        with child(kind, "p.r0", d.transport.describe().hex()) as p:
            await d.wait_for(NotificationArrived("p.r0", b"whole"))
            p.send_signal(signal.SIGSTOP)
            d.transport.fence("p.r0", 1)
            await fenced(d, p, kind)
            d.memory[:] = bytes(REGION_BYTES)
            seen = len(d.notifications())
            p.send_signal(signal.SIGCONT)
            assert await trio.to_thread.run_sync(p.next_message) == "refused"
            assert untouched(d)
            assert len(d.notifications()) == seen
