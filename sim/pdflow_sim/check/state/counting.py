"""Renumbering of SYNCs, which makes the states of engines with clocks finitely many.

SYNC numbers only grow, and with clocks there is no end to them. But an endpoint only compares a number with the one
that it waits for, so only the distance from the lowest number that a state still contains matters: two states whose
numbers all differ by the same amount have the same future (tests/check/test_counting.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import getitem

from pdflow_sim.check.state.space import StateSpace
from pdflow_sim.check.state.symmetry import Names, Renaming, Renumbering, Slots

NONE = 1 << 30
COUNTED = "SYNCs numbered from the lowest one in use"


class Less:
    """A table of numbers that maps each to the number less `by`."""

    def __init__(self, by: int) -> None:
        self.by = by

    def get(self, number: int, _: int) -> int:
        return number - self.by


class Noted:
    """A table of numbers that maps each to itself, and notes the lowest that was looked up."""

    def __init__(self) -> None:
        self.lowest = NONE

    def get(self, number: int, _: int) -> int:
        self.lowest = min(self.lowest, number)
        return number


class Counting:
    """The renumbering of SYNCs in the states of one world."""

    def __init__(self, space: StateSpace) -> None:
        self.space = space
        count = len(space.beginning())
        none, ends, chans = Renumbering(lambda _: NONE), Renumbering(self._in_end), Renumbering(self._in_chan)
        self.lowest = [none] * count
        self.lowest[: space.bag] = [ends] * space.first_link + [chans] * (space.bag - space.first_link)
        self.lowest[space.bag] = Renumbering(self._in_bag)
        self.lower: dict[int, Renaming] = {}

    def __str__(self) -> str:
        return COUNTED

    def canonical(self, state: Sequence[int]) -> Iterable[int]:
        """Return the same state with its SYNC numbers counted from 1."""
        lowest = self.lowest_in(state)
        if lowest <= 1 or lowest == NONE:
            return state
        renaming = self.lower.get(lowest)
        if renaming is None:
            renaming = self.lower[lowest] = self.less(lowest - 1)
        return renaming(state)

    def lowest_in(self, state: Sequence[int]) -> int:
        """Return the lowest SYNC number in a state; NONE if D has sent no SYNC yet: its first will be 1, whatever else
        the state contains."""
        return min(map(getitem, self.lowest, state))

    def less(self, by: int) -> Renaming:
        return Slots(self.space, self._names(Less(by))).renaming()

    def _names(self, numbers: Less | Noted) -> Names:
        cluster = self.space.cluster
        names = Names(range(len(cluster.requests)), range(len(cluster.xids)))
        names.numbers = {"synced": numbers}
        return names

    def _in_end(self, number: int) -> int:
        noted = Noted()
        self._names(noted).body(self.space.bodies[number])
        return noted.lowest

    def _in_chan(self, number: int) -> int:
        return self._in_frames(self.space.chans.values[number])

    def _in_bag(self, number: int) -> int:
        return self._in_frames(frame for _, frame in self.space.bags.values[number])

    def _in_frames(self, frames: Iterable[int]) -> int:
        noted = Noted()
        for frame in frames:
            self._names(noted).value(self.space.frames.values[frame])
        return noted.lowest
