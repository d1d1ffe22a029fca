"""Which engine gets the next leg: round robin, or the least loaded by the router's own count of open legs.

The router counts what it has dispatched and what has ended; it asks no engine, so that a policy sees in simulation
exactly what it sees live. Policies that look at the request stand in files of their own: `two_choices`, `prefix_aware`,
`affinity`. They share what is here: who is up, and what is open where.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import lcm
from typing import Literal, TypeAlias

from pdflow.routing.events import RequestArrived

Policy: TypeAlias = Literal["round-robin", "least-loaded", "two-choices", "prefix-aware", "session-affinity"]


class Choice:
    """The engines of one role, by position, and how many legs each has open."""

    __slots__ = ("loads", "next_turn", "open_tokens", "policy", "up")

    def __init__(self, policy: Policy, engines: int) -> None:
        self.policy = policy
        self.loads = [0] * engines
        self.up = [True] * engines
        self.next_turn = 0
        self.open_tokens = 0
        """Prompt tokens of all open legs, as far as arrivals say them."""

    def fork(self) -> Choice:
        return self.copied_to(Choice(self.policy, 0))

    def copied_to(self, other: Choice) -> Choice:
        """The other one, which is in the same place now as far as it is like this one."""
        other.loads = self.loads.copy()
        other.up = self.up.copy()
        other.next_turn = self.next_turn
        other.open_tokens = self.open_tokens
        return other

    def fingerprint(self) -> Hashable:
        """All that the next choices depend on. Turns are counted on and on; where a turn falls repeats itself, however
        many engines are up."""
        return tuple(self.loads), tuple(self.up), self.next_turn % lcm(*range(1, len(self.up) + 1))

    def choose(self, asked: RequestArrived, avoid: int | None) -> int | None:
        """Open a leg of this request at an engine that is up, and at another one than `avoid` if there is one; None if
        all are down."""
        chosen = self.take(avoid)
        if chosen is not None:
            self.open_tokens += asked.prompt_tokens
        return chosen

    def ended(self, asked: RequestArrived, engine: int) -> None:
        """The leg of this request at this engine has ended."""
        self.open_tokens -= asked.prompt_tokens
        self.give_back(engine)

    def pick(self, asked: RequestArrived, avoid: int | None) -> int | None:
        """Which engine `choose` would say. Nothing changes."""
        return self.fork().take(avoid)

    def found(self, asked: RequestArrived, engine: int) -> int:
        """How many tokens of its prompt this engine probably has."""
        return 0

    def forget(self, engine: int) -> None:
        """What this engine remembered is gone."""

    def take(self, avoid: int | None = None) -> int | None:
        """`choose`, whatever is asked."""
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

    # For policies that look at the request.

    def candidates(self, avoid: int | None) -> list[int]:
        """Engines that are up; without `avoid` if there is another one."""
        up = [engine for engine, is_up in enumerate(self.up) if is_up]
        return [engine for engine in up if engine != avoid] or up

    def opened(self, asked: RequestArrived, engine: int) -> int:
        """A leg of this request is open there from now on."""
        self.loads[engine] += 1
        self.open_tokens += asked.prompt_tokens
        return engine
