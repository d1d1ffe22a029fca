"""Moves of worlds with the router's endpoint. It decides what may happen at any moment in worlds without it: when legs
are dispatched, taken back and tried again, and which end of a prefill leg is reported to D.

HTTP messages mean to an engine what they mean to a simulated one (sim/pdflow_sim/nodes/prefill_node.py,
sim/pdflow_sim/nodes/decode_node.py). Each leg has a connection of its own; decoding takes no time, so that a leg's end
is under way as soon as its KV is committed, and ahead of it the first token, where clients stream. What of it reaches a
client is decided in `pdflow/routing/answer.py` (routed/answers.py). When an engine dies its connections break, which
the router notices at some time: what the engine had answered arrives before that, or never. What the router sends
reaches the engine that has started by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pdflow.protocol.effects import AnswerPrefill
from pdflow.protocol.ids import engine_of
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Address, RequestId, Value
from pdflow.routing.answer import Answer, PieceUse
from pdflow.routing.effects import AbortLeg, DispatchDecode, DispatchPrefill, Reply, ReportPrefill
from pdflow.routing.events import (
    ClientGone,
    DecodeEnded,
    EngineChanged,
    EngineLost,
    FirstTokenDelivered,
    PrefillAnswered,
    RequestArrived,
    RouterEvent,
)
from pdflow.routing.router import Router
from pdflow.serving.effects import EndDecode, EndPrefill
from pdflow.serving.events import PrefillReported, RequestAborted
from pdflow_sim.check.moves.acts import Acts, Move
from pdflow_sim.check.moves.components import Components
from pdflow_sim.check.routed.answers import ClientAnswers
from pdflow_sim.check.routed.cluster import ROUTER, RoutedCluster
from pdflow_sim.check.routed.crash import RouterCrash
from pdflow_sim.check.routed.invariant_checker import (
    D_OPEN,
    DELIVERED,
    P_OPEN,
    ROUTER_GONE,
    TOKEN_REPORTED,
    RoutedInvariantChecker,
)
from pdflow_sim.check.scopes.scope import FaultKind
from pdflow_sim.check.state.cluster import role_of
from pdflow_sim.check.state.shadow_state import Broken, ClientStage, PromptStage, RequestStage
from pdflow_sim.check.state.space import Draft, State


class TokenPassed(Value, frozen=True, gc=False):
    """Message: a client has a token, which is reported to the router's endpoint when its turn comes: live, the bytes
    pass beside the queue of events. So another event that ends the attempt may be handled in between. Legs that the
    endpoint dispatches until then are sent here, and live are not (`Answer.is_candidate`): here more may happen, not
    less."""

    request: int
    request_id: RequestId


class RouterDriver:
    """The driver of the router's endpoint: the moves of clients and of HTTP, and the answers that reach clients."""

    def __init__(self, cluster: RoutedCluster, checker: RoutedInvariantChecker, base: Components) -> None:
        self.cluster = cluster
        self.checker = checker
        self.space = base.space
        self.turns = base.turns
        self.engines = base.engines
        self.frames = base.frames
        self.deaths = base.deaths
        self.answers = ClientAnswers(base.space)
        self.crash = RouterCrash(cluster, checker, base, self.answers)
        self.arrives: dict[type, Callable[[Draft, Any], None]] = {
            DispatchPrefill: self.prefill_arrives,
            DispatchDecode: self.decode_arrives,
            AbortLeg: self.abort_arrives,
            ReportPrefill: self.report_arrives,
            PrefillAnswered: self.prefill_answered,
            DecodeEnded: self.decode_ended,
            FirstTokenDelivered: self.first_token_delivered,
            TokenPassed: self.token_passed,
            EngineLost: self.engine_lost,
            EngineChanged: self.engine_changed,
        }

    def acts(self) -> Acts:
        own = {"request": self.request, "disconnect": self.hang_up, "deliver": self.deliver, "restart": self.restart}
        return own | self.crash.acts()

    # What is owed to clients.

    def unanswered(self, state: State) -> list[str]:
        """Return, as text, the clients without an answer and the attempts and legs that the router still remembers."""
        clients = self.space.shadow_of(state).clients
        open_ones = [(i, now) for i, now in enumerate(clients) if now < ClientStage.COMPLETED]
        descriptions = [f"client {i} is {ClientStage(now).name}" for i, now in open_ones]
        router: Router = self.space.body(state, ROUTER)
        descriptions += [f"the router remembers {request_id}" for request_id in router.attempts]
        if any(router.prefill_choice.loads + router.decode_choice.loads):
            descriptions.append("the router counts a leg as open")
        return descriptions

    def revoked_attempts(self, state: State) -> int:
        """Return how many attempts have failed that the router took back because their client had the start of one
        before, or that ended with the router."""
        shadow, cluster = self.space.shadow_of(state), self.cluster
        streaming = [self.checker.streaming(shadow, client) for client in range(self.space.scope.requests)]
        begun = [cluster.requests.index(attempt) if attempt else len(cluster.requests) for attempt in streaming]
        return sum(
            stage == RequestStage.FREED and (i > begun[cluster.client_of[i]] or bool(shadow.legs[i] & ROUTER_GONE))
            for i, stage in enumerate(shadow.stages)
        )

    # What may happen.

    def moves(self, state: State) -> Iterator[Move]:
        left = self.space.left(state)
        for i, client in enumerate(self.space.shadow_of(state).clients):
            if client == ClientStage.AWAY:
                yield ("request", i)
            elif client == ClientStage.WAITING and left[FaultKind.ABORT]:
                yield ("disconnect", i)
        if left[FaultKind.ROUTER_RESTART]:
            yield from self.crash.moves(state)

    def death_moves(self, state: State) -> Iterator[Move]:
        """Yield the deaths of engines. Of several engines only one with open legs dies: otherwise the router's choice
        of the next one would differ."""
        engines = self.cluster.engines
        legs = self.space.shadow_of(state).legs
        for move in self.deaths.moves(state):
            ends = engines[move[1]]
            if len(engines) == 2 or any(leg and ends in self.cluster.ends_of(i) for i, leg in enumerate(legs)):
                yield move

    def request(self, draft: Draft, move: Move) -> None:
        self.space.put_shadow(draft, "clients", move[1], ClientStage.WAITING)
        self.at_router(draft, RequestArrived(move[1]))

    def hang_up(self, draft: Draft, move: Move) -> None:
        i = move[1]
        self.space.spend(draft, FaultKind.ABORT)
        self.space.put_shadow(draft, "clients", i, ClientStage.GONE)
        self.answers.answer(draft, i, Answer.ended, "cancelled")
        self.at_router(draft, ClientGone(i))

    # HTTP.

    def sent(self, node: Address, effect: Any) -> Iterator[tuple[int, Any]]:
        """Yield the HTTP messages of an effect, with their links: the router's to engines, and their answers."""
        for to, what in self._over_http(node, effect):
            yield self.cluster.http[what.request_id, engine_of(node), to], what

    def _over_http(self, node: Address, effect: Any) -> Iterator[tuple[Address, Any]]:
        """Yield the HTTP messages of an effect, in order, each with its receiver."""
        if isinstance(effect, AnswerPrefill):
            yield ROUTER, PrefillAnswered(effect.request_id, self.checker.with_own_words(effect.params))
        elif isinstance(effect, EndDecode):
            if self.space.scope.streams and effect.code is Code.NONE:
                client = self.cluster.client_of[self.checker.attempt(effect.handle)]
                yield ROUTER, FirstTokenDelivered(client, effect.handle)
            yield ROUTER, DecodeEnded(effect.handle, effect.code)
        elif isinstance(effect, EndPrefill):
            request_id = self.cluster.prefill_ids[self.cluster.xids.index(effect.handle)]
            yield ROUTER, PrefillAnswered(request_id, None, effect.code)
        elif isinstance(effect, (DispatchPrefill, DispatchDecode, ReportPrefill, AbortLeg)):
            prefill, decode = self.cluster.ends_of(self.checker.attempt(effect.request_id))
            to_prefill = isinstance(effect, DispatchPrefill) or (
                isinstance(effect, AbortLeg) and effect.role == "prefill"
            )
            yield prefill if to_prefill else decode, effect

    def send(self, draft: Draft, link: int, *what: Any) -> None:
        slot = self.space.first_link + link
        chans, frames = self.space.chans, self.space.frames
        draft[slot] = chans.of((*chans.values[draft[slot]], *map(frames.of, what)))

    def deliver(self, draft: Draft, move: Move) -> None:
        """Deliver a frame, or an HTTP message, to the other end of its link."""
        if move[1] < self.cluster.first_http:
            self.frames.deliver(draft, move)
        else:
            what = self.space.frames.values[self.frames.take(draft, move[1])]
            if not self.crash.is_unheard(draft, move[1], what):
                self.arrives[type(what)](draft, what)

    # At the engines.

    def prefill_arrives(self, draft: Draft, leg: DispatchPrefill) -> None:
        i = self.checker.attempt(leg.request_id)
        if self.space.shadow_of(draft).products[i] != PromptStage.ABSENT:
            raise Broken("S6", f"P receives {leg.xid} a second time")
        self.space.put_shadow(draft, "products", i, PromptStage.QUEUED)
        self.turns.event(draft, *self.cluster.requested(i, leg.xid, leg.request_id))

    def decode_arrives(self, draft: Draft, leg: DispatchDecode) -> None:
        i = self.checker.attempt(leg.request_id)
        if self.space.shadow_of(draft).stages[i] != RequestStage.UNREGISTERED:
            raise Broken("S6", f"D receives {leg.request_id} a second time")
        self.space.put_shadow(draft, "stages", i, RequestStage.KNOWN)
        self.engines.requested_at_d(draft, i, leg.params)

    def abort_arrives(self, draft: Draft, effect: AbortLeg) -> None:
        """Deliver an abort to the engine of a leg, whose core decides the outcome."""
        i = self.checker.attempt(effect.request_id)
        if effect.role == "decode":
            self.engines.at_d(draft, i, RequestAborted(effect.request_id))
            self.checker.aborted(self.space.shadow_of(draft), i)
            return
        product = self.space.shadow_of(draft).products[i]
        if product == PromptStage.QUEUED:
            self.space.put_shadow(draft, "products", i, PromptStage.DEAD)
        elif product == PromptStage.HELD:
            self.checker.goal("cancelled too late")
        self.engines.at_p(draft, i, RequestAborted(self.cluster.xids[i]))

    def report_arrives(self, draft: Draft, effect: ReportPrefill) -> None:
        self.engines.at_d(draft, self.checker.attempt(effect.request_id), PrefillReported(effect.request_id, effect.ok))

    def restart(self, draft: Draft, move: Move) -> None:
        """Restart an engine. No HTTP message is lost yet. Requests that were over stay so."""
        space, name = self.space, self.cluster.engines[move[1]]
        http = slice(space.first_link + self.cluster.first_http, space.bag)
        kept = draft[http]
        over = space.over[0]
        ended = [i for i, stage in enumerate(space.shadow_of(draft).stages) if stage == over]
        self.deaths.restart(draft, move)
        draft[http] = kept
        for i in ended:
            space.put_shadow(draft, "stages", i, over)
        self.send(draft, self.cluster.loss_links[name], EngineLost(name), EngineChanged(name, True))

    # At the router.

    def at_router(self, draft: Draft, event: RouterEvent) -> None:
        """Let the router's endpoint handle an event. Its replies end clients' answers."""
        batch = self.turns.event(draft, ROUTER, event)
        for _, effect, _ in self.turns.batches.values[batch] if batch >= 0 else ():
            if isinstance(effect, Reply):
                ending = self.answers.answer(draft, effect.request, Answer.ended, effect.outcome)
                self.checker.ended(self.space.shadow_of(draft), effect, ending)

    def prefill_answered(self, draft: Draft, event: PrefillAnswered) -> None:
        self.ends_leg(draft, self.checker.attempt(event.request_id), P_OPEN)
        self.at_router(draft, event)

    def decode_ended(self, draft: Draft, event: DecodeEnded) -> None:
        """End a decode leg, with the last piece of its answer, where there is one: if that is dropped, the leg has not
        ended. Where clients do not stream it is the first piece, too. No piece arrives of a leg that was taken back, as
        no token does."""
        i = self.checker.attempt(event.request_id)
        if event.code is Code.NONE and self.space.shadow_of(draft).legs[i] & D_OPEN:
            piece = self.piece_arrived(draft, i)
            if piece is PieceUse.DROP:
                return
            client = self.cluster.client_of[i]
            if piece is PieceUse.FIRST:
                self.token_passed(draft, TokenPassed(client, event.request_id))
            self.answers.answer(draft, client, Answer.whole, event.request_id)
        self.ends_leg(draft, i, D_OPEN)
        self.at_router(draft, event)

    def first_token_delivered(self, draft: Draft, event: FirstTokenDelivered) -> None:
        """Pass on the first piece of an answer. Nothing arrives over the connection of a leg that has been taken
        back."""
        i = self.checker.attempt(event.request_id)
        if not self.space.shadow_of(draft).legs[i] & D_OPEN or self.piece_arrived(draft, i) is not PieceUse.FIRST:
            return
        link = self.cluster.http[event.request_id, self.cluster.d_of[i].engine, ROUTER]
        slot = self.space.first_link + link
        passed = self.space.frames.of(TokenPassed(event.request, event.request_id))
        draft[slot] = self.space.chans.of((passed, *self.space.chans.values[draft[slot]]))

    def piece_arrived(self, draft: Draft, i: int) -> PieceUse:
        """Handle the arrival of a piece of this attempt's answer. It reaches the client unless it is dropped."""
        piece = self.answers.answer(draft, self.cluster.client_of[i], Answer.piece_arrived, self.cluster.requests[i])
        if piece is not PieceUse.DROP:
            self.checker.received(self.space.shadow_of(draft), i)
            self.space.put_shadow(draft, "legs", i, self.space.shadow_of(draft).legs[i] | DELIVERED)
        return piece

    def token_passed(self, draft: Draft, event: TokenPassed) -> None:
        i, shadow = self.checker.attempt(event.request_id), self.space.shadow_of(draft)
        if not shadow.legs[i] & D_OPEN and shadow.clients[event.request] == ClientStage.WAITING:
            self.checker.goal("a token of a cancelled leg")
        self.space.put_shadow(draft, "legs", i, shadow.legs[i] | TOKEN_REPORTED)
        self.at_router(draft, FirstTokenDelivered(event.request, event.request_id))

    def engine_lost(self, draft: Draft, event: EngineLost) -> None:
        """Report to the router that an engine is lost. No leg ends with that: it may have reached, or yet reach, the
        engine that has started since."""
        for (_, sender, _), link in self.cluster.http.items():
            if sender == event.engine:
                slot = self.space.first_link + link
                frames = self.space.chans.values[draft[slot]]
                kept = tuple(frame for frame in frames if isinstance(self.space.frames.values[frame], TokenPassed))
                draft[slot] = self.space.chans.of(kept)
        role = role_of(event.engine)
        leg = P_OPEN if role == "P" else D_OPEN
        mine = [event.engine in self.cluster.ends_of(i) for i in range(len(self.cluster.requests))]
        if any(legs & leg for legs, at in zip(self.space.shadow_of(draft).legs, mine, strict=True) if at):
            self.checker.goal(f"a leg is lost with {role}")
        self.at_router(draft, event)

    def engine_changed(self, draft: Draft, event: EngineChanged) -> None:
        self.at_router(draft, event)

    def ends_leg(self, draft: Draft, i: int, leg: int) -> None:
        self.space.put_shadow(draft, "legs", i, self.space.shadow_of(draft).legs[i] & ~leg)
