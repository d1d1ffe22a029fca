"""Spans as OTLP/JSON (the OpenTelemetry protocol's file format): one line for each span, appended to a file.

Each line is a whole TracesData message, so that a collector's `otlpjsonfile` receiver reads the file. All processes of
a host append to one file, each with one write for a batch, which the system does not mix with others' on a local disk.
Spans and their values are those of the OpenTelemetry SDK (`spans.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

_encode: Final = msgspec.json.Encoder().encode


class SpanFile:
    """Appends spans to a file. OSError if it cannot be opened, or written."""

    def __init__(self, path: Path) -> None:
        self._descriptor: Final = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, spans: Sequence[Any]) -> None:
        data = b"".join(_encode(traces_data(span)) + b"\n" for span in spans)
        while data:
            data = data[os.write(self._descriptor, data) :]

    def close(self) -> None:
        os.close(self._descriptor)


def traces_data(span: Any) -> dict[str, Any]:
    """Return the TracesData message with this span of the SDK."""
    scope = {"name": span.instrumentation_scope.name, "version": span.instrumentation_scope.version}
    scope_spans = {"scope": scope, "spans": [_span(span)]}
    return {
        "resourceSpans": [{"resource": {"attributes": _pairs(span.resource.attributes)}, "scopeSpans": [scope_spans]}]
    }


def _span(span: Any) -> dict[str, Any]:
    context, parent = span.context, span.parent
    encoded: dict[str, Any] = {"traceId": f"{context.trace_id:032x}", "spanId": f"{context.span_id:016x}"}
    if context.trace_state:
        encoded["traceState"] = context.trace_state.to_header()
    if parent is not None:
        encoded["parentSpanId"] = f"{parent.span_id:016x}"
    encoded |= {
        "flags": int(context.trace_flags),
        "name": span.name,
        # The SDK counts kinds from 0, OTLP from 1: its 0 is for an unknown kind.
        "kind": span.kind.value + 1,
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _pairs(span.attributes),
    }
    if span.events:
        encoded["events"] = [{"timeUnixNano": str(event.timestamp), "name": event.name} for event in span.events]
    code = span.status.status_code.value
    if code:
        message = span.status.description
        encoded["status"] = {"code": code, "message": message} if message else {"code": code}
    return encoded


def _pairs(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
        case _:
            return {"arrayValue": {"values": [_value(each) for each in value]}}
