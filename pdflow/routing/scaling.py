"""Autoscaling: the number of engines that brings the open legs of each down to a target.

The number grows at once, since requests wait already, and shrinks only to the most that was desired within a window,
since loads vary and an engine takes time to start. The rule and its window are those of Kubernetes' horizontal
autoscaler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from math import ceil

from pdflow.protocol.values import Instant


class Autoscaler:
    """The autoscaler of the engines of one role.

    Args: `target`: open legs for each engine; `stabilization_ns`: how long fewer must suffice before scaling in.
    """

    __slots__ = ("least", "most", "seen", "stabilization_ns", "target")

    def __init__(self, target: float, least: int, most: int, stabilization_ns: int) -> None:
        self.target = target
        self.least = least
        self.most = most
        self.stabilization_ns = stabilization_ns
        self.seen: deque[tuple[Instant, int]] = deque()
        """(instant, desired number) in the window, the largest number first, each later than those before it."""

    def fork(self) -> Autoscaler:
        other = Autoscaler(self.target, self.least, self.most, self.stabilization_ns)
        other.seen = self.seen.copy()
        return other

    def fingerprint(self) -> Hashable:
        return tuple(self.seen)

    def desired_replicas(self, legs: int, now: Instant) -> int:
        """Return how many engines there should be from now on, with this many legs open."""
        desired = max(self.least, min(self.most, ceil(legs / self.target)))
        seen = self.seen
        while seen and seen[-1][1] <= desired:
            seen.pop()
        seen.append((now, desired))
        while seen[0][0] < now - self.stabilization_ns:
            seen.popleft()
        return seen[0][1]
