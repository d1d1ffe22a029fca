"""The same world with the router's endpoint in it, which decides what elsewhere may happen at any moment: when legs are
dispatched, taken back and tried again, and what D is told of a prefill leg's end.

What comes over HTTP means to an engine what it means to one in the simulated world (sim/prefill_node.py,
sim/decode_node.py). Each leg has a connection of its own; decoding takes no time, so that a leg's end is under way as
soon as its KV is committed, and ahead of it the first token, where clients stream. What of it reaches a client is
decided in `pdflow/routing/answer.py` (routed_answers.py). When an engine dies its connections break, which the router
notices at some time: what the engine had answered arrives before that, or never. What the router sends reaches the
engine that has started by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pdflow.protocol.effects import AnswerPrefill
from pdflow.protocol.ids import engine_of
from pdflow.protocol.messages import Code
from pdflow.protocol.timers import Timer, TimerKind
from pdflow.protocol.values import Address, RequestId, Value
from pdflow.routing.answer import Answer, Piece
from pdflow.routing.effects import AbortLeg, DispatchDecode, DispatchPrefill, Reply, ReportPrefill
from pdflow.routing.events import (
    ClientGone,
    DecodeEnded,
    EngineChanged,
    EngineLost,
    PrefillAnswered,
    RequestArrived,
    RouterEvent,
    TokenCame,
)
from pdflow.routing.router import Router
from pdflow.serving.effects import EndDecode, EndPrefill
from pdflow.serving.events import PrefillReported, RequestAborted
from sim.check.cluster import role_of
from sim.check.ghost import Broken, Ghost, Product, Stage
from sim.check.relation import Move
from sim.check.routed_answers import Answers
from sim.check.routed_cluster import ROUTER, RoutedCluster
from sim.check.routed_judge import D_OPEN, HEARD, P_OPEN, TOLD, Client, RoutedJudge
from sim.check.scope import Fault, Scope
from sim.check.timed import Timed
from sim.check.world import Draft, State, Turn

ROUTERS = frozenset({"decode", "abort"})
"""Moves that the router's endpoint decides here."""


class TokenPassed(Value, frozen=True, gc=False):
    """The client has a token, and the router's endpoint is told of it when its turn comes: live, the bytes pass beside
    the queue of events. So what else ends the attempt may be handled in between. What the endpoint dispatches until
    then is sent here, and live is not (`Answer.wants`): here more may happen, not less."""

    request: int
    request_id: RequestId


class Routed(Answers):
    """A Relation with the router in it: its endpoint, and its driver's part in what reaches clients."""

    cluster_type = RoutedCluster
    judge_type = RoutedJudge
    cluster: RoutedCluster
    judge: RoutedJudge

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.over = (*self.over, Stage.UNBORN)
        self.do |= {"request": self.request, "hang up": self.hang_up}
        self.arrives: dict[type, Callable[[Draft, Any], None]] = {
            DispatchPrefill: self.prefill_arrives,
            DispatchDecode: self.decode_arrives,
            AbortLeg: self.abort_arrives,
            ReportPrefill: self.report_arrives,
            PrefillAnswered: self.prefill_answered,
            DecodeEnded: self.decode_ended,
            TokenCame: self.token_came,
            TokenPassed: self.token_passed,
            EngineLost: self.engine_lost,
            EngineChanged: self.engine_changed,
        }

    def start(self) -> State:
        """No client has asked for anything."""
        return self.beginning()

    def first_ghost(self) -> Ghost:
        none = (0,) * len(self.cluster.requests)
        return super().first_ghost()._replace(products=none, clients=(Client.AWAY,) * self.scope.requests, legs=none)

    def unanswered(self, state: State) -> list[str]:
        """Every client is to have its answer, and the router to remember none of them."""
        clients = self.ghost_of(state).clients
        words = [f"client {i} is {Client(now).name}" for i, now in enumerate(clients) if now < Client.COMPLETED]
        router: Router = self.body(state, ROUTER)
        words += [f"the router remembers {request_id}" for request_id in router.attempts]
        if any(router.prefill_choice.loads + router.decode_choice.loads):
            words.append("the router counts a leg as open")
        return words

    def cut_short(self, state: State) -> int:
        """Attempts that the router took back because their client had the start of one before."""
        ghost, cluster = self.ghost_of(state), self.cluster
        heard = [self.judge.heard(ghost, client) for client in range(self.scope.requests)]
        begun = [cluster.requests.index(attempt) if attempt else len(cluster.requests) for attempt in heard]
        return sum(stage == Stage.FREED and i > begun[cluster.client_of[i]] for i, stage in enumerate(ghost.stages))

    def by_clocks(self, state: State, timer: Timer) -> bool:
        """A pull is wanted while its decode leg is being dispatched, too."""
        dispatching = any(state[self.first_link + self.cluster.first_http : self.bag])
        wanted = timer.kind is TimerKind.LEASE and self.scope.pulls and dispatching
        return not wanted and super().by_clocks(state, timer)

    # What may happen.

    def _of_tail(self, state: State) -> Iterator[Move]:
        left = self.left(state)
        for i, client in enumerate(self.ghost_of(state).clients):
            if client == Client.AWAY:
                yield ("request", i)
            elif client == Client.WAITING and left[Fault.ABORT]:
                yield ("hang up", i)
        for move in super()._of_tail(state):
            if move[0] not in ROUTERS and (move[0] != "restart" or self._may_die(state, move[1])):
                yield move

    def _may_die(self, state: State, engine: int) -> bool:
        """Of several, one dies that has something to do: otherwise it would not be the same one's turn next."""
        cluster = self.cluster
        if len(cluster.engines) == 2:
            return True
        legs = self.ghost_of(state).legs
        return any(leg and cluster.engines[engine] in cluster.ends_of(i) for i, leg in enumerate(legs))

    def request(self, draft: Draft, i: int) -> None:
        self.put_ghost(draft, "clients", i, Client.WAITING)
        self.at_router(draft, RequestArrived(i))

    def hang_up(self, draft: Draft, i: int) -> None:
        self.spend(draft, Fault.ABORT)
        self.put_ghost(draft, "clients", i, Client.GONE)
        self.answer(draft, i, Answer.ended, "cancelled")
        self.at_router(draft, ClientGone(i))

    # HTTP.

    def _turn(self, ends: tuple[int, ...], first: int, event: int) -> Turn:
        """What the router sends to engines, and what they answer, goes over HTTP."""
        after, sends, batch = super()._turn(ends, first, event)
        http: dict[int, list[int]] = {}
        for node, effect, _ in self.batches.values[batch] if batch >= 0 else ():
            for to, what in self._over_http(node, effect):
                slot = self.first_link + self.cluster.http[what.request_id, engine_of(node), to]
                http.setdefault(slot, []).append(self.frames.of(what))
        return after, (*sends, *((slot, tuple(frames)) for slot, frames in http.items())), batch

    def _over_http(self, node: Address, effect: Any) -> Iterator[tuple[Address, Any]]:
        """To whom, and what, in this order."""
        if isinstance(effect, AnswerPrefill):
            yield ROUTER, PrefillAnswered(effect.request_id, self.judge.with_own_words(effect.params))
        elif isinstance(effect, EndDecode):
            if self.scope.streams and effect.code is Code.NONE:
                client = self.cluster.client_of[self.judge.attempt(effect.handle)]
                yield ROUTER, TokenCame(client, effect.handle)
            yield ROUTER, DecodeEnded(effect.handle, effect.code)
        elif isinstance(effect, EndPrefill):
            request_id = self.cluster.prefill_ids[self.cluster.xids.index(effect.handle)]
            yield ROUTER, PrefillAnswered(request_id, None, effect.code)
        elif isinstance(effect, (DispatchPrefill, DispatchDecode, ReportPrefill, AbortLeg)):
            prefill, decode = self.cluster.ends_of(self.judge.attempt(effect.request_id))
            to_prefill = isinstance(effect, DispatchPrefill) or (
                isinstance(effect, AbortLeg) and effect.role == "prefill"
            )
            yield prefill if to_prefill else decode, effect

    def send(self, draft: Draft, link: int, *what: Any) -> None:
        slot = self.first_link + link
        draft[slot] = self.chans.of((*self.chans.values[draft[slot]], *map(self.frames.of, what)))

    def arrive(self, draft: Draft, link: int, frame: int) -> None:
        if link < self.cluster.first_http:
            super().arrive(draft, link, frame)
        else:
            what = self.frames.values[frame]
            self.arrives[type(what)](draft, what)

    # At the engines.

    def prefill_arrives(self, draft: Draft, leg: DispatchPrefill) -> None:
        i = self.judge.attempt(leg.request_id)
        if self.ghost_of(draft).products[i] != Product.ABSENT:
            raise Broken("S6", f"P is to compute {leg.xid} a second time")
        self.put_ghost(draft, "products", i, Product.QUEUED)
        self.event(draft, *self.requested(i, leg.xid, leg.request_id))

    def decode_arrives(self, draft: Draft, leg: DispatchDecode) -> None:
        i = self.judge.attempt(leg.request_id)
        if self.ghost_of(draft).stages[i] != Stage.UNBORN:
            raise Broken("S6", f"D is to decode {leg.request_id} a second time")
        self.put_ghost(draft, "stages", i, Stage.KNOWN)
        self.requested_at_d(draft, i, leg.params)

    def abort_arrives(self, draft: Draft, effect: AbortLeg) -> None:
        """What it comes to is the core's to say."""
        i = self.judge.attempt(effect.request_id)
        if effect.role == "decode":
            self.at_d(draft, i, RequestAborted(effect.request_id))
            return
        product = self.ghost_of(draft).products[i]
        if product == Product.QUEUED:
            self.put_ghost(draft, "products", i, Product.DEAD)
        elif product == Product.HELD:
            self.judge.goal("taken back too late")
        self.at_p(draft, i, RequestAborted(self.cluster.xids[i]))

    def report_arrives(self, draft: Draft, effect: ReportPrefill) -> None:
        self.at_d(draft, self.judge.attempt(effect.request_id), PrefillReported(effect.request_id, effect.ok))

    def report(self, draft: Draft, product: int, ok: bool) -> None:
        """It is the router that reports, when it has heard of it."""

    def restart(self, draft: Draft, engine: int) -> None:
        """Of HTTP nothing is lost yet. What was committed had been decoded."""
        name = self.cluster.engines[engine]
        http = slice(self.first_link + self.cluster.first_http, self.bag)
        kept = draft[http]
        committed = [i for i, stage in enumerate(self.ghost_of(draft).stages) if stage == Stage.COMMITTED]
        super().restart(draft, engine)
        draft[http] = kept
        for i in committed:
            self.put_ghost(draft, "stages", i, Stage.COMMITTED)
        self.send(draft, self.cluster.notices[name], EngineLost(name), EngineChanged(name, True))

    # At the router.

    def at_router(self, draft: Draft, event: RouterEvent) -> None:
        """Its endpoint handles an event. What it replies ends answers."""
        batch = self.event(draft, ROUTER, event)
        for _, effect, _ in self.batches.values[batch] if batch >= 0 else ():
            if isinstance(effect, Reply):
                ending = self.answer(draft, effect.request, Answer.ended, effect.outcome)
                self.judge.ended(self.ghost_of(draft), effect, ending)

    def prefill_answered(self, draft: Draft, event: PrefillAnswered) -> None:
        self.ends_leg(draft, self.judge.attempt(event.request_id), P_OPEN)
        self.at_router(draft, event)

    def decode_ended(self, draft: Draft, event: DecodeEnded) -> None:
        """With the last piece of the answer, where there is one: if that is dropped, the leg has not ended. Where
        clients do not stream it is the first, too. Of a leg that was taken back no piece comes, as of its token."""
        i = self.judge.attempt(event.request_id)
        if event.code is Code.NONE and self.ghost_of(draft).legs[i] & D_OPEN:
            piece = self.piece_came(draft, i)
            if piece is Piece.DROP:
                return
            client = self.cluster.client_of[i]
            if piece is Piece.FIRST:
                self.token_passed(draft, TokenPassed(client, event.request_id))
            self.answer(draft, client, Answer.whole, event.request_id)
        self.ends_leg(draft, i, D_OPEN)
        self.at_router(draft, event)

    def token_came(self, draft: Draft, event: TokenCame) -> None:
        """The first piece of an answer. Over the connection of a leg that has been taken back nothing comes."""
        i = self.judge.attempt(event.request_id)
        if not self.ghost_of(draft).legs[i] & D_OPEN or self.piece_came(draft, i) is not Piece.FIRST:
            return
        link = self.cluster.http[event.request_id, self.cluster.d_of[i].engine, ROUTER]
        slot = self.first_link + link
        passed = self.frames.of(TokenPassed(event.request, event.request_id))
        draft[slot] = self.chans.of((passed, *self.chans.values[draft[slot]]))

    def piece_came(self, draft: Draft, i: int) -> Piece:
        """Of this attempt's answer. What is not dropped reaches the client."""
        piece = self.answer(draft, self.cluster.client_of[i], Answer.piece_came, self.cluster.requests[i])
        if piece is not Piece.DROP:
            self.judge.received(self.ghost_of(draft), i)
            self.put_ghost(draft, "legs", i, self.ghost_of(draft).legs[i] | HEARD)
        return piece

    def token_passed(self, draft: Draft, event: TokenPassed) -> None:
        i, ghost = self.judge.attempt(event.request_id), self.ghost_of(draft)
        if not ghost.legs[i] & D_OPEN and ghost.clients[event.request] == Client.WAITING:
            self.judge.goal("a token of a leg that was taken back")
        self.put_ghost(draft, "legs", i, ghost.legs[i] | TOLD)
        self.at_router(draft, TokenCame(event.request, event.request_id))

    def engine_lost(self, draft: Draft, event: EngineLost) -> None:
        """No leg ends with that: it may have reached, or yet reach, the engine that has started since."""
        for (_, sender, _), link in self.cluster.http.items():
            if sender == event.engine:
                slot = self.first_link + link
                frames = self.chans.values[draft[slot]]
                kept = tuple(frame for frame in frames if isinstance(self.frames.values[frame], TokenPassed))
                draft[slot] = self.chans.of(kept)
        role = role_of(event.engine)
        leg = P_OPEN if role == "P" else D_OPEN
        mine = [event.engine in self.cluster.ends_of(i) for i in range(len(self.cluster.requests))]
        if any(legs & leg for legs, at in zip(self.ghost_of(draft).legs, mine, strict=True) if at):
            self.judge.goal(f"a leg is lost with {role}")
        self.at_router(draft, event)

    def engine_changed(self, draft: Draft, event: EngineChanged) -> None:
        self.at_router(draft, event)

    def ends_leg(self, draft: Draft, i: int, leg: int) -> None:
        self.put_ghost(draft, "legs", i, self.ghost_of(draft).legs[i] & ~leg)


class RoutedTimed(Routed, Timed):
    """The same with clocks: HTTP takes less than a tick."""

    def _undispatched(self, state: State) -> bool:
        """What is to be dispatched is under way already, and time waits for that."""
        return False
