"""Two engines that form an NCCL group, which either may initiate, or both at once.

`rank_in_group` decides which engine is rank 0. An engine that has joined a group reads nothing until the other has, as
the call blocks its listener (PR #18242).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from pdflow.methods.guards import Guards
from pdflow.methods.nccl.ranks import rank_in_group
from pdflow_sim.check.datapath.findings import Finding
from pdflow_sim.check.search.forward import Move, Violation

ENGINES = ("a:0", "b:0")
NEW, PLEASE = "NEW", "asks for NEW"


class Pairing:
    """A state of two engines that pair; implements `Explorable` of `search.py`."""

    def __init__(self, guards: Guards) -> None:
        self.guards = guards
        self.initiated = [False, False]
        self.joined: list[tuple[str, int] | None] = [None, None]
        """By engine: the engine that has made the id of the group it has joined, and its rank there."""
        self.air: tuple[tuple[int, str], ...] = ()
        """Messages under way: the receiver and the text."""
        self.action = ""
        self.faults = 0

    def fingerprint(self) -> Hashable:
        return tuple(self.initiated), tuple(self.joined), tuple(sorted(self.air))

    def moves(self) -> Iterator[Move]:
        for e in range(2):
            if not self.initiated[e] and self.joined[e] is None:
                yield ("initiate", e, 0)
        for i, (to, _) in enumerate(self.air):
            if self.joined[to] is None or self.together():
                yield ("receive", to, i)

    def after(self, move: Move) -> Pairing:
        other = Pairing(self.guards)
        other.initiated, other.joined, other.air = self.initiated.copy(), self.joined.copy(), self.air
        verb, e, i = move
        getattr(other, verb)(e, i)
        return other

    def initiate(self, e: int, _: int) -> None:
        self.initiated[e] = True
        rank = rank_in_group(ENGINES[e], ENGINES[1 - e], True, self.guards)
        if rank == 0:
            self.make(e)
        else:
            self.send(e, PLEASE)

    def receive(self, e: int, i: int) -> None:
        what = self.air[i][1]
        self.air = self.air[:i] + self.air[i + 1 :]
        self.action = f"{ENGINES[e]} receives: {what}"
        if self.joined[e] is not None:
            return
        rank = rank_in_group(ENGINES[e], ENGINES[1 - e], what == PLEASE, self.guards)
        if what == PLEASE and rank == 0:
            self.make(e)
        elif what == NEW:
            self.joined[e] = (ENGINES[1 - e], rank)

    def make(self, e: int) -> None:
        self.joined[e] = (ENGINES[e], 0)
        self.send(e, NEW)

    def send(self, e: int, what: str) -> None:
        self.action = f"{ENGINES[e]} sends: {what}"
        self.air += ((1 - e, what),)

    def together(self) -> bool:
        """True if both are in one group, as different ranks."""
        a, b = self.joined
        return a is not None and b is not None and a[0] == b[0] and {a[1], b[1]} == {0, 1}

    def at_rest(self) -> None:
        """Raise Violation unless both are in one group."""
        if not self.together():
            raise Violation(Finding.GROUPS, "each engine waits for the other in another group")
