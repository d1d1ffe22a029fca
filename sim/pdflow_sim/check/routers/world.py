"""A router, its clients and its engines, as far as they matter to it: the moves of an exploration.

Engines are only what they answer: well, badly, late although the leg was aborted, or never because they died. What
reaches a client is decided by the real `Answer`, as in the drivers (sim/pdflow_sim/nodes/router_node.py). The router
learns of a client's first token some time after the client has it. An answer that is to be resumed is continued, or
ends, when nothing more of it is under way.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from pdflow.protocol.events import TimeReached
from pdflow.protocol.ids import KvParams
from pdflow.protocol.messages import Code
from pdflow.protocol.values import EngineId, RequestId
from pdflow.routing.answer import Answer, Ending, PieceUse
from pdflow.routing.effects import (
    AbortLeg,
    DispatchAlone,
    DispatchDecode,
    DispatchPrefill,
    EngineSilent,
    Reply,
    ResumeAnswer,
)
from pdflow.routing.events import (
    AnswerEnded,
    ClientGone,
    DecodeEnded,
    EngineChanged,
    EngineJoins,
    EngineLeaves,
    EngineLost,
    EngineReported,
    EnginesChecked,
    FirstTokenDelivered,
    PrefillAnswered,
)
from pdflow.routing.heartbeats import Seat
from pdflow_sim.check.routers.account import LegKey, Role
from pdflow_sim.check.routers.findings import RouterFinding
from pdflow_sim.check.routers.rules import check_effect, check_end, check_state
from pdflow_sim.check.routers.setting import RouterSetting, info
from pdflow_sim.check.routers.watched_account import RouterAccount
from pdflow_sim.check.search.forward import Move, Violation, attributed

FAILURES, REFUSALS, DISCONNECTS, DEATHS, LEAVES, TEARS, TICKS, CHECKS = range(8)


class RouterWorld:
    """One state of the exploration: the router, the account of what it has done, and the answers of the clients."""

    def __init__(self, setting: RouterSetting) -> None:
        self.setting = setting
        self.router = setting.router()
        self.account = RouterAccount(setting)
        self.answers = [Answer(asked.streams, setting.first_from_prefill) for asked in setting.requests]
        self.tokens: tuple[RequestId, ...] = ()
        """Attempts whose first token has not been reported to the router."""
        self.settling: tuple[int, ...] = ()
        """Requests that are to be resumed, whose last pieces may still be under way: no leg for them has been sent."""
        self.abandoned: tuple[str, ...] = ()
        """Engines that have fallen silent, whose connections are about to be broken."""
        self.whole: frozenset[int] = frozenset()
        """Requests whose clients have the whole answer, while its leg has not ended."""
        self.to_come = 0
        """The next request."""
        self.left: tuple[int, ...] = (
            *(setting.failures, setting.refusals, setting.disconnects),
            *(setting.deaths, setting.leaves, setting.tears, setting.ticks, setting.checks),
        )
        self.now = 0
        self.dead: frozenset[Seat] = frozenset()
        self.action = ""

    @property
    def faults(self) -> int:
        return sum(self.left[:TICKS])

    def fork(self) -> RouterWorld:
        other = RouterWorld.__new__(RouterWorld)
        vars(other).update(vars(self))
        other.router = self.router.fork()  # type: ignore[assignment]
        other.account = self.account.fork()
        other.answers = [answer.fork() for answer in self.answers]
        return other

    def fingerprint(self) -> Hashable:
        answers = tuple(answer.fingerprint() for answer in self.answers)
        around = self.tokens, self.settling, self.abandoned, self.whole, self.to_come, self.left, self.now, self.dead
        return self.router.fingerprint(), self.account.fingerprint(), answers, around

    # Moves.

    def moves(self) -> Iterator[Move]:
        account, left = self.account, self.left
        if self.to_come < len(self.setting.requests):
            yield ("arrive", self.to_come, 0)
        for key in account.legs:
            yield from self._leg_moves(key)
        for name in self.tokens:
            yield ("report", *_numbers(name))
        if left[DISCONNECTS]:
            for request in account.waiting:
                yield ("disconnect", request, 0)
        for number in range(len(self.abandoned)):
            yield ("break", number, 0)
        for request in self.settling:
            yield ("settle", request, 0)
            if left[TEARS] and not self.answers[request].over:
                yield ("tear", request, 0)
        yield from self._engine_moves()
        wake_at = self.router.wake_at()
        if wake_at is not None and wake_at <= self.now:
            yield ("wake", 0, 0)
        if left[TICKS]:
            yield ("tick", 0, 0)
        if left[CHECKS] and (account.waiting or account.stalled):
            yield from self._checks()

    def _checks(self) -> Iterator[Move]:
        """Yield the checks: any engines have sent something, and any others that were asked have responded. If that
        matters, some of these have run no step, and of any answers that have begun nothing has come."""
        may_send, (asked, idle, begun) = self._may_send(), self._signs()
        for active in range(1 << len(may_send)):
            sent = _chosen(may_send, active)
            for signs in range(1 << len(asked) + len(idle) + len(begun)):
                responding, still, _ = _split(signs, asked, idle, begun)
                if not any(engine in sent for engine in responding) and {*still} <= {*responding}:
                    yield ("check", active, signs)

    def _signs(self) -> tuple[list[EngineId], list[EngineId], list[RequestId]]:
        """Return the engines that may have responded, those of them of which it matters whether they have run a step,
        and the attempts of which nothing may have come."""
        asked, account = self._asked(), self.account
        waits = [(name, account.waits_for(name)) for name in account.open_names()]
        owing = {account.infos[seat].engine for name, seat in waits if account.response_counts(name, seat)}
        return asked, [engine for engine in asked if self.setting.idle and engine in owing], self._may_be_quiet()

    def _may_be_quiet(self) -> list[RequestId]:
        """Return the attempts whose answers have begun, where there are enough checks for them to hang."""
        rule = self.setting.rules.stall
        if rule is None or self.setting.checks <= rule.passed:
            return []
        return [name for name in self.account.open_names() if self.answers[_numbers(name)[0]].streaming == name]

    def _asked(self) -> list[EngineId]:
        """Return the engines that have been asked whether they respond, and are there."""
        return [
            info.engine
            for seat, info in self.account.infos.items()
            if info.engine in self.account.questions and seat not in self.dead
        ]

    def _may_send(self) -> list[EngineId]:
        """Return the engines that may have sent something since they were last checked."""
        seats = {(role, leg.engine): None for (role, _), leg in self.account.legs.items() if leg.open}
        return [self.account.infos[seat].engine for seat in seats if seat not in self.dead]

    def _leg_moves(self, key: LegKey) -> Iterator[Move]:
        """Yield what the engine of a leg may answer. A leg that was aborted may have ended before; what else is under
        way over its connection never arrives."""
        (role, name), leg = key, self.account.legs[key]
        numbers = _numbers(name)
        if not leg.open:
            yield (f"{role} late", *numbers)
            return
        if numbers[0] in self.settling:
            return
        if (role, leg.engine) in self.dead:
            yield (f"{role} unreachable", *numbers)
            return
        if leg.whole:
            yield (f"{role} ends", *numbers)
            return
        if not leg.awaits_token and not leg.dropped:
            if self._serves(role, name) and self.account.asked(name).streams and not leg.begun:
                yield (f"{role} token", *numbers)
            elif name not in self.tokens:
                yield (f"{role} ends", *numbers)
                if self.setting.resumes and leg.begun:
                    yield (f"{role} completes", *numbers)
            if leg.returns_token:
                yield (f"{role} finishes", *numbers)
        if name not in self.tokens:
            if self.left[FAILURES]:
                yield (f"{role} fails", *numbers)
            if self.left[REFUSALS]:
                yield (f"{role} rejects", *numbers)

    def _engine_moves(self) -> Iterator[Move]:
        account = self.account
        for seat, engine in account.infos.items():
            role, index = seat
            if index and self.setting.policy != "round-robin":
                continue  # The engines of a role are alike.
            if seat in self.dead:
                yield (f"{role} restarts", index, 0)
                continue
            if self.left[DEATHS]:
                yield (f"{role} dies", index, 0)
            if engine.engine in account.leaving | account.left:
                yield (f"{role} joins", index, 0)
            elif self.left[LEAVES]:
                yield (f"{role} leaves", index, 0)
        if self.setting.rules.silence_ns is not None:
            for role, index in account.infos:
                if (role, index) not in self.dead and account.last_reports.get((role, index)) != self.now:
                    yield (f"{role} heartbeat", index, 0)

    def _serves(self, role: Role, name: RequestId) -> bool:
        """Whether the answer comes from this leg. A prefill leg that a decode leg follows answers with KV alone."""
        begun = self.account.attempts[name]
        alone = self.setting.requests[begun.request].prefill_only or begun.p in self.setting.aggregated
        return role == "decode" or alone

    # What they lead to.

    def after(self, move: Move) -> RouterWorld:
        """Return the state that a move leads to. Raises Violation."""
        other = self.fork()
        other.action = f"{move[0]} {move[1]} {move[2]}"
        with attributed(other, RouterFinding.CRASH):
            other._make(*move)
        return other

    def at_rest(self) -> None:
        """Check a state without moves: every client is answered, and nothing is kept. Raises Violation."""
        if self.account.waiting:
            raise Violation(RouterFinding.STUCK, f"requests {[*self.account.waiting]} wait forever")
        check_end(self.router)

    def _make(self, verb: str, number: int, attempt: int) -> None:
        match verb.split():
            case ["arrive"]:
                self.to_come += 1
                self._feed(self.setting.requests[number])
            case ["report"]:
                self._report(f"r{number}.{attempt}")
            case ["disconnect"]:
                self._spend(DISCONNECTS)
                self._end_answer(number, "cancelled")
                self._feed(ClientGone(number))
            case ["break"]:
                engine = self.abandoned[number]
                self.abandoned = self.abandoned[:number] + self.abandoned[number + 1 :]
                if any(info.engine == engine for info in self.account.infos.values()):
                    self._feed(EngineLost(engine))
            case ["settle"]:
                self._settle(number, Code.NONE)
            case ["tear"]:
                self._spend(TEARS)
                self._settle(number, Code.IO)
            case ["wake"]:
                self._feed(TimeReached())
            case ["tick"]:
                self._spend(TICKS)
                self.now += 1
            case ["check"]:
                self._spend(CHECKS)
                responding, idle, quiet = _split(attempt, *self._signs())
                active = tuple(_chosen(self._may_send(), number))
                self._feed(EnginesChecked(active, tuple(responding), tuple(idle), tuple(quiet)))
            case [
                at,
                ("late" | "unreachable" | "token" | "completes" | "ends" | "finishes" | "fails" | "rejects") as how,
            ]:
                self._leg(_role(at), how, f"r{number}.{attempt}")
            case [at, how]:
                self._engine((_role(at), number), how)

    def _leg(self, role: Role, how: str, name: RequestId) -> None:
        match how:
            case "token":
                self._piece(role, name)
            case "completes":
                self._complete(role, name)
            case "fails" | "rejects":
                self._spend(FAILURES if how == "fails" else REFUSALS)
                self._leg_ends(role, name, Code.IO if how == "fails" else Code.REJECTED)
            case "unreachable":
                self._leg_ends(role, name, Code.UNREACHABLE)
            case "late":
                if name in self.tokens:
                    self._report(name)
                self._leg_ends(role, name, Code.NONE)
            case "finishes":
                self._leg_ends(role, name, Code.NONE, self._first_token(name, True))
            case _:
                self._ends_well(role, name)

    def _ends_well(self, role: Role, name: RequestId) -> None:
        """End a leg, with the last piece of its answer, or with P's first token."""
        request = self.account.attempts[name].request
        if self._serves(role, name):
            if not self.setting.requests[request].streams and not self._piece(role, name):
                return
            if name in self.tokens:
                self._report(name)
            if self.answers[request].streaming == name:
                self.answers[request].whole(name)
        elif self.account.legs["prefill", name].returns_token:
            self._first_token(name, False)
        self._leg_ends(role, name, Code.NONE)

    def _complete(self, role: Role, name: RequestId) -> None:
        """Pass on the last piece of an answer, whose leg has not ended yet."""
        request = self.account.attempts[name].request
        self.account.legs[role, name] = self.account.legs[role, name]._replace(whole=True)
        self.whole |= {request}
        if self.answers[request].streaming == name:
            self.answers[request].whole(name)

    def _settle(self, request: int, code: Code) -> None:
        """Continue an answer that is to be resumed, unless the client has all of it, or an incomplete piece."""
        self.settling = tuple(each for each in self.settling if each != request)
        if code is not Code.NONE or self.answers[request].over:
            self._feed(AnswerEnded(request, code))

    def _piece(self, role: Role, name: RequestId) -> bool:
        """Handle the first piece of a leg's answer; False if it is dropped: its leg has not ended, and must be
        aborted."""
        request = self.account.attempts[name].request
        answer = self.answers[request]
        streams = answer.streaming
        self.account.legs[role, name] = self.account.legs[role, name]._replace(begun=True)
        use = answer.piece_arrived(name)
        if use is PieceUse.DROP:
            self.account.legs[role, name] = self.account.legs[role, name]._replace(dropped=True)
            return False
        streams = streams or self.account.streaming.get(request)
        if request not in self.account.waiting or streams not in (None, name) or request in self.whole:
            raise Violation(RouterFinding.ANSWER, f"the client of {request} gets a piece of {name} behind {streams}")
        if use is PieceUse.FIRST:
            self.tokens += (name,)
        return True

    def _report(self, name: RequestId) -> None:
        self.tokens = tuple(each for each in self.tokens if each != name)
        self._feed(FirstTokenDelivered(_numbers(name)[0], name))

    def _first_token(self, name: RequestId, last: bool) -> bool:
        """Handle the first token that a prefill leg returns, as a driver does; True if it is the whole answer."""
        request = self.account.attempts[name].request
        use = self.answers[request].first_token_received(name, last)
        if use is None:
            return False
        if last:
            self._feed(FirstTokenDelivered(request, name))
        for leg in use.forward:
            awaiting = self.account.legs["decode", leg]
            if not awaiting.awaits_token:
                raise Violation(RouterFinding.TOKEN, f"{leg} gets P's first token a second time")
            self.account.legs["decode", leg] = awaiting._replace(awaits_token=False)
        for leg in use.cancel:
            self._leg_ends("decode" if ("decode", leg) in self.account.legs else "prefill", leg, Code.CANCELLED)
        return last

    def _leg_ends(self, role: Role, name: RequestId, code: Code, last: bool = False) -> None:
        request = _numbers(name)[0]
        if self._serves(role, name):
            self.tokens = tuple(each for each in self.tokens if each != name)
        self.answers[request].leg_ended(role, name)
        if role == "decode":
            self._feed(DecodeEnded(name, code))
            return
        engine = self.account.infos["prefill", self.account.legs["prefill", name].engine]
        params = KvParams(engine, f"x{name[1:]}", name, 5) if code is Code.NONE else None
        self._feed(PrefillAnswered(name, params, code, last))

    def _engine(self, seat: Seat, how: str) -> None:
        account = self.account
        engine = account.infos[seat].engine
        match how:
            case "dies":
                self._spend(DEATHS)
                self.dead |= {seat}
                for key in [key for key, leg in account.legs.items() if (key[0], leg.engine) == seat and not leg.open]:
                    del account.legs[key]
                self._feed(EngineLost(engine))
            case "restarts":
                self.dead -= {seat}
                became = info(seat, int(engine.rpartition(".")[2]) + 1)
                reports = self.setting.rules.silence_ns is not None
                self._feed(EngineReported(*seat, became) if reports else EngineChanged(engine, True, became))
            case "heartbeat":
                self._feed(EngineReported(*seat, account.infos[seat]))
            case "leaves":
                self._spend(LEAVES)
                self._feed(EngineLeaves(engine))
            case "joins":
                self._feed(EngineJoins(engine))
            case _:
                raise AssertionError(how)

    def _spend(self, kind: int) -> None:
        self.left = (*self.left[:kind], self.left[kind] - 1, *self.left[kind + 1 :])

    # The router.

    def _feed(self, event: Any) -> None:
        """Let the router handle an event, and check what it does."""
        self.account.before(event, self.now)
        for effect in self.router.handle(event, self.now):
            check_effect(self.account, effect)
            self._carry_out(effect)
        check_state(self.account, self.router)

    def _carry_out(self, effect: Any) -> None:
        """Do what a driver does with an effect."""
        legs = self.account.legs
        match effect:
            case DispatchPrefill() if effect.keeps:
                returns = self.answers[effect.request].prefill_dispatched()
                legs["prefill", effect.request_id] = legs["prefill", effect.request_id]._replace(returns_token=returns)
            case DispatchPrefill() if self.setting.first_from_prefill:
                self.answers[effect.request].alone_dispatched(effect.request_id)
            case DispatchDecode():
                awaits = self.answers[effect.request].decode_dispatched(effect.request_id)
                legs["decode", effect.request_id] = legs["decode", effect.request_id]._replace(awaits_token=awaits)
            case DispatchAlone() if self.setting.first_from_prefill:
                self.answers[effect.request].alone_dispatched(effect.request_id)
            case AbortLeg():
                self.answers[_numbers(effect.request_id)[0]].leg_ended(effect.role, effect.request_id)
            case EngineSilent(engine, True):
                self.abandoned += (engine,)
            case ResumeAnswer():
                self.answers[effect.request].resume(effect.request_id)
                if effect.request not in self.settling:
                    self.settling += (effect.request,)
            case Reply():
                self.settling = tuple(each for each in self.settling if each != effect.request)
                self.whole -= {effect.request}
                self._end_answer(effect.request, effect.outcome)

    def _end_answer(self, request: int, outcome: Any) -> None:
        """End a client's answer, and check that what it still receives fits what it has received."""
        answer = self.answers[request]
        started = answer.started
        ending = answer.ended(outcome)
        failed = Ending.BREAK_OFF if started else Ending.ERROR
        if ending is not (failed if outcome == "failed" else Ending.NOTHING):
            raise Violation(RouterFinding.ANSWER, f"the client of {request} has {started=}, and {ending} at {outcome}")


def _role(at: str) -> Role:
    return "prefill" if at == "prefill" else "decode"


def _chosen(names: list[str], bits: int) -> list[str]:
    return [name for bit, name in enumerate(names) if bits >> bit & 1]


def _split(bits: int, *groups: list[str]) -> Iterator[list[str]]:
    """Yield those that the bits choose of each group; the bits of the first are the lowest."""
    for group in groups:
        yield _chosen(group, bits)
        bits >>= len(group)


def _numbers(name: RequestId) -> tuple[int, int]:
    """Return the request and the number of an attempt."""
    request, number = name[1:].split(".")
    return int(request), int(number)
