"""What an engine and a store's node alike answer to whoever runs a cluster, over HTTP, behind the gate but for /health.

GET /health    200, to anybody
POST /stop     end when what is here is done
GET /metrics   for Prometheus
GET /state     for `pdflow top`
GET /notes     the latest of the diary
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

import msgspec

from pdflow_runtime.http.messages import JSON, HttpRequest
from pdflow_runtime.http.responder import Responder
from pdflow_runtime.nodes.ranked_node import RankedNode
from pdflow_runtime.observe.metrics import CONTENT_TYPE, Meter
from pdflow_runtime.observe.state import EngineState
from pdflow_runtime.security.signed import Gate


class ComponentApi(ABC):
    """Args: `gate` says whom to believe; `stop` ends this component when what it has is done."""

    def __init__(self, node: RankedNode, gate: Gate, stop: Callable[[], None]) -> None:
        self.gate: Final = gate
        self.stop: Final = stop
        self.meter: Final = Meter()
        self._event_log: Final = node.event_log
        node.measured_by(self.meter)

    @abstractmethod
    def state(self) -> EngineState:
        """What /state says."""

    async def operated(self, request: HttpRequest, responder: Responder) -> bool:
        """Whether that was all that was asked. OpenAIError for whoever is not believed."""
        if (request.method, request.path) == ("GET", "/health"):
            await responder.reply(200)
            return True
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
