"""Who is a member: whoever has reported to the router within the last while.

Engines report again and again, the first time when they come up, and nobody tells the router of a death: who has been
silent for too long is a member no more, until the next report. A report names where the engine stands and which life of
it that is, so that one that has come back is known under its new id at once.

Whether a member gets legs is decided elsewhere (`governed`): one that is to leave reports still. What is under way at
an engine that falls silent goes on.

Source: the proxy of PR #18242, whose engines report every 3 s and are removed 5 s after their last report.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal, TypeAlias

from pdflow.protocol.values import Instant

Seat: TypeAlias = tuple[Literal["prefill", "decode"], int]
"""Where an engine stands, whatever its life: its role, and its position there."""


def silence_ns(every_ns: int) -> int:
    """After how long an engine that reports so often is silent: 5 s for 3 s."""
    return every_ns * 5 // 3


class Roll:
    """Args: `silence_ns`: an engine is a member for less than this after its last report.

    Time goes on by `pass_to`, and never back. Each call costs O(1) for each engine that comes or goes.
    """

    __slots__ = ("members", "now", "silence_ns")

    def __init__(self, silence_ns: int) -> None:
        self.silence_ns = silence_ns
        self.now: Instant = 0
        self.members: dict[Seat, Instant] = {}
        """Until when each is one; the first to fall silent stands first, since all may be silent for as long."""

    def __contains__(self, seat: Seat) -> bool:
        return seat in self.members

    def fork(self) -> Roll:
        other = Roll(self.silence_ns)
        other.now, other.members = self.now, self.members.copy()
        return other

    def fingerprint(self) -> Hashable:
        """Members in the order in which they fall silent: when they do is when the world lets time pass."""
        return tuple(self.members)

    def pass_to(self, now: Instant) -> list[Seat]:
        """It is so late now: who has fallen silent."""
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
        """A report has come, now."""
        self.members.pop(seat, None)
        self.members[seat] = self.now + self.silence_ns
