"""The settings in which routers are explored: engines, a policy, rules, requests, and budgets of faults."""

from __future__ import annotations

import attrs

from pdflow.protocol.ids import EngineInfo, Shards
from pdflow.routing.affinity import SessionAffinity
from pdflow.routing.events import RequestArrived
from pdflow.routing.governed import GovernedRouter, Rules
from pdflow.routing.heartbeats import Seat
from pdflow.routing.hedging import HedgingRouter
from pdflow.routing.policy import Choice, Policy
from pdflow.routing.prefix_aware import PrefixAware
from pdflow.routing.router import Dispatch
from pdflow.routing.two_choices import TwoChoices
from pdflow.routing.watching import WatchingRouter

BLOCK_TOKENS = 16
"""Tokens that one name of a prefix stands for."""
NAMES = 100
"""The names that the router remembers of each engine: more than there are."""


def info(seat: Seat, incarnation: int = 0) -> EngineInfo:
    return EngineInfo(f"{seat[0]}-{seat[1]}.{incarnation}", Shards(1, 1, BLOCK_TOKENS))


@attrs.frozen(kw_only=True)
class RouterSetting:
    """One setting. Times are in ticks."""

    name: str
    states: int
    """The number of states that an exploration finds."""
    requests: tuple[RequestArrived, ...] = (RequestArrived(0, prompt_tokens=10), RequestArrived(1, prompt_tokens=90))
    p: int = 2
    d: int = 2
    aggregated: frozenset[int] = frozenset()
    policy: Policy = "least-loaded"
    names: int = NAMES
    """How many names of prefix blocks the policy remembers of each engine. With fewer than NAMES its choices are not
    judged, since the account forgets none."""
    dispatch: Dispatch = "concurrent"
    attempts: int = 1
    hedge_after: int | None = None
    rules: Rules = attrs.field(factory=Rules)
    resumes: bool = False
    reports: bool = False
    """The end of the prefill leg is reported to D, as in dialects without control frames."""
    first_from_prefill: bool = False
    ticks: int = 0
    """How often the clock advances."""
    checks: int = 0
    """How often the driver checks which engines have sent anything."""
    idle: bool = False
    """Whether engines that respond may have run no step."""
    failures: int = 0
    """Legs that fail."""
    refusals: int = 0
    """Legs that an engine rejects: the request is at fault."""
    late: int = 0
    """Legs that end at the moment at which the router aborts them."""
    disconnects: int = 0
    deaths: int = 0
    """Engines that die. Each comes up again, as another incarnation."""
    leaves: int = 0
    """Engines that must leave. Each may join again."""
    tears: int = 0
    """Answers that are to be resumed and cannot be: an incomplete piece has reached the client."""

    def infos(self) -> dict[Seat, EngineInfo]:
        """Return the engines when the router starts."""
        seats: list[Seat] = [("prefill", engine) for engine in range(self.p)]
        seats += [("decode", engine) for engine in range(self.d)]
        return {seat: info(seat) for seat in seats}

    def choice(self, role: str) -> Choice:
        engines = self.p if role == "prefill" else self.d
        match self.policy:
            case "two-choices":
                return TwoChoices(engines, 3)
            case "prefix-aware":
                return PrefixAware((self.names,) * engines, BLOCK_TOKENS, stays=role == "decode")
            case "session-affinity":
                return SessionAffinity(engines)
            case policy:
                return Choice(policy, engines)

    def router(self) -> GovernedRouter:
        """Return a router that has just started."""
        prefill = tuple(info(("prefill", engine)) for engine in range(self.p))
        decode = tuple(info(("decode", engine)) for engine in range(self.d))
        choices = self.choice("prefill"), self.choice("decode")
        limits = self.rules, self.attempts, self.reports, self.aggregated, self.resumes
        if self.hedge_after is None:
            kind = GovernedRouter if self.rules.stall is None else WatchingRouter
            return kind(prefill, decode, self.dispatch, choices, *limits)
        return HedgingRouter(prefill, decode, self.dispatch, choices, *limits, hedge_after_ns=self.hedge_after)
