"""A run as a Chrome trace, which Perfetto opens: the work of each engine, the queues, and each prompt's KV transfer.

Every engine is a process and every pair that moved KV is one. Slices of requests that overlap stand in lanes of their
own, so that those of one lane nest; an arrow leads from each prompt's prefill to its decode. Counters say how many
requests wait, compute, load and decode at each instant, and how many tokens of prompts' KV an engine holds: all of it
follows from the records, and a live run's looks the same. A request that was tried again shows what its last attempt
stamped. What follows from no record comes from a recording, where there is one: the KV blocks that an engine uses, and,
in a process of their own, what each link carries.

Events are made one by one, process by process: what is held is columns of the records, and never the events.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format). Times are
microseconds with the nanoseconds behind the point.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from pdflow.results.recording import Changes, Recording
from pdflow.results.records import (
    D_ADMIT,
    HANDOFF,
    HANDSHAKE,
    NOTIFY,
    P_QUEUE,
    PREFILL,
    ROUTE,
    XFER_POST,
    XFER_WIRE,
    IntColumn,
    Records,
)

TraceEvent: TypeAlias = dict[str, Any]

COUNTERS = 0
"""The lane of a process's counters; slices begin above it."""

_AT_ONCE = 1 << 16
"""Changes of a counter that are taken out of their columns together."""


class Span(NamedTuple):
    """An interval of one request: instants in ns, the request, and the consecutive segments in it."""

    start: int
    end: int
    request: int
    segments: tuple[tuple[str, int, int], ...]


class CounterLevel(NamedTuple):
    """A counter as intervals: it rises by `weight` at each start, and falls by it at the end."""

    name: str
    starts: IntColumn
    ends: IntColumn
    weight: IntColumn

    def curve(self) -> Changes:
        """Return the counter's value over time, as changes."""
        return summed(np.concatenate((self.starts, self.ends)), np.concatenate((self.weight, -self.weight)))


def summed(times: IntColumn, steps: IntColumn) -> Changes:
    """Return the running sum of `steps` over `times`, which are in any order, as changes."""
    instants, which = np.unique(times, return_inverse=True)
    grown = np.zeros(len(instants), dtype=np.int64)
    np.add.at(grown, which, steps)
    changed = grown != 0
    return instants[changed], np.cumsum(grown)[changed]


def timeline(records: Records, recording: Recording | None = None) -> Iterator[TraceEvent]:
    """Yield the trace's events, process by process. A request without a last token is shown as far as it came."""
    stamps, recording = Stamps(records), recording or Recording()
    arrows = stamps.from_engine_to_engine()
    pid = 0
    for pid, (name, kind) in enumerate(stamps.processes(), start=1):
        yield from _process(pid, name)
        for level in stamps.levels(name, kind):
            yield from _counter(pid, level.name, *level.curve())
        if kind != "transfer" and name in recording.kv_blocks:
            yield from _counter(pid, "KV blocks in use", *recording.kv_blocks[name].curve())
        yield from _slices(pid, stamps.spans(name, kind), kind, arrows)
    used = [link for link in recording.links if len(link.rate.instants)]
    if used:
        yield from _process(pid + 1, "links")
    for link in used:
        yield from _counter(pid + 1, f"{link.name}, bytes/s", *link.rate.curve())


class Stamps:
    """The records' columns, and the requests of each engine and pair of engines."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.ends = [np.array(column, dtype=np.int64) for column in records.ends]
        self.last = np.array(records.last_token_ns, dtype=np.int64)
        self.tokens = np.array(records.input_tokens, dtype=np.int64)
        self.by_prefill = _positions(records.prefill_engine)
        self.by_decode = _positions(records.decode_engine)
        # An engine that serves requests alone stands in both columns of a record.
        alone = [p is not None and p == d for p, d in zip(records.prefill_engine, records.decode_engine, strict=True)]
        self.alone = np.array(alone, dtype=bool)
        moved = ~self.alone & (self.ends[XFER_WIRE] >= 0)
        names = zip(records.prefill_engine, records.decode_engine, moved, strict=True)
        self.by_pair = _positions(f"{p} to {d}" if m else None for p, d, m in names)

    def processes(self) -> Iterator[tuple[str, str]]:
        """Yield the name and kind of each track: engines by the order of their first request, pairs between them.

        Of a decode engine that also computes prompts of its own, what is decoded is shown.
        """
        decodes = {name for name, who in self.by_decode.items() if not self.alone[who].all()}
        alone = {name for name, who in self.by_prefill.items() if self.alone[who].any()} - decodes
        prefills = [name for name in self.by_prefill if name not in decodes]
        yield from ((name, "aggregated" if name in alone else "prefill") for name in prefills)
        yield from ((name, "transfer") for name in self.by_pair)
        yield from ((name, "decode") for name in self.by_decode if name in decodes)

    def from_engine_to_engine(self) -> frozenset[int]:
        """Return the requests that have a slice in one engine's prefill and another's decode."""
        there = np.zeros(len(self.last), dtype=np.int64)
        for kind, engines in (("prefill", self.by_prefill), ("decode", self.by_decode)):
            for who in engines.values():
                there[self._lasted(who, *self._span(kind))[0]] += 1
        return frozenset(np.flatnonzero((there == 2) & ~self.alone).tolist())

    def _span(self, kind: str) -> tuple[IntColumn, IntColumn]:
        """Return the begin and the end of a slice of this kind, by request."""
        ends = self.ends
        if kind == "prefill":
            return ends[P_QUEUE], ends[PREFILL]
        if kind == "transfer":
            return np.maximum(np.maximum(ends[PREFILL], ends[HANDSHAKE]), ends[D_ADMIT]), ends[XFER_WIRE]
        return ends[D_ADMIT] if kind == "decode" else ends[P_QUEUE], self.last

    def spans(self, name: str, kind: str) -> Iterator[Span]:
        """Yield the slices of a process, by their start."""
        ends = self.ends
        engines = {"transfer": self.by_pair, "decode": self.by_decode}.get(kind, self.by_prefill)
        start, end = self._span(kind)
        who = self._lasted(engines[name], start, end)[0]
        marks: dict[str, list[tuple[str, IntColumn]]] = {
            "prefill": [],
            "transfer": [("post", ends[XFER_POST]), ("wire", end)],
            "decode": [("load", ends[NOTIFY]), ("decode", end)],
            "aggregated": [("prefill", ends[PREFILL]), ("decode", end)],
        }
        for request in who[np.argsort(start[who], kind="stable")].tolist():
            begun, over = int(start[request]), int(end[request])
            segments, at = [], begun
            for label, column in marks[kind]:
                until = min(max(at, int(column[request])), over)
                segments.append((label, at, until))
                at = until
            yield Span(begun, over, request, tuple(segments))

    def levels(self, name: str, kind: str) -> Iterator[CounterLevel]:
        """Yield the counters of a process."""
        ends, last = self.ends, self.last
        if kind in ("prefill", "aggregated"):
            who = self.by_prefill[name]
            done = ends[PREFILL] if kind == "prefill" else last
            yield self._count("waiting", who, ends[ROUTE], ends[P_QUEUE])
            yield self._count("computing", who, ends[P_QUEUE], done)
            held = np.where(ends[NOTIFY] >= 0, ends[NOTIFY], ends[PREFILL]) if kind == "prefill" else last
            yield self._count("KV tokens of prompts", who, ends[P_QUEUE], held, self.tokens)
        elif kind == "transfer":
            yield self._count("under way", self.by_pair[name], ends[XFER_POST], ends[XFER_WIRE])
        else:
            who = self.by_decode[name]
            yield self._count("waiting", who, ends[HANDOFF], ends[D_ADMIT])
            yield self._count("loading", who, ends[D_ADMIT], ends[NOTIFY])
            yield self._count("decoding", who, ends[NOTIFY], last)
            yield self._count("KV tokens of prompts", who, ends[D_ADMIT], last, self.tokens)

    def _lasted(self, who: IntColumn, start: IntColumn, end: IntColumn) -> tuple[IntColumn, IntColumn, IntColumn]:
        """Keep the requests whose start and end are both known and in order."""
        known = (start[who] >= 0) & (end[who] >= start[who])
        return who[known], start, end

    def _count(
        self, name: str, who: IntColumn, start: IntColumn, end: IntColumn, weight: IntColumn | None = None
    ) -> CounterLevel:
        who, start, end = self._lasted(who, start, end)
        return CounterLevel(name, start[who], end[who], np.ones_like(who) if weight is None else weight[who])


def _positions(names: Iterable[str | None]) -> dict[str, IntColumn]:
    found: defaultdict[str, array[int]] = defaultdict(_no_positions)
    for position, name in enumerate(names):
        if name is not None:
            found[name].append(position)
    return {name: np.array(positions, dtype=np.int64) for name, positions in found.items()}


def _no_positions() -> array[int]:
    return array("q")


def _process(pid: int, name: str) -> Iterator[TraceEvent]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}


def _slices(pid: int, spans: Iterable[Span], kind: str, arrows: frozenset[int]) -> Iterator[TraceEvent]:
    """Yield slices in lanes: each span goes into the lowest lane that is free."""
    ending: list[tuple[int, int]] = []
    free: list[int] = []
    lanes = COUNTERS
    for span in spans:
        while ending and ending[0][0] <= span.start:
            heappush(free, heappop(ending)[1])
        if not free:
            lanes += 1
            free.append(lanes)
            yield {"ph": "M", "pid": pid, "tid": lanes, "name": "thread_name", "args": {"name": f"lane {lanes}"}}
        lane = heappop(free)
        # What lasts no time must not share a lane with what begins at the same instant: they would not nest.
        heappush(ending, (max(span.end, span.start + 1), lane))
        at = {"pid": pid, "tid": lane}
        yield {
            "ph": "X",
            **at,
            "name": f"r{span.request}",
            "cat": kind,
            "ts": _us(span.start),
            "dur": _us(span.end - span.start),
        }
        for label, start, end in span.segments:
            if end > start:
                yield {"ph": "X", **at, "name": label, "cat": kind, "ts": _us(start), "dur": _us(end - start)}
        if span.request in arrows and kind in ("prefill", "decode"):
            flow = {"cat": "kv", "name": "KV", "id": span.request, "ts": _us(span.start)}
            yield {"ph": "s", **at, **flow} if kind == "prefill" else {"ph": "f", "bp": "e", **at, **flow}


def _counter(pid: int, name: str, instants: IntColumn, values: IntColumn) -> Iterator[TraceEvent]:
    """Yield one event for each instant at which the counter changes."""
    for low in range(0, len(instants), _AT_ONCE):
        some = slice(low, low + _AT_ONCE)
        for at, value in zip(instants[some].tolist(), values[some].tolist(), strict=True):
            yield {"ph": "C", "pid": pid, "tid": COUNTERS, "name": name, "ts": _us(at), "args": {"": value}}


def _us(ns: int) -> float:
    return ns / 1000
