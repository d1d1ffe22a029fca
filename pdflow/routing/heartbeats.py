"""Membership by heartbeats: an engine is a member while its last report to the router is recent.

Engines report periodically, the first time when they come up, and nothing else informs the router of a death: an engine
silent for too long is not a member until its next report. A report names the engine's role, position and
incarnation, so that a restarted engine is known under its new id at once.

Whether a member gets legs is decided elsewhere (`governed`): an engine that is to leave still reports. So is whether
legs under way at an engine that falls silent go on, or fail as if it had died.

Source: the proxy of PR #18242, whose engines report every 3 s and are removed 5 s after their last report.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal, TypeAlias

from pdflow.protocol.values import Instant

Seat: TypeAlias = tuple[Literal["prefill", "decode"], int]
"""The place of an engine, the same for all its incarnations: its role, and its position there."""


def silence_ns(every_ns: int) -> int:
    """Return after how long without a report an engine counts as silent: 5 s if it reports every 3 s."""
    return every_ns * 5 // 3


class Roll:
    """The members, by their last reports.

    Args: `silence_ns`: an engine is a member for less than this after its last report.

    Time advances by `pass_to`, and never goes back. Each call costs O(1) for each engine that comes or goes.
    """

    __slots__ = ("members", "now", "silence_ns")

    def __init__(self, silence_ns: int) -> None:
        self.silence_ns = silence_ns
        self.now: Instant = 0
        self.members: dict[Seat, Instant] = {}
        """The end of each membership, the earliest first, since `silence_ns` is the same for all."""

    def __contains__(self, seat: Seat) -> bool:
        return seat in self.members

    def fork(self) -> Roll:
        other = Roll(self.silence_ns)
        other.now, other.members = self.now, self.members.copy()
        return other

    def fingerprint(self) -> Hashable:
        """The hashable state: members in the order in which they fall silent, without instants, which the checker
        chooses."""
        return tuple(self.members)

    def pass_to(self, now: Instant) -> list[Seat]:
        """Advance to `now`, and remove and return the members that have fallen silent."""
        self.now = now
        gone: list[Seat] = []
        for seat, until in self.members.items():
            if until > now:
                break
            gone.append(seat)
        for seat in gone:
            del self.members[seat]
        return gone

    def reported(self, seat: Seat) -> None:
        """Record a report that has arrived now."""
        self.members.pop(seat, None)
        self.members[seat] = self.now + self.silence_ns
