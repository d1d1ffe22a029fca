"""Recorded workloads: conversion of lines to requests.

Decides what all formats have in common; what a line means stands in `csv_rows` and `json_rows`, opening files is
`readers.py`. Lines stream, so a trace may be larger than memory. A bad line is noted and skipped, and the error at the
end names all of them, each with its number.

Times start at 0 with the first request and must not decrease; a length of 0 becomes 1, because a prompt has a token and
every request that is served gets a first one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from pdflow.protocol.values import S
from pdflow.scenario.schema.workload import Trace, TraceFormat
from pdflow.workload.request import Request, Row
from pdflow.workload.traces.csv_rows import CSV_FORMATS, columns_of, csv_rows, header_cells
from pdflow.workload.traces.json_rows import Text, custom_texts, mooncake_rows, sharegpt_texts, untimed_rows

OF_TEXTS: Final[frozenset[TraceFormat]] = frozenset(("sharegpt", "vllm-custom"))
"""Formats without times, whose lengths may be estimates."""


def parse(lines: Iterable[str], location: str, trace: Trace, timed: bool = True) -> Iterator[Request]:
    """Yield the requests of a trace whose lines are given. `location` is its name in errors.

    Without `timed`, all arrive at 0, and lines need not say when. Raises TraceError after the last good line if any was
    bad, or if there was none.
    """
    return _requests(_rows(lines, location, trace, timed))


def texts(lines: Iterable[str], location: str, trace: Trace) -> Iterator[Text]:
    """Yield the prompts of a trace of texts, with lengths, in the order of its requests. Raises as `parse`."""
    read = sharegpt_texts if trace.format == "sharegpt" else custom_texts
    return read(lines, location, trace.characters_per_token)


def has_times(trace: Trace, first_line: str) -> bool:
    """True if a trace with this first line has arrival times, or if the scenario names a column of them."""
    if trace.columns.arrival:
        return True
    if trace.format in CSV_FORMATS:
        return bool(set(columns_of(trace).arrival.values()) & set(header_cells(first_line)))
    return trace.format not in OF_TEXTS


def _rows(lines: Iterable[str], location: str, trace: Trace, timed: bool) -> Iterator[Row]:
    match trace.format:
        case "mooncake":
            return mooncake_rows(lines, location)
        case "sharegpt" | "vllm-custom":
            return untimed_rows(texts(lines, location, trace))
    return csv_rows(lines, location, trace, timed)


def _requests(rows: Iterator[Row]) -> Iterator[Request]:
    start = None
    names: dict[str, str] = {}  # one text for each class, not for each request
    for index, (at, input_tokens, output_tokens, prefix, class_) in enumerate(rows):
        if start is None:
            start = at
        name = names.setdefault(class_, class_)
        yield Request(index, at - start, max(1, input_tokens), max(1, output_tokens), prefix, name)


def sliced(requests: Iterator[Request], trace: Trace) -> Iterator[Request]:
    """Return the requests in the slice that the scenario asks for, with their times scaled.

    `start_s` is time 0 of what comes out, and without it the first request that is left."""
    if not trace.skip and trace.start_s is None and trace.end_s is None and trace.time_scale == 1.0:
        return requests
    return _sliced(requests, trace)


def _sliced(requests: Iterator[Request], trace: Trace) -> Iterator[Request]:
    origin = None if trace.start_s is None else round(trace.start_s * S)
    start = origin or 0
    end = None if trace.end_s is None else round(trace.end_s * S)
    # times are below 2**53 ns for a hundred days, so the product is the nearest number to the exact one
    scale, index = trace.time_scale, 0
    for r in islice(requests, trace.skip, None):
        if r.arrival_ns < start:
            continue
        if end is not None and r.arrival_ns >= end:
            break
        if origin is None:
            origin = r.arrival_ns
        at = r.arrival_ns - origin
        yield Request(
            index, at if scale == 1.0 else round(at * scale), r.input_tokens, r.output_tokens, r.prefix, r.class_
        )
        index += 1
