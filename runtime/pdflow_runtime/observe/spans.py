"""OpenTelemetry spans of one process ([serve] traces): made from instants that were recorded anyway, and exported by a
thread of the SDK, to a file or to a collector (OTLP over HTTP).

What the spans of a request are is decided by the router (`router/request_traces.py`) and by engines
(`engine_traces.py`). Serving never waits for the export: the SDK's queue is bounded, and what does not fit, or cannot
be delivered, is lost. This is the only module that imports the SDK, and only if traces are on. OTEL_* variables that
the SDK reads, such as OTEL_TRACES_SAMPLER, OTEL_RESOURCE_ATTRIBUTES and OTEL_BSP_*, apply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import trio

from pdflow.errors import MissingBackendError, Problem, ScenarioError
from pdflow.protocol.values import S
from pdflow.scenario.reading.paths import is_traces_file
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow.version import version
from pdflow_runtime.clock import now_ns, wall_offset_ns
from pdflow_runtime.http.messages import Headers
from pdflow_runtime.observe.span_files import SpanFile

log = logging.getLogger(__name__)

INSTALL: Final = "pip install 'pdflow[otel]'"
LAST_S: Final = 1.0
"""Time for the last spans, when the process ends."""
OFFSET_S: Final = 10
"""Age at which the distance between this process's clock and the wall's is measured again."""
OTLP_PATH: Final = "/v1/traces"
TRACE_HEADERS: Final = (b"traceparent", b"tracestate")
"""W3C Trace Context."""
ERRORS_OF_SDK: Final = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal")
"""Loggers that report each batch that was not delivered; pdflow reports the first one."""

Kind: TypeAlias = Literal["SERVER", "CLIENT", "INTERNAL"]
Attributes: TypeAlias = Mapping[str, str | bool | int | float | Sequence[str]]


def check_traces(scenario: ResolvedScenario) -> None:
    """Check that traces can be exported as [serve] says, before any process is started. ScenarioError,
    MissingBackendError."""
    target = scenario.serve.traces
    if target != "off":
        _sdk()
        if is_traces_file(target):
            _file_at(scenario).close()


class Spans:
    """Makes and exports the spans of one process. Args: `name`: of the process; `export`: gets each batch of spans in a
    thread, and raises OSError if it is lost; `target`: for people; `follows`: only spans whose parent is sampled are
    exported, as in engines: the router decides."""

    def __init__(self, name: str, export: Callable[[Sequence[Any]], None], target: str, follows: bool) -> None:
        trace, resources = import_module("opentelemetry.sdk.trace"), import_module("opentelemetry.sdk.resources")
        exporting = import_module("opentelemetry.sdk.trace.export")
        sampling = import_module("opentelemetry.sdk.trace.sampling")
        self._api: Final = import_module("opentelemetry.trace")
        propagation = import_module("opentelemetry.trace.propagation.tracecontext")
        self._propagator: Final = propagation.TraceContextTextMapPropagator()
        self._no_context: Final = import_module("opentelemetry.context").Context()
        resource = resources.Resource.create({"service.name": "pdflow", "service.instance.id": name})
        self._provider: Final = trace.TracerProvider(
            sampler=sampling.ParentBased(sampling.ALWAYS_OFF) if follows else None,
            # An operator's variables take precedence: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES.
            resource=resource.merge(resources.OTELResourceDetector().detect()),
            shutdown_on_exit=False,
        )
        processor = exporting.BatchSpanProcessor(_Exporter(export, target, exporting.SpanExportResult))
        self._provider.add_span_processor(processor)
        self._tracer: Final = self._provider.get_tracer("pdflow", version())
        self._offset_ns = wall_offset_ns()
        self._measured_ns = now_ns()

    def offset_ns(self) -> int:
        """Return what must be added to an instant to get the wall clock's time. A request's spans share it."""
        now = now_ns()
        if now - self._measured_ns > OFFSET_S * S:
            self._offset_ns, self._measured_ns = wall_offset_ns(), now
        return self._offset_ns

    def begin(
        self, name: str, kind: Kind, begun_ns: int, parent: Any | Headers, attributes: Attributes | None = None
    ) -> Any:
        """Begin a span. Args: `begun_ns`: by the wall's clock, as all times here; `parent`: a span, or the headers that
        name one; without a valid one, a trace begins."""
        return self._tracer.start_span(
            name,
            context=self._context(parent) if isinstance(parent, tuple) else self._api.set_span_in_context(parent),
            kind=self._api.SpanKind[kind],
            attributes=attributes,
            start_time=begun_ns,
        )

    def add(self, name: str, parent: Any, begun_ns: int, ended_ns: int, attributes: Attributes | None = None) -> None:
        """Add a span that has ended."""
        self.begin(name, "INTERNAL", begun_ns, parent, attributes).end(ended_ns)

    def failed(self, span: Any, code: str) -> None:
        """Mark the span as failed, with this code."""
        span.set_attribute("error.type", code)
        span.set_status(self._api.Status(self._api.StatusCode.ERROR, code))

    def headers_of(self, span: Any) -> Headers:
        """Return the headers that name this span as the parent."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=self._api.set_span_in_context(span, self._no_context))
        return tuple((name.encode(), value.encode("ascii", "replace")) for name, value in carrier.items())

    def _context(self, headers: Headers) -> Any:
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers if name in TRACE_HEADERS}
        return self._propagator.extract(carrier, context=self._no_context)

    async def run(self) -> None:
        """Wait until cancelled, and then export what is left."""
        try:
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(LAST_S, shield=True):
                await trio.to_thread.run_sync(self._provider.force_flush, abandon_on_cancel=True)


class _Exporter:
    """What the SDK's thread calls. It logs the first of several batches that are lost."""

    def __init__(self, export: Callable[[Sequence[Any]], None], target: str, results: Any) -> None:
        self._export: Final = export
        self._target: Final = target
        self._results: Final = results
        self._failed = False

    def export(self, spans: Sequence[Any]) -> Any:
        try:
            self._export(spans)
        except OSError as error:
            if not self._failed:
                log.warning("spans cannot be exported to %s, and are lost: %s", self._target, error.strerror or error)
            self._failed = True
            return self._results.FAILURE
        self._failed = False
        return self._results.SUCCESS

    def shutdown(self) -> None:
        """Nothing is to be closed before the process ends."""


def spans_of(scenario: ResolvedScenario, name: str, follows: bool) -> Spans | None:
    """Return what makes the spans of this process; None if traces are off. ScenarioError, MissingBackendError."""
    target = scenario.serve.traces
    if target == "off":
        return None
    sdk_exporter = _sdk()
    for logger in ERRORS_OF_SDK:
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    export: Callable[[Sequence[Any]], None]
    if is_traces_file(target):
        export = _file_at(scenario).write
    else:
        export = partial(_send, sdk_exporter.OTLPSpanExporter(endpoint=endpoint_of(target)))
    return Spans(name, export, target, follows)


def endpoint_of(url: str) -> str:
    """Return where spans are sent: OTLP's own path, unless the URL has one."""
    has_path = "/" in url.partition("://")[2].rstrip("/")
    return url if has_path else url.rstrip("/") + OTLP_PATH


def _send(exporter: Any, spans: Sequence[Any]) -> None:
    """Send a batch to a collector. OSError."""
    reason = "the collector does not take them"
    result = None
    with suppress(OSError):
        result = exporter.export(spans)
    if result is None or result.name != "SUCCESS":
        raise OSError(reason)


def _sdk() -> Any:
    """Return the module of the OTLP exporter. MissingBackendError."""
    try:
        import_module("opentelemetry.sdk.trace.export")
        return import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError:
        raise MissingBackendError(f"serve.traces needs the OpenTelemetry SDK: {INSTALL}") from None


def _file_at(scenario: ResolvedScenario) -> SpanFile:
    """Open the file of traces. ScenarioError."""
    path: Path = scenario.base_dir / scenario.serve.traces
    try:
        return SpanFile(path)
    except OSError as error:
        problem = f"{path} cannot be written: {error.strerror}"
        raise ScenarioError([Problem(scenario.path, "serve.traces", problem)]) from None
