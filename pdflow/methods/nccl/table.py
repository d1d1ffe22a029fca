"""The table of open NCCL groups, of which a rank keeps a limited number: idle groups are closed for new ones.

A group takes memory of both its ranks, so both close it at once, and only if no operation uses it. A rank closes the
group that has been idle for longest. If none is idle, an operation that needs another group waits, and stops no other.

PR #18242 never closes a group; its reviewers asked for that. `nccl.groups` says what a group
takes, and how many there are without a limit.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, TypeAlias

from pdflow.protocol.values import Address, Instant

Ranks: TypeAlias = tuple[Address, Address]
"""A rank of P's and one of D's."""


class OpenGroup:
    """A group that is open. `users` is the number of operations over it."""

    __slots__ = ("ranks", "ready_ns", "users")

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.users = 0
        self.ready_ns: Instant = 0
        """When it is made, set by the code that makes it."""


class Use(NamedTuple):
    """The group that an operation has been given."""

    group: OpenGroup
    made: bool
    """The group was not open before."""
    again: bool
    """The group is made, and had been open once."""
    closed: tuple[Ranks, ...]
    """Groups that were closed to make room for it."""


class Groups:
    """The open groups of all ranks. Args: `most`: how many a rank keeps. Each call costs O(1), but for a death."""

    __slots__ = ("closed", "counts", "idle", "most", "open")

    def __init__(self, most: int) -> None:
        self.most = most
        self.open: dict[Ranks, OpenGroup] = {}
        self.counts: dict[Address, int] = {}
        """How many each rank has."""
        self.idle: dict[Address, dict[OpenGroup, None]] = {}
        """The idle groups of each rank, the one that has been idle for longest first."""
        self.closed: set[Ranks] = set()
        """Groups that there have been, and are not."""

    def use(self, p_rank: Address, d_rank: Address) -> Use | Address:
        """Begin an operation and return its group; or the rank all of whose groups are in use, if it has to wait."""
        ranks = (p_rank, d_rank)
        group = self.open.get(ranks)
        if group is not None:
            if not group.users:
                self._forget_idle(group)
            group.users += 1
            return Use(group, False, False, ())
        victims = []
        for rank in ranks:
            if self.counts.get(rank, 0) >= self.most:
                victim = next(iter(self.idle.get(rank, ())), None)
                if victim is None:
                    return rank
                victims.append(victim)
        for victim in victims:
            self._forget_idle(victim)
            self._close(victim)
            self.closed.add(victim.ranks)
        again = ranks in self.closed
        self.closed.discard(ranks)
        group = self.open[ranks] = OpenGroup(ranks)
        group.users = 1
        for rank in ranks:
            self.counts[rank] = self.counts.get(rank, 0) + 1
        return Use(group, True, again, tuple([victim.ranks for victim in victims]))

    def done(self, group: OpenGroup) -> bool:
        """End an operation over a group. True if the group is idle now; not if it has gone with one of its ranks."""
        group.users -= 1
        assert group.users >= 0, "an operation ends once"
        if group.users or self.open.get(group.ranks) is not group:
            return False
        for rank in group.ranks:
            self.idle.setdefault(rank, {})[group] = None
        return True

    def has_room(self, rank: Address) -> bool:
        """Whether a rank can have another group."""
        return self.counts.get(rank, 0) < self.most or bool(self.idle.get(rank))

    def died(self, dead: Collection[Address]) -> list[Address]:
        """Close the groups of ranks that have died, and return the ranks that now have room. Processes that replace the
        dead ones have met no peer yet."""
        left: list[Address] = []
        for group in [group for ranks, group in self.open.items() if ranks[0] in dead or ranks[1] in dead]:
            if not group.users:
                self._forget_idle(group)
            self._close(group)
            left += group.ranks
        self.closed = {ranks for ranks in self.closed if ranks[0] not in dead and ranks[1] not in dead}
        return left

    def _forget_idle(self, group: OpenGroup) -> None:
        for rank in group.ranks:
            del self.idle[rank][group]

    def _close(self, group: OpenGroup) -> None:
        del self.open[group.ranks]
        for rank in group.ranks:
            self.counts[rank] -= 1
