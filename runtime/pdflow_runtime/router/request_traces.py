"""The router's spans: one for each request to a model, and below it one for each leg of its attempts.

The request's span joins the trace that the client's `traceparent` names. Engines get the span of the leg as their
parent. The instants are those of the access log and of the legs' tasks. Names of attributes are OpenTelemetry's
conventions for HTTP and for generative AI where these have any, else they begin with `pdflow.`
"""

from __future__ import annotations

from typing import Any, Final

from pdflow.protocol.messages import Code
from pdflow.protocol.values import Instant, RequestId
from pdflow_runtime.clock import now_ns
from pdflow_runtime.http.ended import EndedRequest
from pdflow_runtime.http.messages import Headers, HttpRequest
from pdflow_runtime.observe.access_log import safe
from pdflow_runtime.observe.spans import TRACE_HEADERS, Attributes, Spans
from pdflow_runtime.process.addresses import EngineAddress
from pdflow_runtime.router.call_record import CallRecord

OPERATIONS: Final = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}
"""The paths whose requests have spans."""
CANCELLED: Final = "cancelled"


class RequestTraces:
    """The spans of all requests of a router. Args: `model`: the name of the model."""

    def __init__(self, spans: Spans, model: str) -> None:
        self.spans: Final = spans
        self.model: Final = model

    def begin(self, request: HttpRequest, begun_ns: Instant) -> RequestTrace | None:
        """Begin the span of a request; None if it is for no model."""
        operation = OPERATIONS.get(request.path)
        if operation is None or request.method != "POST":
            return None
        attributes = {
            "http.request.method": request.method,
            "http.route": request.path,
            "url.path": request.path,
            "url.scheme": "http",
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "pdflow",
            "gen_ai.request.model": self.model,
        }
        offset_ns = self.spans.offset_ns()
        name = f"{request.method} {request.path}"
        span = self.spans.begin(name, "SERVER", begun_ns + offset_ns, request.headers, attributes)
        return RequestTrace(self.spans, span, offset_ns)


class RequestTrace:
    """The spans of one request."""

    def __init__(self, spans: Spans, span: Any, offset_ns: int) -> None:
        self.spans: Final = spans
        self.span: Final = span
        self.offset_ns: Final = offset_ns

    def leg(self, role: str, request_id: RequestId, address: EngineAddress) -> LegTrace:
        """Begin the span of a leg, which is about to be sent. A request that is not sampled has one span, of which
        engines learn that it is not."""
        if not self.span.is_recording():
            return LegTrace(self, self.span)
        attributes: Attributes = {
            "pdflow.attempt": request_id,
            "pdflow.engine": address.engine,
            "server.address": address.http.host,
            "server.port": address.http.port,
        }
        span = self.spans.begin(f"{role} leg", "CLIENT", now_ns() + self.offset_ns, self.span, attributes)
        return LegTrace(self, span)

    def end(self, ended: EndedRequest) -> None:
        """End the span of a request that has been answered or refused."""
        record, span = ended.details, self.span
        span.set_attribute("client.address", safe(ended.client))
        if ended.given_id:
            span.set_attribute("pdflow.client_request_id", safe(ended.given_id))
        if ended.status:
            span.set_attribute("http.response.status_code", ended.status)
        if isinstance(record, CallRecord):
            self._end_call(record)
        elif ended.status >= 500:
            self.spans.failed(span, str(ended.status))
        span.end(ended.ended_ns + self.offset_ns)

    def _end_call(self, record: CallRecord) -> None:
        span = self.span
        if record.first_ns:
            span.add_event("first_token", timestamp=record.first_ns + self.offset_ns)
        span.set_attributes(
            {
                "pdflow.request": str(record.number),
                "pdflow.outcome": record.outcome,
                "pdflow.attempts": record.attempts,
                "pdflow.resumed": record.resumed,
                "pdflow.prefill": record.prefill,
                "pdflow.decode": record.decode,
                "gen_ai.usage.input_tokens": record.prompt_tokens,
                "gen_ai.usage.output_tokens": record.answer.tokens,
            }
        )
        if record.answer.reason:
            span.set_attribute("gen_ai.response.finish_reasons", [record.answer.reason])
        if record.outcome == "failed":
            self.spans.failed(span, record.code)


class LegTrace:
    """The span of one leg."""

    def __init__(self, trace: RequestTrace, span: Any) -> None:
        self.trace: Final = trace
        self.span: Final = span
        self.headers: Final = trace.spans.headers_of(span)

    def end(self, code: Code | None, resumes: bool) -> None:
        """End the span. Args: `code`: how the leg ended; None: it was cancelled; `resumes`: whether it has continued
        the answer of another."""
        name = CANCELLED if code is None else code.name.lower()
        self.span.set_attribute("pdflow.code", name)
        if resumes:
            self.span.set_attribute("pdflow.resumes", True)
        if code is not None and code is not Code.NONE:
            self.trace.spans.failed(self.span, name)
        self.span.end(now_ns() + self.trace.offset_ns)


def trace_of(ended: EndedRequest) -> RequestTrace | None:
    """Return the spans of a request, if it has any."""
    details = ended.details.trace if isinstance(ended.details, CallRecord) else ended.details
    return details if isinstance(details, RequestTrace) else None


def without_trace(headers: Headers) -> Headers:
    """Return the headers without those that name a parent."""
    return tuple(header for header in headers if header[0] not in TRACE_HEADERS)
