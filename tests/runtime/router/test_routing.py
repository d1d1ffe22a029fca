"""What the live router tells its endpoint of a request, and that prompts go to who has their beginning. In one process:
engines take requests and never answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import trio

from pdflow.errors import ScenarioError
from pdflow.routing.effects import DispatchPrefill
from pdflow.routing.events import NO_SESSION, RequestArrived
from pdflow.scenario import ResolvedScenario, load
from pdflow.scenario.schema.scenario import MeasuredCost
from pdflow_runtime.build import LiveBuilder, refuse_what_is_not_served
from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.messages import JSON, Header, HttpRequest
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.nodes.kv_params import Coordinates
from pdflow_runtime.nodes.models import open_prompts
from pdflow_runtime.process.addresses import EngineAddress
from pdflow_runtime.router.admin import Admin
from pdflow_runtime.router.front import Front
from pdflow_runtime.router.router_node import LiveRouterNode
from pdflow_runtime.router.routing import governed_of, seats_of
from pdflow_runtime.security.signed import Gate
from pdflow_runtime.transports.named import transport_named
from tests.runtime.http.world import LOCAL, serving
from tests.runtime.support.live_pair import prompt

WIRED = Path(__file__).parents[2] / "wiring/wired.toml"


def scenario(*overrides: str) -> ResolvedScenario:
    resolved = load(WIRED, overrides=overrides)
    refuse_what_is_not_served(resolved)
    return resolved


class Asked:
    """A router that clients ask, and what its endpoint heard and answered."""

    def __init__(self, node: LiveRouterNode, port: int) -> None:
        self.node = node
        self.port = port
        self.arrivals: list[RequestArrived] = []
        self.prefills: list[int] = []
        node.observe = self.observe

    def observe(self, address: str, event: Any, effects: tuple[Any, ...], now: int) -> None:
        if type(event) is RequestArrived:
            self.arrivals.append(event)
        self.prefills += [effect.engine for effect in effects if type(effect) is DispatchPrefill]

    async def ask(self, tokens: list[int], *headers: Header, task_status: Any = None, **fields: Any) -> None:
        """Until somebody hangs up."""
        body = msgspec.json.encode({"prompt": tokens, "max_tokens": 4, **fields})
        before = len(self.arrivals)

        async def asks() -> None:
            async with self.node.client.request(
                "POST", LOCAL, self.port, "/v1/completions", (JSON, *headers), body
            ) as response:
                raise AssertionError(response.status)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(asks)
            while len(self.arrivals) == before:
                await trio.sleep(0.001)
            if task_status is not None:
                task_status.started()
                await trio.sleep_forever()
            nursery.cancel_scope.cancel()
        while self.node.calls:
            await trio.sleep(0.001)


@asynccontextmanager
async def asked(resolved: ResolvedScenario) -> AsyncIterator[Asked]:
    async def silent(request: HttpRequest, responder: Responder) -> None:
        await trio.sleep_forever()

    builder = LiveBuilder(resolved, transport_named("shm"))
    prefill, decode = ([builder.info_of(name) for name in seats_of(resolved, role)] for role in ("prefill", "decode"))
    client = HttpClient()
    node = LiveRouterNode(governed_of(builder), prefill, decode, resolved.transfer.method, client)
    front = Front(node, open_prompts(resolved), Admin(node, [], None), Gate(None, "router"))
    with trio.fail_after(20):
        async with serving(silent) as engine, serving(front) as server:
            at = Coordinates(LOCAL, engine.port)
            for info in (*prefill, *decode):
                node.members.apply_report(EngineAddress(info.engine, at, at))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(node.run)
                yield Asked(node, server.port)
                nursery.cancel_scope.cancel()
    client.close()


@pytest.mark.trio
async def test_a_prompt_goes_where_its_beginning_is() -> None:
    first, second = prompt(300, 1), prompt(300, 2)
    async with asked(scenario("router.policy=prefix-aware")) as router:
        async with trio.open_nursery() as nursery:
            await nursery.start(router.ask, first)
            await nursery.start(router.ask, second)
            nursery.cancel_scope.cancel()
        while router.node.calls:
            await trio.sleep(0.001)
        await router.ask(second + prompt(100, 3))
        await router.ask(first + prompt(100, 3))
        await router.ask(second[:200])
        await router.ask(prompt(300, 4))
    assert router.prefills == [0, 1, 1, 0, 1, 0]
    names = [arrival.prefix for arrival in router.arrivals]
    assert [len(of_one) for of_one in names] == [4, 4, 6, 6, 3, 4]
    assert names[2][:4] == names[1]
    assert not set(names[0]) & set(names[1])
    assert [arrival.prompt_tokens for arrival in router.arrivals] == [300, 300, 400, 400, 200, 300]


@pytest.mark.trio
async def test_prefixes_are_named_where_somebody_looks() -> None:
    async with asked(scenario("router.decode_policy=least-loaded")) as router:
        await router.ask(prompt(300, 1))
    assert [arrival.prefix for arrival in router.arrivals] == [()]
    async with asked(scenario("router.decode_policy=prefix-aware")) as router:
        await router.ask(prompt(300, 1))
    assert len(router.arrivals[0].prefix) == 4


@pytest.mark.trio
async def test_a_session_is_read_from_the_header_or_the_user_field() -> None:
    async with asked(scenario("router.policy=session-affinity")) as router:
        for header in (b"a", b"b", b"a"):
            await router.ask(prompt(20, 1), (b"x-session-id", header))
        await router.ask(prompt(20, 1), (b"x-session-id", b"a"), user="someone")
        for user in ("someone", "someone else", "someone"):
            await router.ask(prompt(20, 1), user=user)
        await router.ask(prompt(20, 1))
        await router.ask(prompt(20, 1), user="")
    sessions = [arrival.session for arrival in router.arrivals]
    a, b, again, named, one, other, same, *none = sessions
    assert a == again == named
    assert one == same
    assert len({a, b, one, other, NO_SESSION}) == 5
    assert none == [NO_SESSION] * 2


def test_what_steps_take_is_not_weighed_where_nobody_has_measured_it() -> None:
    """Synthetic engines take what the scenario says; those that compute take what they take."""
    resolved = scenario("router.disaggregate_above_tokens=auto")
    torch = attrs.evolve(resolved, pools=tuple(attrs.evolve(pool, engine="torch") for pool in resolved.pools))
    with pytest.raises(ScenarioError, match="pool p has not been measured: serve without this key, run `pdflow calib"):
        refuse_what_is_not_served(torch)
    measured = tuple(attrs.evolve(pool, cost=MeasuredCost(path="cost.json")) for pool in torch.pools)
    refuse_what_is_not_served(attrs.evolve(torch, pools=measured))
