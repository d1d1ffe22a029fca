"""Print the spans of a file of OTLP/JSON lines as trees, with times in ms: python examples/span_tree.py FILE

The file is what `pdflow serve FILE --set serve.traces=FILE` writes (docs/monitoring.md).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

MS = 1e6
SHOWN = ("pdflow.attempt", "pdflow.code", "pdflow.outcome", "pdflow.attempts", "pdflow.resumed", "pdflow.bytes")


class Span(NamedTuple):
    process: str
    fields: dict[str, Any]
    attributes: dict[str, Any]

    @property
    def begun_ns(self) -> int:
        return int(self.fields["startTimeUnixNano"])

    @property
    def lasted_ns(self) -> int:
        return int(self.fields["endTimeUnixNano"]) - self.begun_ns


def spans(path: Path) -> Iterator[Span]:
    for line in path.read_text("utf-8").splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            process = values(resource["resource"]["attributes"])["service.instance.id"]
            for scope in resource["scopeSpans"]:
                for fields in scope["spans"]:
                    yield Span(process, fields, values(fields["attributes"]))


def values(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    return {pair["key"]: next(iter(pair["value"].values())) for pair in pairs}


def show(span: Span, found: list[Span], since_ns: int, depth: int) -> None:
    notes = " ".join(f"{name.partition('.')[2]}={span.attributes[name]}" for name in SHOWN if name in span.attributes)
    begun, lasted = (span.begun_ns - since_ns) / MS, span.lasted_ns / MS
    print(f"{begun:8.1f} {lasted:8.1f}  {'  ' * depth + span.fields['name']:<27} {span.process:<10} {notes}".rstrip())
    below = [other for other in found if other.fields.get("parentSpanId") == span.fields["spanId"]]
    for other in sorted(below, key=lambda other: other.begun_ns):
        show(other, found, since_ns, depth + 1)


def main(path: Path) -> None:
    found = sorted(spans(path), key=lambda span: span.begun_ns)
    known = {span.fields["spanId"] for span in found}
    for span in found:
        if span.fields.get("parentSpanId") not in known:
            print(f"\ntrace {span.fields['traceId']}, below span {span.fields.get('parentSpanId', '-')}")
            print("   begun   lasted  span                        process")
            show(span, found, span.begun_ns, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
