"""The operator's HTTP API of an engine or a store's node; all but /health requires authentication by the gate
(/metrics does not where the supervisor made the secret).

GET /health    200, without authentication; an engine says how many steps it has run
POST /stop     end when what is here is done
GET /metrics   for Prometheus
GET /state     for `pdflow top`
GET /notes     the latest of the event log
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

import msgspec

from pdflow_runtime.http.messages import JSON, Headers, HttpRequest
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.nodes.ranked_node import RankedNode
from pdflow_runtime.observe.metrics import CONTENT_TYPE, Meter
from pdflow_runtime.observe.state import EngineState
from pdflow_runtime.security.signed import Gate


class ComponentApi(ABC):
    """The operator's API of one component. Args: `gate` authenticates requests; `stop` ends this component when what it
    has is done; `model` is the name of the model."""

    def __init__(self, node: RankedNode, gate: Gate, stop: Callable[[], None], model: str = "") -> None:
        self.gate: Final = gate
        self.stop: Final = stop
        self.meter: Final = Meter(model)
        self._event_log: Final = node.event_log
        node.measured_by(self.meter)

    @abstractmethod
    def state(self) -> EngineState:
        """Return the answer to /state."""

    def health(self) -> Headers:
        """Return what the answer to /health says besides."""
        return ()

    async def operated(self, request: HttpRequest, responder: Responder) -> bool:
        """Answer the request if it is one of this API; True if it was. OpenAIError for a request that the gate
        refuses."""
        if (request.method, request.path) == ("GET", "/health"):
            await responder.reply(200, self.health())
            return True
        if (request.method, request.path) == ("GET", "/metrics"):
            self.gate.check_reader(request)
        else:
            self.gate.check(request)
        match request.method, request.path:
            case "POST", "/stop":
                self.stop()
                await responder.reply(200, (JSON,), b"{}")
            case "GET", "/metrics":
                await responder.reply(200, ((b"content-type", CONTENT_TYPE),), self.meter.text())
            case "GET", "/state":
                await responder.reply(200, (JSON,), msgspec.json.encode(self.state()))
            case "GET", "/notes":
                await responder.reply(200, (JSON,), msgspec.json.encode(self._event_log.page()))
            case _:
                return False
        return True
