"""Max-min fair rates by progressive filling over paths, for one connected component of links.

Decides the rate of one flow on each path, given how many flows each path carries. It does not know time or bytes; the
network calls it when the set of flows has changed. Flows on one path have one rate, so the work grows with the paths
and links in use, never with the flows (filling by flow collapsed to 83 requests/s on a saturated link in a trial).

Max-min: raise all rates together until a link is full, freeze the paths through it, go on with the others (Bertsekas
and Gallager, Data Networks, 2nd ed., section 6.5.2). Shares are floored to the unit of rate; links whose floored shares
are equal are taken by index, so the result is a function of the counts and bandwidths alone, not of history.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heapreplace

from pdflow.network.units import RATE_BITS


class Resource:
    """One direction of a link: its bandwidth, and the paths and the number of flows that use it now."""

    __slots__ = (
        "bandwidth",
        "busy_since",
        "busy_ticks",
        "flows",
        "index",
        "left",
        "mark",
        "name",
        "offer",
        "paths",
        "weight",
    )

    def __init__(self, index: int, name: str, bandwidth: int | None) -> None:
        self.index = index
        self.name = name
        self.bandwidth = bandwidth
        self.offer = 0 if bandwidth is None else bandwidth << RATE_BITS
        self.paths: dict[int, Path] = {}  # those with flows, by path index
        self.flows = 0
        self.busy_ticks = 0
        self.busy_since = 0
        # Scratch of one filling. Fields are faster than tables, and `mark` says whose they are.
        self.mark = 0
        self.left = 0
        self.weight = 0


class Path:
    """A set of resources that flows cross together, with the virtual clock that all flows on it share."""

    __slots__ = (
        "bytes_done",
        "count",
        "due",
        "ends",
        "index",
        "limits",
        "mark",
        "narrowest",
        "new_rate",
        "rate",
        "reached",
        "resources",
        "served",
        "since",
    )

    def __init__(self, index: int, resources: tuple[Resource, ...]) -> None:
        self.index = index
        self.resources = resources
        self.count = 0  # flows now
        self.rate = 0  # of one flow, in quanta per tick, since the tick `since`
        self.since = 0
        self.served = 0  # quanta that each flow had been served by `since`: a flow's end is a point on this scale
        self.ends: list[tuple[int, int, int]] = []  # heap of (end, flow, bytes)
        self.due: int | None = None  # the tick of the earliest end at this rate
        self.bytes_done = 0
        self.reached = 0
        self.mark = 0
        self.new_rate = 0
        self.limit()

    def limit(self) -> None:
        """Work out which resources bound this path: unlimited ones never do."""
        self.limits = tuple(resource for resource in self.resources if resource.bandwidth is not None)
        self.narrowest = min((resource.offer for resource in self.limits), default=0)


def fill(dirty: Iterable[Path], mark: int) -> list[Path]:
    """Set `new_rate` of every path in the connected components that `dirty` touches, and return those paths.

    `mark` is a number that no earlier filling of these paths has used.
    """
    links = links_around(dirty, mark)
    affected: list[Path] = []
    shares: list[tuple[int, int, Resource]] = []
    for link in links:
        if link.flows:
            link.left = link.offer
            link.weight = link.flows
            shares.append((link.offer // link.flows, link.index, link))
    heapify(shares)
    while shares:
        share, index, link = shares[0]
        flows = link.weight
        if not flows:
            heappop(shares)
            continue
        if link.left != link.offer and (grown := link.left // flows) != share:
            heapreplace(shares, (grown, index, link))  # a share only grows while narrower links freeze their paths
            continue
        heappop(shares)
        for path in link.paths.values():
            if path.mark != mark:
                path.mark = mark
                path.new_rate = share
                affected.append(path)
                count = path.count
                taken = count * share
                for crossed in path.limits:
                    crossed.left -= taken
                    crossed.weight -= count
    return affected


def links_around(dirty: Iterable[Path], mark: int) -> list[Resource]:
    """Return every resource that shares a path, directly or through others, with a dirty path."""
    links: list[Resource] = []
    for path in dirty:
        for link in path.limits:
            if link.mark != mark:
                link.mark = mark
                links.append(link)
    for link in links:  # grows while it is walked
        for path in link.paths.values():
            if path.reached != mark:
                path.reached = mark
                for other in path.limits:
                    if other.mark != mark:
                        other.mark = mark
                        links.append(other)
    return links
