"""What the router has done, counted without it: engines, attempts, legs and answers.

An account gets each event before the router handles it and each effect after, and knows from them alone which engines
are up, which legs are open and which clients wait. What the router counts itself must agree (rules.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeAlias

from pdflow.protocol.ids import EngineInfo
from pdflow.protocol.messages import Code
from pdflow.protocol.values import EngineId, Instant, RequestId
from pdflow.routing.effects import (
    AbortLeg,
    EngineLeft,
    EngineSilent,
    ReportPrefill,
    ResumeAnswer,
)
from pdflow.routing.events import (
    DecodeEnded,
    EngineChanged,
    EngineJoins,
    EngineLeaves,
    EngineLost,
    EngineReported,
    FirstTokenDelivered,
    PrefillAnswered,
    RequestArrived,
)
from pdflow.routing.heartbeats import Seat
from pdflow_sim.check.routers.findings import RouterFinding
from pdflow_sim.check.routers.setting import RouterSetting
from pdflow_sim.check.search.forward import Violation

Role: TypeAlias = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")
LegKey: TypeAlias = tuple[Role, RequestId]


class CountedLeg(NamedTuple):
    """A leg that its engine may still answer."""

    engine: int
    open: bool = True
    """Neither answered nor aborted: the router waits for it."""
    weighs: int = 0
    """The tokens that it adds to what waits at its engine, for policies that look at prompts."""
    awaits_token: bool = False
    """It cannot decode before P's first token is forwarded to it."""
    returns_token: bool = False
    """P is asked for the first token of the answer."""
    begun: bool = False
    """The first piece of its answer has arrived."""
    dropped: bool = False
    """Its answer is dropped: the leg does not end, and must be aborted."""
    whole: bool = False
    """The last piece of its answer has arrived, and its end has not."""
    delivered: bool = False
    """The router knows that the client has the first token of its answer."""


class Begun(NamedTuple):
    """An attempt that the router has begun."""

    request: int
    number: int
    p: int = -1
    d: int = -1
    reports: int = 0
    """How often the end of the prefill leg was reported to D."""


class LegAccount:
    """The account of a router's engines, attempts, legs and answers."""

    per_event: ClassVar[frozenset[str]] = frozenset({"setting", "event", "silent", "failed"})
    """Fields that matter only while an event is handled."""

    def __init__(self, setting: RouterSetting) -> None:
        self.setting = setting
        self.now: Instant = 0
        self.infos: dict[Seat, EngineInfo] = setting.infos()
        self.reported_up: dict[Seat, bool] = dict.fromkeys(self.infos, True)
        self.last_reports: dict[Seat, Instant] = {}
        """The last report of each engine that has reported lately."""
        self.leaving: frozenset[EngineId] = frozenset()
        self.left: frozenset[EngineId] = frozenset()
        self.legs: dict[LegKey, CountedLeg] = {}
        self.attempts: dict[RequestId, Begun] = {}
        self.waiting: dict[int, RequestArrived] = {}
        """Requests that the router has accepted, and not answered."""
        self.streaming: dict[int, RequestId] = {}
        """The attempt of which the router knows that its client has a token, or the one that is to continue behind
        it."""
        self.due: dict[int, Instant] = {}
        """When each request is to be hedged."""
        self.hedged: frozenset[int] = frozenset()
        self.last_choices: dict[Role, tuple[int, tuple[int, ...]]] = {}
        """The last engine chosen for each leg, and which were up then."""
        self.sessions: dict[tuple[Role, int], tuple[int, int]] = {}
        """The engine that each session's last leg was sent to, and its prompt's tokens."""
        self.known: dict[Seat, frozenset[int]] = dict.fromkeys(self.infos, frozenset())
        """The names of prefix blocks that each engine has."""
        self.late = setting.late
        """How many legs may still end at the moment at which they are aborted."""
        self.event: Any = None
        self.silent: set[EngineId] = set()
        """Engines that fell silent by the time of this event."""
        self.failed: Seat | None = None
        """The engine whose leg fails with this event."""

    def fork(self) -> Self:
        other = type(self).__new__(type(self))
        vars(other).update({name: value.copy() if type(value) is dict else value for name, value in vars(self).items()})
        return other

    def fingerprint(self) -> Hashable:
        return tuple(
            (tuple(value.items()) if name in ("attempts", "waiting") else frozenset(value.items()))
            if type(value) is dict
            else value
            for name, value in vars(self).items()
            if name not in self.per_event
        )

    # Engines.

    def engines(self, role: Role) -> range:
        return range(self.setting.p if role == "prefill" else self.setting.d)

    def is_up(self, seat: Seat) -> bool:
        """Whether an engine may get legs."""
        if self.infos[seat].engine in self.leaving | self.left:
            return False
        return self.reported_up[seat] if self.setting.rules.silence_ns is None else seat in self.last_reports

    def up(self, role: Role) -> list[int]:
        return [engine for engine in self.engines(role) if self.is_up((role, engine))]

    def loads(self, role: Role) -> list[int]:
        """Return how many legs are open at each engine."""
        loads = [0] * len(self.engines(role))
        for (which, _), leg in self.legs.items():
            if which == role and leg.open:
                loads[leg.engine] += 1
        return loads

    def open_names(self) -> dict[RequestId, None]:
        """Return the attempts that have an open leg, in the order of their legs."""
        return {name: None for (_, name), leg in self.legs.items() if leg.open}

    def open_of(self, request: int) -> list[RequestId]:
        """Return the attempts of a request that have an open leg."""
        return [name for name in self.open_names() if self.attempts[name].request == request]

    def asked(self, name: RequestId) -> RequestArrived:
        return self.setting.requests[self.attempts[name].request]

    def made(self, request: int) -> int:
        """Return how many attempts of a request have begun."""
        return sum(begun.request == request for begun in self.attempts.values())

    def users(self, engine: int) -> int:
        """Return how many open attempts were sent to a prefill engine."""
        return sum(self.attempts[name].p == engine for name in self.open_names())

    def in_use(self, engine: EngineId) -> bool:
        """Whether an attempt has a leg at an engine, or KV from it."""
        loads = self.loads("decode")
        return any(
            self.users(index) if role == "prefill" else loads[index]
            for (role, index), info in self.infos.items()
            if info.engine == engine
        )

    # Events, before the router handles them.

    def before(self, event: Any, now: Instant) -> None:
        self.event, self.now, self.failed = event, now, None
        silence = self.setting.rules.silence_ns
        gone = [] if silence is None else [seat for seat, at in self.last_reports.items() if at + silence <= now]
        self.silent = {self.infos[seat].engine for seat in gone}
        for seat in gone:
            del self.last_reports[seat]
            self._forget(seat)
        match event:
            case PrefillAnswered():
                self._ended("prefill", event.request_id, event.params is None)
            case DecodeEnded():
                self._ended("decode", event.request_id, event.code is not Code.NONE)
            case FirstTokenDelivered() if event.request in self.waiting:
                self.streaming.setdefault(event.request, event.request_id)
                self.due.pop(event.request, None)
            case EngineChanged() | EngineLost():
                self._changed(event)
            case EngineLeaves():
                self._forget(self.seat_of(event.engine))
                self.leaving |= {event.engine} - self.left
            case EngineJoins():
                self.leaving, self.left = self.leaving - {event.engine}, self.left - {event.engine}
                self._forget(self.seat_of(event.engine))
                self.reported_up[self.seat_of(event.engine)] = True
            case EngineReported():
                self._became((event.role, event.engine), event.info)
                self.last_reports[event.role, event.engine] = now
            case RequestArrived():
                self.waiting[event.request] = event

    def seat_of(self, engine: EngineId) -> Seat:
        return next(seat for seat, info in self.infos.items() if info.engine == engine)

    def _ended(self, role: Role, name: RequestId, failed: bool) -> None:
        leg = self.legs.pop((role, name))
        if leg.open:
            self.failed = (role, leg.engine) if failed else None
            return
        self.late -= 1
        if not self.late:
            self.legs = {key: other for key, other in self.legs.items() if other.open}

    def _forget(self, seat: Seat) -> None:
        """Forget what is known of how an engine works."""

    def _changed(self, event: EngineChanged | EngineLost) -> None:
        seat = self.seat_of(event.engine)
        self._forget(seat)
        if isinstance(event, EngineLost):
            self.reported_up[seat] = False
            self.known[seat] = frozenset()
            for key in [key for key, (at, _) in self.sessions.items() if (key[0], at) == seat]:
                del self.sessions[key]
        else:
            self.reported_up[seat] = event.up
            if event.became is not None:
                self._became(seat, event.became)

    def _became(self, seat: Seat, info: EngineInfo) -> None:
        """Record an engine's new incarnation, which is as much in or out as the one before."""
        before, self.infos[seat] = self.infos[seat].engine, info
        for group in ("leaving", "left"):
            if before in getattr(self, group):
                setattr(self, group, getattr(self, group) - {before} | {info.engine})

    # Effects.

    def aborted(self, effect: AbortLeg) -> None:
        key = (effect.role, effect.request_id)
        leg = self.legs.get(key)
        if leg is None or not leg.open:
            raise Violation(RouterFinding.DISPATCH, f"{effect} aborts a leg that is not open")
        if leg.engine != effect.engine:
            what = f"{effect.request_id} is at {effect.role} {leg.engine}, and is aborted at {effect.engine}"
            raise Violation(RouterFinding.ENGINE, what)
        if self.late:
            self.legs[key] = leg._replace(open=False)
        else:
            del self.legs[key]

    def resumed(self, effect: ResumeAnswer) -> None:
        request = effect.request
        if not self.setting.resumes or request not in self.streaming:
            raise Violation(RouterFinding.DISPATCH, f"{effect}, and its client has received nothing")
        if effect.request_id != f"r{request}.{self.made(request) + 1}":
            raise Violation(RouterFinding.DISPATCH, f"{effect} names no attempt that follows")
        self.streaming[request] = effect.request_id

    def over(self, request: int) -> None:
        """Record that a request is answered. Of its attempts only their numbers are kept."""
        del self.waiting[request]
        self.due.pop(request, None)
        self.streaming.pop(request, None)
        self.hedged -= {request}
        for name, begun in self.attempts.items():
            if begun.request == request:
                self.attempts[name] = Begun(request, begun.number, reports=begun.reports)

    def reported(self, effect: ReportPrefill) -> None:
        begun = self.attempts[effect.request_id]
        failed = self.failed is not None and self.failed[0] == "prefill" and self.event.request_id == effect.request_id
        if effect.engine != begun.d or effect.ok == failed:
            raise Violation(RouterFinding.REPORT, f"D {begun.d} has {effect.request_id}, and this is sent: {effect}")
        self.attempts[effect.request_id] = begun._replace(reports=begun.reports + 1)

    def gone(self, effect: EngineLeft) -> None:
        if effect.engine not in self.leaving or self.in_use(effect.engine):
            raise Violation(RouterFinding.MEMBER, f"{effect.engine} is said to have left, and is not leaving or in use")
        self.leaving, self.left = self.leaving - {effect.engine}, self.left | {effect.engine}

    def fell_silent(self, effect: EngineSilent) -> None:
        if effect.engine not in self.silent or effect.abandoned != self.setting.rules.abandons_silent:
            raise Violation(RouterFinding.MEMBER, f"{effect.engine} is called silent: {effect}")
        self.silent = self.silent - {effect.engine}

    def closed(self) -> Iterator[Begun]:
        """Yield the attempts without an open leg, of requests that wait."""
        open_names = self.open_names()
        for name, begun in self.attempts.items():
            if begun.request in self.waiting and name not in open_names:
                yield begun
