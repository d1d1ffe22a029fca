"""Max-min fair flow network: a virtual clock per path, one heap of next ends, and rates that change only when flows do.

Decides how many bytes each flow has been served at any instant, and so when it ends. It has no clock: every call says
`now`, in ns, never decreasing. The carrier arms one timer at `wake_at()`, calls `advance(now)` there, and adds latency
and the cost of messages and descriptors itself: those are not the links' business.

A departure happens at its exact tick, also between two nanoseconds and between two calls: flows that stay behind speed
up at that tick, and only the report is rounded up to whole ns. Otherwise every departure would cost its neighbours up
to a nanosecond of the link, and a busy period would drift by hundreds of them.

The cost of a change is that of its connected component of busy links: nothing else is looked at, and a path alone on
its links is not filled at all. Changes at one instant are filled once, when time is next asked about.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from pdflow.network.filling import Path, Resource, fill
from pdflow.network.units import QUANTA_PER_BYTE, RATE_BITS, SNAP_TICKS, TICK_BITS

ResourceId: TypeAlias = int
PathId: TypeAlias = int
FlowId: TypeAlias = int


class FlowNetwork:
    """A network of resources, paths over them, and the flows that are on them now."""

    def __init__(self) -> None:
        self._resources: list[Resource] = []
        self._paths: list[Path] = []
        self._path_by_resources: dict[tuple[ResourceId, ...], PathId] = {}
        self._flows: dict[FlowId, Path] = {}
        self._next_flow: FlowId = 0
        self._dues: list[tuple[int, int]] = []  # heap of (tick, path); stale where the path's `due` is another
        self._dirty: dict[int, Path] = {}  # flows changed at the tick `_tick`, rates not yet
        self._tick = 0
        self._ended: list[tuple[int, FlowId]] = []  # (ns, flow), not yet handed out
        self._mark = 0

    def add_resource(self, name: str, bandwidth_bytes_per_s: int | None = None) -> ResourceId:
        """Add one direction of a link and return its id. A bandwidth of None is unlimited, 0 is paused."""
        _check_bandwidth(bandwidth_bytes_per_s)
        self._resources.append(Resource(len(self._resources), name, bandwidth_bytes_per_s))
        return len(self._resources) - 1

    def path(self, resources: Sequence[ResourceId]) -> PathId:
        """Return the path over these resources; the same set in any order gives the same path. Empty is unlimited."""
        key = tuple(sorted(resources))
        if len(set(key)) != len(key):
            raise ValueError(f"a path crosses each resource once, got {tuple(resources)}")
        if key and not 0 <= key[0] <= key[-1] < len(self._resources):
            raise ValueError(f"a path names resources 0 to {len(self._resources) - 1}, got {tuple(resources)}")
        index = self._path_by_resources.get(key)
        if index is None:
            index = self._path_by_resources[key] = len(self._paths)
            self._paths.append(Path(index, tuple(self._resources[resource] for resource in key)))
        return index

    def start(self, path: PathId, nbytes: int, now: int) -> FlowId:
        """Put a flow of `nbytes` bytes on `path` at `now`. One with nothing to wait for ends at `now`."""
        if nbytes < 0:
            raise ValueError(f"a flow carries 0 bytes or more, got {nbytes}")
        tick = self._catch_up(now)
        flow = self._next_flow
        self._next_flow = flow + 1
        route = self._paths[path]
        limits = route.limits
        if not nbytes or not limits:
            route.bytes_done += nbytes
            self._ended.append((now, flow))
            return flow
        self._flows[flow] = route
        if route.count:
            route.served += route.rate * (tick - route.since)
            route.since = tick
            heappush(route.ends, (route.served + nbytes * QUANTA_PER_BYTE, flow, nbytes))
            route.count += 1
            for link in limits:
                link.flows += 1
            self._dirty[route.index] = route
            return flow
        alone = True
        for link in limits:
            if link.flows:
                alone = False
            else:
                link.busy_since = tick
            link.flows += 1
            link.paths[route.index] = route
        end = nbytes * QUANTA_PER_BYTE
        route.served = 0
        route.since = tick
        route.ends = [(end, flow, nbytes)]
        route.count = 1
        if alone and route.narrowest:
            route.rate = route.narrowest
            route.due = due = tick - (-end // route.narrowest)
            heappush(self._dues, (due, route.index))
        else:
            route.rate = 0
            self._dirty[route.index] = route
        return flow

    def cancel(self, flow: FlowId, now: int) -> int | None:
        """Take a flow off its path and return the whole bytes it had carried; it is never reported. None if it is too
        late: the flow has ended by `now`, and the next `advance` says so."""
        tick = self._catch_up(now)
        path = self._flows.pop(flow, None)
        if path is None:
            if any(ended == flow for _, ended in self._ended):
                return None
            raise KeyError(f"flow {flow} is not on this network: it ended, was cancelled, or never started")
        self._bank(path, tick)
        index = next(at for at, (_, other, _) in enumerate(path.ends) if other == flow)
        end, _, nbytes = path.ends[index]
        path.ends[index] = path.ends[-1]
        path.ends.pop()
        heapify(path.ends)
        carried = nbytes - _bytes_up(end - path.served)
        path.bytes_done += carried
        self._leave(path, 1, tick)
        return carried

    def wake_at(self) -> int | None:
        """Return the ns at which the next flow ends, or has ended; None while nothing moves."""
        if self._ended:
            return self._ended[0][0]
        if self._dirty:
            self._settle()
        dues, paths = self._dues, self._paths
        while dues:
            due, index = dues[0]
            if paths[index].due == due:
                return -((SNAP_TICKS - due) >> TICK_BITS)
            heappop(dues)
        return None

    def advance(self, now: int) -> list[FlowId]:
        """Return the flows that have ended by `now` and were not returned before, by ns of their end, then by start."""
        self._catch_up(now)
        ended = self._ended
        if not ended:
            return []
        self._ended = []
        if len(ended) == 1:
            return [ended[0][1]]
        ended.sort()
        return [flow for _, flow in ended]

    def set_bandwidth(self, resource: ResourceId, bandwidth_bytes_per_s: int | None, now: int) -> None:
        """Change the bandwidth of a link from `now` on: 0 pauses it, None lifts its limit."""
        _check_bandwidth(bandwidth_bytes_per_s)
        tick = self._catch_up(now)
        link = self._resources[resource]
        crossing = [path for path in self._paths if link in path.resources]
        for path in crossing:
            if path.count:
                self._bank(path, tick)
                self._detach(path, tick)
        link.bandwidth = bandwidth_bytes_per_s
        link.offer = 0 if bandwidth_bytes_per_s is None else bandwidth_bytes_per_s << RATE_BITS
        for path in crossing:
            path.limit()
            if not path.count:
                continue
            if path.limits:
                self._attach(path, tick)
                continue
            for _, flow, nbytes in path.ends:
                del self._flows[flow]
                path.bytes_done += nbytes
                self._ended.append((now, flow))
            path.ends, path.count, path.due = [], 0, None

    def in_flight(self, resource: ResourceId) -> int:
        """Return how many flows cross a resource now. An unlimited one has none: they end when they start."""
        return self._resources[resource].flows

    def rate(self, path: PathId) -> Fraction:
        """Return the bytes per second of each flow on a path now, 0 where there is none."""
        if self._dirty:
            self._settle()
        route = self._paths[path]
        return Fraction(route.rate if route.count else 0, 1 << RATE_BITS)

    def carried_bytes(self, resource: ResourceId, now: int) -> int:
        """Return the whole bytes that a resource has carried by `now`, unfinished and cancelled flows included."""
        tick = self._catch_up(now)
        link = self._resources[resource]
        carried = 0
        for path in self._paths:
            if link in path.resources:
                carried += path.bytes_done
                served = path.served + path.rate * (tick - path.since)
                for end, _, nbytes in path.ends:
                    carried += nbytes - _bytes_up(end - served)
        return carried

    def busy_ns(self, resource: ResourceId, now: int) -> int:
        """Return for how long a resource has had a flow on it by `now`, paused or not, in whole ns."""
        tick = self._catch_up(now)
        link = self._resources[resource]
        open_ticks = tick - link.busy_since if link.flows else 0
        return (link.busy_ticks + open_ticks) >> TICK_BITS

    def _catch_up(self, now: int) -> int:
        """Process all ends of flows up to `now`, and return `now` in ticks."""
        tick = now << TICK_BITS
        if tick < self._tick:
            raise ValueError(f"time runs forward: now is {now} ns, but {self._tick >> TICK_BITS} ns has been seen")
        if self._dirty and tick != self._tick:
            self._settle()
        if self._dues and self._dues[0][0] <= tick + SNAP_TICKS:
            self._run_to(tick)
        self._tick = tick
        return tick

    def _run_to(self, limit: int) -> None:
        if self._dirty:
            self._settle()
        dues, paths = self._dues, self._paths
        instant = horizon = limit + SNAP_TICKS
        while dues and dues[0][0] <= horizon:
            due, index = heappop(dues)
            path = paths[index]
            if path.due == due:
                self._tick = due if due < limit else limit
                instant = due if due < limit else horizon
                self._end_flows(path, self._tick)
            # Departures of one tick are one change of rates.
            if self._dirty and not (dues and dues[0][0] <= instant):
                self._settle()

    def _end_flows(self, path: Path, tick: int) -> None:
        """End the flows at the head of the path's heap at `tick`; the refill reschedules those that are left."""
        ns = -((SNAP_TICKS - tick) >> TICK_BITS)
        ends = path.ends
        if len(ends) == 1:  # nobody is left whose service matters
            _, flow, nbytes = ends.pop()
            del self._flows[flow]
            path.bytes_done += nbytes
            self._ended.append((ns, flow))
            self._leave(path, 1, tick)
            return
        self._bank(path, tick)
        reached = path.served + path.rate * SNAP_TICKS
        gone = 0
        while ends and ends[0][0] <= reached:
            _, flow, nbytes = heappop(ends)
            del self._flows[flow]
            path.bytes_done += nbytes
            self._ended.append((ns, flow))
            gone += 1
        self._leave(path, gone, tick)

    def _leave(self, path: Path, gone: int, tick: int) -> None:
        """Release the links of `gone` flows that have left a path, and mark the paths to be refilled."""
        path.due = None
        path.count -= gone
        alone = True
        for link in path.limits:
            link.flows -= gone
            if link.flows != path.count:
                alone = False
        if path.count:
            self._dirty[path.index] = path
            return
        for link in path.limits:
            del link.paths[path.index]
            if not link.flows:
                link.busy_ticks += tick - link.busy_since
        if alone:
            self._dirty.pop(path.index, None)
        else:
            self._dirty[path.index] = path

    def _settle(self) -> None:
        """Give new rates to all that the dirty paths touch, as of the tick at which they became dirty."""
        tick, dirty, dues = self._tick, self._dirty, self._dues
        if len(dues) > 64 + 4 * len(self._paths):  # mostly stale; in place, because _run_to holds the list
            dues[:] = [(path.due, path.index) for path in self._paths if path.due is not None]
            heapify(dues)
        if len(dirty) == 1:
            (path,) = dirty.values()
            if path.count and all(link.flows == path.count for link in path.limits):
                dirty.clear()
                self._bank(path, tick)
                path.rate = rate = path.narrowest // path.count
                path.due = tick - ((path.served - path.ends[0][0]) // rate) if rate else None
                if path.due is not None:
                    heappush(dues, (path.due, path.index))
                return
        self._mark += 1
        for path in fill(dirty.values(), self._mark):
            if path.new_rate != path.rate or path.index in dirty:
                # _bank, written out: under load this is done for a hundred paths at a time
                path.served = served = path.served + path.rate * (tick - path.since)
                path.since = tick
                path.rate = rate = path.new_rate
                due = tick - ((served - path.ends[0][0]) // rate) if rate else None
                if due != path.due:
                    path.due = due
                    if due is not None:
                        heappush(dues, (due, path.index))
        dirty.clear()

    def _bank(self, path: Path, tick: int) -> None:
        path.served += path.rate * (tick - path.since)
        path.since = tick

    def _detach(self, path: Path, tick: int) -> None:
        for link in path.limits:
            link.flows -= path.count
            del link.paths[path.index]
            if not link.flows:
                link.busy_ticks += tick - link.busy_since
        self._dirty[path.index] = path

    def _attach(self, path: Path, tick: int) -> None:
        for link in path.limits:
            if not link.flows:
                link.busy_since = tick
            link.flows += path.count
            link.paths[path.index] = path
        self._dirty[path.index] = path


def _check_bandwidth(bandwidth_bytes_per_s: int | None) -> None:
    if bandwidth_bytes_per_s is not None and bandwidth_bytes_per_s < 0:
        raise ValueError(f"a bandwidth is 0 (paused) or more bytes per second, got {bandwidth_bytes_per_s}")


def _bytes_up(quanta: int) -> int:
    return -(-quanta // QUANTA_PER_BYTE)
