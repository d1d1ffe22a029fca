"""Live engines and the router before them in one process, and clients that ask over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import trio

from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_runtime.build import LiveBuilder
from pdflow_runtime.http.client import HttpClient
from pdflow_runtime.http.messages import JSON
from pdflow_runtime.nodes.decode_api import DecodeApi
from pdflow_runtime.nodes.engine_api import EngineApi
from pdflow_runtime.nodes.engine_node import LiveEngineNode
from pdflow_runtime.nodes.kv_params import Coordinates
from pdflow_runtime.nodes.models import ServedModel
from pdflow_runtime.nodes.prefill_api import PrefillApi
from pdflow_runtime.process.addresses import EngineAddress
from pdflow_runtime.router.admin import Admin
from pdflow_runtime.router.front import Front
from pdflow_runtime.router.router_node import LiveRouterNode
from pdflow_runtime.router.routing import governed_of, seats_of
from pdflow_runtime.security.signed import Gate
from pdflow_runtime.store.build import stores_of
from pdflow_runtime.transports.named import transport_named
from tests.runtime.http.world import LOCAL, serving
from tests.runtime.support.live_pair import LivePair, live_pair


class Fronted:
    """`alone` is the port of an engine that the router does not know: what it answers is right."""

    def __init__(self, home: LivePair, node: LiveRouterNode, port: int, alone: int, client: HttpClient) -> None:
        self.home = home
        self.node = node
        self.port = port
        self.alone = alone
        self.client = client

    async def ask(self, port: int, path: str, fields: dict[str, Any]) -> list[Any]:
        """The events of an answer, or all of it; without the name and the time of it, which are the same throughout."""
        body = msgspec.json.encode(fields)
        async with self.client.request("POST", LOCAL, port, path, (JSON,), body) as response:
            answer = await response.read()
        if not fields.get("stream"):
            events = [msgspec.json.decode(answer)]
        else:
            *lines, done, rest = answer.split(b"\n\n")
            assert (done, rest) == (b"data: [DONE]", b""), answer
            events = [msgspec.json.decode(line.removeprefix(b"data: ")) for line in lines]
        names = {(event.pop("id", None), event.pop("created", None)) for event in events}
        assert len(names) == 1, names
        return events

    async def same(self, path: str = "/v1/completions", **fields: Any) -> list[Any]:
        """As one engine alone answers. In a stream the router has engines name their token ids."""
        answer = await self.ask(self.port, path, fields)
        if fields.get("stream") and not fields.get("return_token_ids"):
            for event in answer:
                for choice in event["choices"]:
                    choice.pop("token_ids", None)
        assert answer == await self.ask(self.alone, path, fields), fields
        return answer


@asynccontextmanager
async def fronted(scenario: ResolvedScenario, model: ServedModel, transport: str = "shm") -> AsyncIterator[Fronted]:
    """One P and one D behind a router, as the scenario says, and one engine more."""
    method = scenario.transfer.method
    async with live_pair(scenario, model, transport) as home, AsyncExitStack() as stack:

        async def opened(make: type[EngineApi[Any]], node: LiveEngineNode) -> EngineAddress:
            ranks = Coordinates(LOCAL, node.port)
            api = make(node, model.prompts, method, ranks, Gate(None, node.name), lambda: None)
            server = await stack.enter_async_context(serving(api))
            return EngineAddress(node.name, Coordinates(LOCAL, server.port), ranks)

        engines: list[tuple[type[EngineApi[Any]], LiveEngineNode]] = [(PrefillApi, home.p)]
        engines += [(DecodeApi, home.d), (DecodeApi, home.alone)]
        addresses = [await opened(make, node) for make, node in engines]
        builder = LiveBuilder(scenario, transport_named(transport))
        prefill, decode = (
            [builder.info_of(name) for name in seats_of(scenario, role)] for role in ("prefill", "decode")
        )
        client = HttpClient()
        returns_first_token = scenario.router.first_token == "prefill"
        stores = stores_of(scenario)
        node_args = (governed_of(builder), prefill, decode, method, client)
        node = LiveRouterNode(*node_args, stores=stores, returns_first_token=returns_first_token)
        for address in addresses[:2]:
            node.members.apply_report(address)
        if home.store is not None:
            node.members.apply_report(EngineAddress(stores[0], home.store_at, Coordinates(LOCAL, home.store.port)))
        front = Front(node, model.prompts, Admin(node, [], None), Gate(None, "router"))
        server = await stack.enter_async_context(serving(front))
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(node.run)
                yield Fronted(home, node, server.port, addresses[2].http.port, client)
                nursery.cancel_scope.cancel()
        finally:
            client.close()
