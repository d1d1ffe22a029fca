"""What whoever runs the cluster may ask of the router: how it stands, and that an engine get no new requests.

GET  /admin/state                    every engine: its pool, its streams, its requests with their states
GET  /admin/notes                    what each part has noted of late: stages, steps, transfers (`diary.py`)
POST /admin/engines/NAME/drain       it gets nothing new; what it has goes on
POST /admin/engines/NAME/resume      it does again
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import trio

from pdflow.routing.router import EngineChanged
from runtime.http.errors import OpenAIError, UpstreamError
from runtime.http.messages import JSON, Request
from runtime.http.responder import Responder
from runtime.places import EnginePlace
from runtime.router_node import RouterNode

ANSWER_S: Final = 2.0
"""For an engine to say how it stands."""


class Admin:
    def __init__(self, node: RouterNode) -> None:
        self.node: Final = node

    async def __call__(self, request: Request, responder: Responder) -> None:
        match request.method, request.path.split("/")[2:]:
            case "GET", ["state"]:
                body = msgspec.json.encode(await self.state())
            case "GET", ["notes"]:
                told = [page for page in (await self._ask("/notes")).values() if page is not None]
                body = msgspec.json.encode([self.node.diary.page(), *told])
            case "POST", ["engines", name, "drain" | "resume" as what]:
                self.change(name, what == "resume")
                body = b"{}"
            case _:
                raise OpenAIError(404, f"there is no {request.method} {request.path} here")
        await responder.reply(200, (JSON,), body)

    def change(self, name: str, up: bool) -> None:
        if name not in {info.engine for info in (*self.node.prefill, *self.node.decode)}:
            raise OpenAIError(404, f"there is no engine {name}")
        (self.node.drained.discard if up else self.node.drained.add)(name)
        if name in self.node.places:
            self.node.put(self.node.port, EngineChanged(name, up))

    async def state(self) -> dict[str, Any]:
        """Engines that do not answer have None."""
        engines = await self._ask("/state")
        return {"open": len(self.node.calls), "drained": sorted(self.node.drained), "engines": engines}

    async def _ask(self, path: str) -> dict[str, Any]:
        """Every engine, by its name, what it answers there."""
        found: dict[str, Any] = {info.engine: None for info in (*self.node.prefill, *self.node.decode)}

        async def ask(name: str, place: EnginePlace) -> None:
            http = place.http
            try:
                with trio.move_on_after(ANSWER_S):
                    async with self.node.client.request("GET", http.host, http.port, path) as response:
                        found[name] = msgspec.Raw(await response.read())
            except UpstreamError:
                pass

        async with trio.open_nursery() as nursery:
            for name, place in self.node.places.items():
                nursery.start_soon(ask, name, place)
        return found
