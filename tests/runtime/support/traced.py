"""Spans that processes have appended to a file, as a test looks at them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec


class TracedSpan(NamedTuple):
    process: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty: it has none."""
    kind: int
    begun_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    error: bool
    events: list[str]

    @property
    def lasted_ms(self) -> float:
        return (self.ended_ns - self.begun_ns) / 1e6

    def within(self, other: TracedSpan) -> bool:
        return other.begun_ns <= self.begun_ns <= self.ended_ns <= other.ended_ns


class Traced:
    """All spans of a file."""

    def __init__(self, path: Path) -> None:
        lines = path.read_bytes().splitlines() if path.exists() else []
        self.spans = [span_of(msgspec.json.decode(line)) for line in lines]

    def of_trace(self, trace_id: str) -> list[TracedSpan]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def children(self, parent: TracedSpan) -> list[TracedSpan]:
        """In the order in which they began."""
        found = [span for span in self.spans if span.parent_id == parent.span_id]
        assert all(span.trace_id == parent.trace_id for span in found)
        return sorted(found, key=lambda span: span.begun_ns)

    def child(self, parent: TracedSpan, name: str) -> TracedSpan:
        (found,) = (span for span in self.children(parent) if span.name == name)
        return found


def span_of(line: dict[str, Any]) -> TracedSpan:
    """The span of a line, each of which has one."""
    (of_resource,) = line["resourceSpans"]
    (of_scope,) = of_resource["scopeSpans"]
    (span,) = of_scope["spans"]
    assert of_scope["scope"]["name"] == "pdflow"
    resource = values(of_resource["resource"]["attributes"])
    assert resource["service.name"] == "pdflow"
    return TracedSpan(
        resource["service.instance.id"],
        span["name"],
        span["traceId"],
        span["spanId"],
        span.get("parentSpanId", ""),
        span["kind"],
        int(span["startTimeUnixNano"]),
        int(span["endTimeUnixNano"]),
        values(span["attributes"]),
        span.get("status", {}).get("code") == 2,
        [event["name"] for event in span.get("events", ())],
    )


def values(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    return {pair["key"]: value_of(pair["value"]) for pair in pairs}


def value_of(value: dict[str, Any]) -> Any:
    ((kind, content),) = value.items()
    match kind:
        case "intValue":
            return int(content)
        case "arrayValue":
            return [value_of(each) for each in content["values"]]
        case _:
            return content
