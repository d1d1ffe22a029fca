"""Delays of hops, messages and transfers, from the event logs of all processes: samples in ns, and the few numbers that
a scenario has for them.

Each is measured between two instants at which the same thing is noted in the simulated world, so that whatever lies
between them, a process's wake-up or a JSON document that is read, is in the number. Means, for what a busy core adds
now and then is nobody else's business; but without the largest of twenty, which are anybody's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Final, TypeAlias

import attrs

from pdflow.protocol.messages import Register
from pdflow.protocol.values import Address, EngineId, Instant, RequestId, S
from pdflow_runtime.observe.event_log import (
    TOKEN,
    FirstPiecePassed,
    Frame,
    Moved,
    Noted,
    Page,
    Passed,
    PeerConnected,
    Sent,
)
from pdflow_runtime.observe.rows import timed

Samples: TypeAlias = list[int]
KEPT: Final = 0.95
"""Share of samples of which the mean is taken."""
NUM_GROUPS: Final = 8
REGISTER: Final = Register.__name__


@attrs.frozen
class MeasuredTransfer:
    """The times of one transfer: posting is from when everything for it was there until its last descriptor was
    posted."""

    nbytes: int
    descriptors: int
    posting_ns: int
    wire_ns: int


@attrs.frozen(kw_only=True)
class Delays:
    """The samples of each kind of delay."""

    hop_ns: Samples
    """From D's first token to where the router passes its piece on."""
    api_server_ns: dict[EngineId, Samples]
    """From where the router sends a leg until the engine has it."""
    control_ns: Samples
    handshake_ns: Samples
    transfers: list[MeasuredTransfer]


def delays(pages: Sequence[Page]) -> Delays:
    seen = _Seen()
    for _, t, noted in sorted(timed(pages), key=lambda entry: entry[1]):
        seen.take(t, noted)
    return seen.delays()


class _Seen:
    """Matches the notes of one request, or of one frame, with each other."""

    def __init__(self) -> None:
        self._marks: defaultdict[RequestId, dict[str, Instant]] = defaultdict(dict)
        self._sent: list[tuple[Instant, Sent]] = []
        self._first_piece_at: dict[int, Instant] = {}
        self._frame_sent_at: dict[tuple[RequestId, str, Address, Address], Instant] = {}
        self._moved: defaultdict[RequestId, list[Moved]] = defaultdict(list)
        self._control: Samples = []
        self._handshake_ns: Samples = []

    def take(self, t: Instant, noted: Noted) -> None:
        match noted:
            case Passed(request_id=request_id, stage=stage):
                self._marks[request_id][stage] = t
            case Sent():
                self._sent.append((t, noted))
            case FirstPiecePassed(request=request):
                self._first_piece_at[request] = t
            case Frame():
                self._frame(t, noted)
            case PeerConnected(lasted_ns=lasted):
                self._handshake_ns.append(lasted)
            case Moved(request_id=request_id):
                self._moved[request_id].append(noted)

    def _frame(self, t: Instant, frame: Frame) -> None:
        # Of frames that are alike the latest is taken for what was heard: there are few at a time.
        key = (frame.request_id, frame.kind, frame.sender, frame.receiver)
        if not frame.received:
            self._frame_sent_at[key] = t
            return
        began = self._frame_sent_at.pop(key, None)
        if began is not None:
            self._control.append(t - began)
        if frame.kind == REGISTER:
            self._marks[frame.request_id][REGISTER] = t

    def delays(self) -> Delays:
        api_servers: defaultdict[EngineId, Samples] = defaultdict(list)
        hops = []
        for t, sent in self._sent:
            marks = self._marks[sent.request_id]
            arrived = marks.get("handoff" if sent.role == "decode" else "route")
            if arrived is not None:
                api_servers[sent.engine].append(arrived - t)
            if sent.role != "prefill" and TOKEN in marks and sent.request in self._first_piece_at:
                hops.append(self._first_piece_at[sent.request] - marks[TOKEN])
        moved = [_transfer(self._marks[request_id], shards) for request_id, shards in self._moved.items()]
        return Delays(
            hop_ns=hops,
            api_server_ns=dict(api_servers),
            control_ns=self._control,
            handshake_ns=self._handshake_ns,
            transfers=[transfer for transfer in moved if transfer is not None],
        )


def _transfer(marks: dict[str, Instant], shards: Sequence[Moved]) -> MeasuredTransfer | None:
    """Return the transfer of a prompt; None if its notes are incomplete. Several ranks move their shards side by side,
    each over its own links: the largest shard takes as long as all."""
    if not {"prefill", "xfer_post", "xfer_wire"} <= marks.keys():
        return None
    largest = max(shards, key=lambda shard: shard.nbytes)
    ready = max(marks[mark] for mark in ("prefill", "handoff", "d_admit", REGISTER) if mark in marks)
    posting, wire = marks["xfer_post"] - ready, marks["xfer_wire"] - marks["xfer_post"]
    return MeasuredTransfer(largest.nbytes, largest.descriptors, max(0, posting), max(0, wire))


@attrs.frozen(kw_only=True)
class LinkValues:
    """The values of a `[network]` table, in seconds and bytes."""

    bandwidth_bytes_per_s: int | None
    latency_s: float
    per_message_s: float
    per_descriptor_s: float
    control_latency_s: float
    handshake_s: float | None
    """None: no handshake happened while delays were measured."""
    http_latency_s: float


def link_values(whole: Delays, found: Delays, synthetic: bool) -> LinkValues:
    """Return the values of the links. `found` are the delays under the traffic that counts; handshakes do not happen in
    it, so they are taken from `whole`.

    With `synthetic` engines, whose KV is not as large as it is simulated, sizes are ignored.
    """
    posting = [(one.descriptors, one.posting_ns) for one in found.transfers]
    wire = [(one.nbytes, one.wire_ns) for one in found.transfers]
    if synthetic:
        posting, wire = [(1, ns) for _, ns in posting], [(1, ns) for _, ns in wire]
    message_ns, descriptor_ns = line(posting)
    latency_ns, byte_ns = line(wire)
    return LinkValues(
        bandwidth_bytes_per_s=round(S / byte_ns) if byte_ns else None,
        latency_s=latency_ns / S,
        per_message_s=message_ns / S,
        per_descriptor_s=descriptor_ns / S,
        control_latency_s=typical(found.control_ns) / S,
        handshake_s=median(whole.handshake_ns) / S if whole.handshake_ns else None,
        http_latency_s=typical(found.hop_ns) / S,
    )


def api_server_s(found: Delays, engines: Sequence[EngineId], hop_s: float) -> float:
    """Return the time that a pool's API server takes, without the hop of HTTP to it."""
    samples = [ns for engine in engines for ns in found.api_server_ns.get(engine, ())]
    return max(0.0, typical(samples) / S - hop_s)


def typical(samples: Sequence[int]) -> float:
    """Return the mean of all samples but the largest; 0 if there are none."""
    kept = sorted(samples)[: max(1, round(len(samples) * KEPT))]
    return max(0.0, fmean(kept)) if kept else 0.0


def line(points: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Fit a line to the points; return (y at x = 0, rise per x), neither below 0. The points are cut into eight groups
    by x; the line is the nearest to what is typical of each, by the squares of its relative errors."""
    if len({x for x, _ in points}) == 1:
        return typical([y for _, y in points]), 0.0
    ordered = sorted(points, key=lambda point: point[0])
    bounds = [len(ordered) * group // NUM_GROUPS for group in range(NUM_GROUPS + 1)]
    groups = [ordered[low:high] for low, high in pairwise(bounds) if low < high]
    means = [(fmean(x for x, _ in group), typical([y for _, y in group])) for group in groups]
    found = [(x, y) for x, y in means if y > 0]
    if not found:
        return 0.0, 0.0
    flat, steep = sum(1 / y for _, y in found), sum(x / y for x, y in found)
    flats, both, steeps = (sum(x**power / y**2 for x, y in found) for power in (0, 1, 2))
    spread = flats * steeps - both**2
    if spread > 1e-9 * flats * steeps:
        at_0, rise = (flat * steeps - steep * both) / spread, (flats * steep - both * flat) / spread
        if at_0 >= 0 and rise >= 0:
            return at_0, rise
        if at_0 < 0:
            return 0.0, steep / steeps
    return flat / flats, 0.0
