"""One memory, two agents: what one has been given the other has, and each keeps out whom it was told to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from pdflow_runtime.transports.base import Fenced, TransportError
from pdflow_runtime.transports.joint import join
from pdflow_runtime.transports.tcp import TcpTransport
from tests.runtime.transports.agents import ALL, KINDS, Agent, agents, untouched

pytestmark = pytest.mark.trio


@pytest.fixture(params=ALL)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Joined(Agent):
    """In the memory of another."""

    def __init__(self, kind: str, name: str, owner: Agent) -> None:
        self.events = []
        self._news = trio.Event()
        self.transport = KINDS[kind](name, self._on_event)
        view = join(self.transport, owner.transport)
        self.memory = view if isinstance(owner.memory, memoryview) else owner.memory
        self._last_op = 0
        self._wrote_to = {}


@asynccontextmanager
async def joined(kind: str, name: str, owner: Agent) -> AsyncIterator[Joined]:
    agent = Joined(kind, name, owner)
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.transport.run)
        yield agent
        await agent.transport.aclose()


async def test_what_is_written_to_one_is_read_from_the_other(kind: str) -> None:
    three = agents(kind, "p.r0", "store.put.r0", "d.r0")
    async with three as (p, put, d), joined(kind, "store.get.r0", put) as get:
        await p.transport.connect("store.put.r0", put.transport.describe())
        await d.transport.connect("store.get.r0", get.transport.describe())
        p.memory[:100] = bytes(range(100))
        assert await p.landed(p.write("store.put.r0", [(0, 5000, 100)], notification=b"done"))
        assert get.events == []
        assert await d.ended(d.read("store.get.r0", [(5000, 300, 100)]))
        assert d.memory[300:400] == bytes(range(100))


async def test_a_fence_of_one_keeps_no_peer_of_the_other_out(kind: str) -> None:
    async with agents(kind, "p.r0", "store.put.r0") as (p, put), joined(kind, "store.get.r0", put) as get:
        for agent in (put, get):
            await p.transport.connect(agent.transport.me, agent.transport.describe())
        get.transport.fence("p.r0", 7)
        await get.wait_for(Fenced("p.r0"))
        assert not await p.landed(p.write("store.get.r0", [(0, 0, 8)], generation=7))
        assert untouched(put)
        p.memory[:8] = b"12345678"
        assert await p.landed(p.write("store.put.r0", [(0, 0, 8)], generation=7))
        assert bytes(get.memory[:8]) == b"12345678"


async def test_agents_of_two_kinds_have_no_memory_in_common() -> None:
    async with agents("shm", "a.r0") as (a,), agents("tcp", "b.r0") as (b,):
        with pytest.raises(TransportError, match="cannot share one memory between two agents"):
            join(b.transport, a.transport)


async def test_a_memory_is_given_back_once_by_each_agent_that_has_it() -> None:
    hidden: list[str] = []

    class Seen(TcpTransport):
        def _hide(self) -> None:
            hidden.append(self.me)

    agent = Seen("d.r0", lambda event: None)
    agent.allocate(4096)
    async with trio.open_nursery() as nursery:
        await nursery.start(agent.run)
        nursery.cancel_scope.cancel()
    await agent.aclose()
    assert hidden == ["d.r0"]
