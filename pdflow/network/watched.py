"""A flow network that also reports the rate of each of its links, whenever it changes.

Links, flows and ends are those of `FlowNetwork`: the reports follow from the rates that are computed anyway, at the
tick at which they change, and are made only here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from pdflow.network.filling import Path, Resource, links_around
from pdflow.network.network import FlowId, FlowNetwork, PathId, ResourceId
from pdflow.network.units import RATE_BITS, SNAP_TICKS, TICK_BITS

RateObserver: TypeAlias = Callable[[ResourceId, int, int], None]
"""Called with (resource, ns, rate): from this ns on, all flows of the resource together carry so many bytes per second,
perhaps as many as before."""


_HALF = 1 << (RATE_BITS - 1)


class WatchedNetwork(FlowNetwork):
    """A `FlowNetwork` that calls `on_rate` for each resource with a limit. Changes within one ns have one instant, and
    the last one counts.

    An unlimited resource has no rate that could be reported.
    """

    def __init__(self, on_rate: RateObserver) -> None:
        super().__init__()
        self._on_rate = on_rate

    def start(self, path: PathId, nbytes: int, now: int) -> FlowId:
        """See `FlowNetwork`."""
        flow = super().start(path, nbytes, now)
        route = self._paths[path]
        if route.index not in self._dirty:  # else `_settle` tells
            self._report_rates(route.limits)
        return flow

    def set_bandwidth(self, resource: ResourceId, bandwidth_bytes_per_s: int | None, now: int) -> None:
        """See `FlowNetwork`."""
        super().set_bandwidth(resource, bandwidth_bytes_per_s, now)
        if bandwidth_bytes_per_s is None:
            self._report_rates((self._resources[resource],))

    def _settle(self) -> None:
        self._mark += 1
        links = links_around(self._dirty.values(), self._mark)
        super()._settle()
        self._report_rates(links)

    def _leave(self, path: Path, gone: int, tick: int) -> None:
        super()._leave(path, gone, tick)
        if path.index not in self._dirty:
            self._report_rates(path.limits)

    def _report_rates(self, links: Iterable[Resource]) -> None:
        ns = -((SNAP_TICKS - self._tick) >> TICK_BITS)
        for link in links:
            rate = sum(path.count * path.rate for path in link.paths.values())
            self._on_rate(link.index, ns, (rate + _HALF) >> RATE_BITS)
