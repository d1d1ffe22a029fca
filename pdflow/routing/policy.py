"""Which engine gets the next leg: round robin, or the least loaded by the router's own count of open legs.

The router counts what it has dispatched and what has ended; it asks no engine, so that a policy sees in simulation
exactly what it sees live.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import lcm
from typing import Literal, TypeAlias

Policy: TypeAlias = Literal["round-robin", "least-loaded"]


class Choice:
    """The engines of one role, by position, and how many legs each has open."""

    __slots__ = ("loads", "next_turn", "policy", "up")

    def __init__(self, policy: Policy, engines: int) -> None:
        self.policy = policy
        self.loads = [0] * engines
        self.up = [True] * engines
        self.next_turn = 0

    def fork(self) -> Choice:
        other = Choice(self.policy, 0)
        other.loads = self.loads.copy()
        other.up = self.up.copy()
        other.next_turn = self.next_turn
        return other

    def fingerprint(self) -> Hashable:
        """All that the next choices depend on. Turns are counted on and on; where a turn falls repeats itself, however
        many engines are up."""
        return tuple(self.loads), tuple(self.up), self.next_turn % lcm(*range(1, len(self.up) + 1))

    def take(self, avoid: int | None = None) -> int | None:
        """Open a leg at an engine that is up, and at another one than `avoid` if there is one; None if all are down."""
        up = [engine for engine, is_up in enumerate(self.up) if is_up] if not all(self.up) else range(len(self.up))
        if not up:
            return None
        if self.policy == "round-robin":
            chosen = up[self.next_turn % len(up)]
            self.next_turn += 1
            if chosen == avoid and len(up) > 1:
                chosen = up[self.next_turn % len(up)]
                self.next_turn += 1
        else:
            loads = self.loads
            chosen = min((e for e in up if e != avoid or len(up) == 1), key=loads.__getitem__)
        self.loads[chosen] += 1
        return chosen

    def give_back(self, engine: int) -> None:
        """A leg at this engine has ended."""
        assert self.loads[engine] > 0, "a leg ends once"
        self.loads[engine] -= 1
