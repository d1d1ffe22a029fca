"""The checks of engines: which have sent anything, and which respond when they are asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from pdflow.protocol.ids import EngineInfo, Shards
from pdflow.protocol.values import S
from pdflow.routing.effects import AskEngine
from pdflow.routing.events import EnginesChecked, RequestArrived
from pdflow.routing.governed import Rules
from pdflow.routing.policy import Choice
from pdflow.routing.stalls import LEAST, StallRule
from pdflow.routing.watching import WatchingRouter
from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.messages import STEPS, HttpRequest
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.nodes.kv_params import Coordinates
from pdflow_runtime.process.addresses import EngineAddress
from pdflow_runtime.router.engine_checks import EngineChecks
from tests.runtime.http.world import LOCAL, serving


class World:
    """A router with one request, and the checks of it. Every engine's address is that of one server."""

    def __init__(self, port: int) -> None:
        shards = Shards(1, 1, 16)
        prefill, decode = (EngineInfo("p-0", shards), EngineInfo("p-1", shards)), (EngineInfo("d-0", shards),)
        choices = Choice("round-robin", 2), Choice("round-robin", 1)
        router = WatchingRouter(prefill, decode, "sequential", choices, Rules(stall=StallRule(S // 20)))
        router.handle(RequestArrived(0), 0)
        at = Coordinates(LOCAL, port)
        self.checked: list[EnginesChecked] = []
        addresses = {"p-0": EngineAddress("p-0", at, at)}
        self.client = HttpClient()
        self.checks = EngineChecks(router, self.checked.append, {}, self.client, addresses)

    async def next_check(self) -> EnginesChecked:
        before = len(self.checked)
        with trio.fail_after(10):
            while len(self.checked) == before:
                await trio.sleep(0.005)
        return self.checked[before]

    @asynccontextmanager
    async def checking(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.checks.run)
            await self.next_check()
            yield
            nursery.cancel_scope.cancel()
        self.client.close()


@pytest.mark.trio
@pytest.mark.parametrize("status", [200, 404, 503])
async def test_any_answer_is_a_response_once(status: int) -> None:
    paths: list[str] = []

    async def answer(request: HttpRequest, responder: Responder) -> None:
        paths.append(request.path)
        await responder.reply(status)

    async with serving(answer) as server:
        world = World(server.port)
        async with world.checking():
            world.checks.ask(AskEngine("p-0"))
            world.checks.ask(AskEngine("p-1"))
            while not (await world.next_check()).responding:
                pass
            await world.next_check()
    assert [event.responding for event in world.checked if event.responding] == [("p-0",)]
    assert not world.checked[-1].responding
    assert paths == ["/health"]


@pytest.mark.trio
async def test_an_engine_is_asked_one_question_at_a_time() -> None:
    """One that does not respond is asked again after the limit: its host may have lost the connection."""
    asked = 0

    async def hang(request: HttpRequest, responder: Responder) -> None:
        nonlocal asked
        asked += 1
        await trio.sleep_forever()

    async with serving(hang) as server:
        world = World(server.port)
        async with world.checking():
            while asked < 3:
                world.checks.ask(AskEngine("p-0"))
                await world.next_check()
    assert len(world.checked) > 2 * LEAST
    assert not any(event.responding for event in world.checked)


@pytest.mark.trio
async def test_an_engine_whose_port_is_closed_is_not_stopped() -> None:
    """It drains, and finishes the answers that it owes."""
    async with serving(lambda request, responder: responder.reply(200)) as server:
        port = server.port
    world = World(port)
    async with world.checking():
        for _ in range(3):
            world.checks.ask(AskEngine("p-0"))
            await world.next_check()
    assert any(event.responding for event in world.checked)


@pytest.mark.trio
async def test_an_engine_that_runs_no_step_between_two_answers_is_idle() -> None:
    numbers = iter([b"5", b"5", b"6", None, b"6", b"7"])

    async def answer(request: HttpRequest, responder: Responder) -> None:
        steps = next(numbers)
        await responder.reply(200, () if steps is None else ((STEPS, steps),))

    async with serving(answer) as server:
        world = World(server.port)
        async with world.checking():
            for answered in range(1, 7):
                world.checks.ask(AskEngine("p-0"))
                while sum(len(event.responding) for event in world.checked) < answered:
                    await world.next_check()
    assert [event.idle for event in world.checked if event.responding] == [(), ("p-0",), (), (), ("p-0",), ()]
