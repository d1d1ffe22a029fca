"""The spans of an engine: one for each leg of a sampled trace, and below it one for each stage that the engine measures
and for each transfer operation.

An engine's span begins when the engine has the leg, and ends when the engine has nothing of it any more: at P when the
KV is released. Its parent is the router's span of the leg. Stages come from the node (`RankedNode.stage`), all other
times from the notes of the event log: nothing is measured for traces alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from pdflow.protocol.messages import Code
from pdflow.protocol.values import Instant, RequestId
from pdflow_runtime.http.messages import Headers
from pdflow_runtime.observe.event_log import TOKEN, EventLog, Generated, Moved, Noted, Passed
from pdflow_runtime.observe.spans import Spans


class EngineTraces:
    """The spans of one engine. Args: `role`: prefill or decode; `event_log`: its notes are read from now
    on, in addition to what reads them already."""

    def __init__(self, spans: Spans, engine: str, role: str, event_log: EventLog) -> None:
        self.spans: Final = spans
        self.engine: Final = engine
        self.role: Final = role
        self._open: Final[dict[RequestId, _OpenLeg]] = {}
        self._write: Final = event_log.write
        event_log.write = self._noted

    def begin(self, request_id: RequestId, headers: Headers, begun_ns: Instant) -> None:
        """Begin the span of a leg, whose request has these headers. Nothing is recorded unless they name a span that is
        sampled."""
        offset_ns = self.spans.offset_ns()
        attributes = {"pdflow.engine": self.engine, "pdflow.attempt": request_id}
        span = self.spans.begin(f"{self.role} engine", "SERVER", begun_ns + offset_ns, headers, attributes)
        if span.is_recording():
            self._open[request_id] = _OpenLeg(span, offset_ns)

    def stage(self, request_id: RequestId, name: str, begun_ns: Instant, ended_ns: Instant) -> None:
        """Add a stage that has ended."""
        leg = self._open.get(request_id)
        if leg is not None:
            self.spans.add(name, leg.span, begun_ns + leg.offset_ns, ended_ns + leg.offset_ns)

    def alone(self, request_id: RequestId, begun_ns: Instant, stages_ns: Mapping[str, int]) -> None:
        """Add the stages of a decode engine that has computed the prompt itself, which follow each other."""
        for name, lasted_ns in stages_ns.items():
            self.stage(request_id, name, begun_ns, begun_ns + lasted_ns)
            begun_ns += lasted_ns

    def ended(self, request_id: RequestId, code: Code, at: Instant) -> None:
        """End the span of a leg of which nothing is left here."""
        leg = self._open.pop(request_id, None)
        if leg is not None:
            if code is not Code.NONE:
                self.spans.failed(leg.span, code.name.lower())
            leg.span.end(at + leg.offset_ns)

    def _noted(self, noted: Noted) -> None:
        if self._write is not None:
            self._write(noted)
        match noted:
            case Moved(request_id=request_id) if (leg := self._open.get(request_id)) is not None:
                self._moved(leg, noted)
            case Passed(request_id=request_id, stage=stage) if stage == TOKEN and request_id in self._open:
                self._open[request_id] = self._open[request_id]._replace(token_ns=noted.t)
            case Generated(request_id=request_id) if (leg := self._open.get(request_id)) is not None:
                if leg.token_ns and self.role == "decode":
                    begun, ended = leg.token_ns + leg.offset_ns, noted.t + leg.offset_ns
                    self.spans.add("decode", leg.span, begun, ended, {"gen_ai.usage.output_tokens": noted.tokens})
            case _:
                pass

    def _moved(self, leg: _OpenLeg, noted: Moved) -> None:
        begun = noted.t + leg.offset_ns
        posted = begun + noted.posting_ns
        attributes = {"pdflow.bytes": noted.nbytes, "pdflow.descriptors": noted.descriptors}
        self.spans.add("xfer_post", leg.span, begun, posted, attributes)
        self.spans.add("xfer_wire", leg.span, posted, begun + noted.whole_ns, attributes)


class _OpenLeg(NamedTuple):
    span: Any
    offset_ns: int
    token_ns: Instant = 0
    """When the engine had the first token of its answer; 0: not yet."""
