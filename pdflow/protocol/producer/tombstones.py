"""Tombstones: P's record of registrations that have ended, so that a late REG or CANCEL gets the same answer.

A tombstone has no TTL: a TTL only delays the race in which a CANCEL overtakes its REG (searched: S1 falls in 7 steps
without a floor, in 8 with a TTL). D's floor bounds the memory instead: the smallest seq that D may still ask for, on
REG, CANCEL and SYNC. Source: spec 2.7.
"""

from __future__ import annotations

from heapq import heappop, heappush

from pdflow.protocol.ids import Reg
from pdflow.protocol.messages import Code, Progress, SyncItem

WINDOW = 65536
"""How far above its floor a D may register, which bounds the cells and tombstones of one that never raises it (S9).
Beyond, a frame is dropped without an answer, which promises nothing; an honest D repeats it when its floor has
risen."""


class Tombstones:
    """The tombstones of one incarnation of one D engine, at one P rank."""

    __slots__ = ("floor", "incarnation", "order", "verdicts", "window")

    def __init__(self, incarnation: int, window: int = WINDOW) -> None:
        self.incarnation = incarnation
        self.window = window
        self.floor = 0
        self.verdicts: dict[int, SyncItem] = {}
        self.order: list[int] = []

    def raise_floor(self, floor: int) -> None:
        """Raise the floor and forget the tombstones below it. Amortised O(log n): every seq is forgotten once."""
        if floor > self.floor:
            self.floor = floor
            order = self.order
            while order and order[0] < floor:
                del self.verdicts[heappop(order)]

    def add_tombstone(self, item: SyncItem) -> None:
        seq = item.reg.seq
        if seq >= self.floor and seq not in self.verdicts:
            self.verdicts[seq] = item
            heappush(self.order, seq)

    def find(self, reg: Reg) -> SyncItem | None:
        """Return the tombstone of a registration that must not make a cell, or None."""
        if reg.seq < self.floor:
            return SyncItem(reg, Progress.UNKNOWN, Code.BELOW_FLOOR, True)
        return self.verdicts.get(reg.seq)

    def beyond(self, reg: Reg) -> bool:
        return reg.seq >= self.floor + self.window

    def fork(self) -> Tombstones:
        other = Tombstones(self.incarnation, self.window)
        other.floor = self.floor
        other.verdicts = self.verdicts.copy()
        other.order = self.order.copy()
        return other

    def fingerprint(self) -> tuple[object, ...]:
        return (self.incarnation, self.floor, tuple(sorted(self.verdicts.items())))
