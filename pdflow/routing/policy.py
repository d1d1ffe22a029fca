"""Policies for the engine of the next leg: round robin, or the least loaded by the router's own count of open legs.

The router counts what it has dispatched and what has ended; it asks no engine, so that a policy sees in simulation
exactly what it sees live. Policies that look at the request are in files of their own: `two_choices`, `prefix_aware`,
`affinity`. They share what is here: which engines are up, and how many legs each has.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import lcm
from typing import Literal, TypeAlias

from pdflow.routing.events import RequestArrived

Policy: TypeAlias = Literal["round-robin", "least-loaded", "two-choices", "prefix-aware", "session-affinity"]


class Choice:
    """A policy over the engines of one role, by position, with the number of legs that each has open."""

    __slots__ = ("loads", "next_turn", "open_tokens", "policy", "up")

    def __init__(self, policy: Policy, engines: int) -> None:
        self.policy = policy
        self.loads = [0] * engines
        self.up = [True] * engines
        self.next_turn = 0
        self.open_tokens = 0
        """Prompt tokens of all open legs, as far as arrivals give them."""

    def fork(self) -> Choice:
        return self.copied_to(Choice(self.policy, 0))

    def copied_to(self, other: Choice) -> Choice:
        """Copy the state that every policy has to `other`, and return that."""
        other.loads = self.loads.copy()
        other.up = self.up.copy()
        other.next_turn = self.next_turn
        other.open_tokens = self.open_tokens
        return other

    def fingerprint(self) -> Hashable:
        """The hashable state that the next choices depend on. Turns are counted modulo a number after which they
        repeat, however many engines are up."""
        return tuple(self.loads), tuple(self.up), self.next_turn % lcm(*range(1, len(self.up) + 1))

    def choose(self, asked: RequestArrived, avoid: int | None) -> int | None:
        """Open a leg of this request at an engine that is up, and at another one than `avoid` if there is one; None if
        all are down."""
        chosen = self.take(avoid)
        if chosen is not None:
            self.open_tokens += asked.prompt_tokens
        return chosen

    def ended(self, asked: RequestArrived, engine: int) -> None:
        """Record that the leg of this request at this engine has ended."""
        self.open_tokens -= asked.prompt_tokens
        self.give_back(engine)

    def pick(self, asked: RequestArrived, avoid: int | None) -> int | None:
        """Return the engine that `choose` would return, changing nothing."""
        return self.fork().take(avoid)

    def found(self, asked: RequestArrived, engine: int) -> int:
        """Return how many tokens of the request's prompt this engine probably has."""
        return 0

    def forget(self, engine: int) -> None:
        """Forget which KV this engine has: it has lost it."""

    def take(self, avoid: int | None = None) -> int | None:
        """Open a leg as `choose` does, without regard to the request."""
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
        """Record that a leg at this engine has ended."""
        assert self.loads[engine] > 0, "a leg must end only once"
        self.loads[engine] -= 1

    # For policies that look at the request.

    def candidates(self, avoid: int | None) -> list[int]:
        """Return the engines that are up, without `avoid` if there is another one."""
        up = [engine for engine, is_up in enumerate(self.up) if is_up]
        return [engine for engine in up if engine != avoid] or up

    def opened(self, asked: RequestArrived, engine: int) -> int:
        """Record a leg of this request at this engine, and return the engine."""
        self.loads[engine] += 1
        self.open_tokens += asked.prompt_tokens
        return engine
