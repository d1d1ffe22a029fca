"""Invariants of the router, whatever happens around it: every client is answered once, with the outcome of its request,
and no leg is dispatched twice, or left alone. No client receives pieces of two attempts, or any behind its end: none
but the attempt of which it has a token completes its request, and once the endpoint knows of that token, no attempt is
dispatched. What reaches a client is decided elsewhere (`pdflow/routing/answer.py`), and only checked here.

A retry is an attempt with ids of its own (R12). When a client has been answered, or another attempt is begun, every leg
of the attempts before has ended or has been taken back: otherwise engines work on in vain, until a timer of theirs
fires, and timers hide mistakes. Blocks are checked as they are without a router (invariant_checker.py).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntFlag
from typing import Any

from pdflow.protocol.ids import EngineInfo
from pdflow.protocol.values import Address, RequestId
from pdflow.routing.answer import Ending
from pdflow.routing.effects import AbortLeg, DispatchDecode, DispatchPrefill, Reply
from pdflow_sim.check.routed.cluster import RoutedCluster
from pdflow_sim.check.state.invariant_checker import InvariantChecker
from pdflow_sim.check.state.shadow_state import Broken, ClientStage, PartialState, RequestStage, ShadowState


class LegState(IntFlag):
    """The legs of an attempt that the router has dispatched, and those that are open: neither ended nor taken back."""

    P_SENT = 1
    P_OPEN = 2
    D_SENT = 4
    D_OPEN = 8
    DELIVERED = 16
    """The client has received the attempt's first token, or its whole answer at once."""
    TOKEN_REPORTED = 32
    """The router's endpoint knows of that token."""
    ROUTER_GONE = 64
    """The router that dispatched them has crashed: what engines answer reaches no router."""


P_SENT, P_OPEN, D_SENT, D_OPEN, DELIVERED, TOKEN_REPORTED, ROUTER_GONE = (leg.value for leg in LegState)
OPEN = P_OPEN | D_OPEN
UNENDED = (RequestStage.KNOWN, RequestStage.ENQUEUED, RequestStage.GIVEN, RequestStage.ADMITTED)
"""Stages of a request that has no outcome."""
OUTCOMES = {"completed": ClientStage.COMPLETED, "failed": ClientStage.FAILED, "cancelled": ClientStage.CANCELLED}


class RoutedInvariantChecker(InvariantChecker):
    """The invariant checker of a world with the router's endpoint: checks the effects of engines and of the router."""

    cluster: RoutedCluster

    def check(self, draft: PartialState, node: Address, effect: Any, event: Any) -> None:
        act = _ON.get(type(effect))
        if act is None:
            super().check(draft, node, effect, event)
        else:
            act(self, draft, effect)

    def attempt(self, request_id: RequestId) -> int:
        if request_id not in self.cluster.requests:
            raise Broken("S6", f"{request_id} is not an attempt that the router may make")
        return self.cluster.requests.index(request_id)

    def dispatched_prefill(self, draft: PartialState, effect: DispatchPrefill) -> None:
        i = self.dispatched(draft, effect, P_SENT, P_OPEN)
        if self.cluster.xids[i] != effect.xid:
            raise Broken("S6", f"{effect.request_id} is dispatched with the xid {effect.xid}")
        self.at(i, self.cluster.ps[effect.engine], self.cluster.p_of[i])
        before = [j for j in range(i) if self.cluster.client_of[j] == self.cluster.client_of[i]]
        self.over(draft, before, f"{effect.request_id} begins")
        if before:
            self.goal("retried")

    def dispatched_decode(self, draft: PartialState, effect: DispatchDecode) -> None:
        i = self.dispatched(draft, effect, D_SENT, D_OPEN)
        self.at(i, self.cluster.ds[effect.engine], self.cluster.d_of[i])
        if effect.params.xid != self.cluster.xids[i]:
            raise Broken("S4", f"{effect.request_id} is dispatched to fetch {effect.params.xid}")

    def at(self, i: int, engine: EngineInfo, expected: EngineInfo) -> None:
        if engine != expected:
            raise Broken("L6", f"{self.cluster.requests[i]} is dispatched to {engine.engine}, not to {expected.engine}")

    def dispatched(self, draft: PartialState, effect: DispatchPrefill | DispatchDecode, sent: int, opened: int) -> int:
        i = self.attempt(effect.request_id)
        if draft.legs[i] & sent:
            raise Broken("S6", f"{type(effect).__name__} {effect.request_id} is sent a second time")
        if draft.clients[effect.request] != ClientStage.WAITING:
            raise Broken("S6", f"{effect.request_id} is dispatched after its client has its answer")
        started = self.streaming(draft, effect.request, TOKEN_REPORTED)
        if started:
            raise Broken("S6", f"{effect.request_id} is dispatched after its client has the start of {started}")
        _put_leg(draft, i, draft.legs[i] | sent | opened)
        return i

    def streaming(self, draft: PartialState | ShadowState, request: int, flag: int = DELIVERED) -> RequestId:
        """Return the attempt of whose answer a client has the start, or of which the endpoint knows so; "" if of
        none."""
        mine = zip(self.cluster.requests, self.cluster.client_of, draft.legs, strict=True)
        return next((attempt for attempt, whose, leg in mine if whose == request and leg & flag), "")

    def received(self, shadow: ShadowState, i: int) -> None:
        """Check that a client may receive a piece of this attempt's answer. Raises Broken."""
        attempt, request = self.cluster.requests[i], self.cluster.client_of[i]
        client, streaming = shadow.clients[request], self.streaming(shadow, request)
        if client != ClientStage.WAITING:
            raise Broken(
                "S6", f"client {request} receives a piece of {attempt}, but is {ClientStage(client).name.lower()}"
            )
        if streaming not in ("", attempt):
            raise Broken("S6", f"client {request} receives a piece of {attempt}, but has the start of {streaming}")

    def ended(self, shadow: ShadowState, effect: Reply, ending: Ending) -> None:
        """Check that the end that a client sees of its request fits what it has received. Raises Broken."""
        streaming = self.streaming(shadow, effect.request)
        failed = Ending.BREAK_OFF if streaming else Ending.ERROR
        if ending is not (failed if effect.outcome == "failed" else Ending.NOTHING):
            has = f"has the start of {streaming}" if streaming else "has received nothing"
            raise Broken("S6", f"client {effect.request} {has}, but its end is {ending.name}: {effect.outcome}")

    def aborted(self, shadow: ShadowState, i: int) -> None:
        """Check that D has ended a leg at the abort of it, and so serves no leg whose router has gone. Raises
        Broken."""
        stage = RequestStage(shadow.stages[i])
        if stage in UNENDED:
            raise Broken("L1", f"the decode leg of {self.cluster.requests[i]} is aborted, and is still {stage.name}")

    def taken_back(self, draft: PartialState, effect: AbortLeg) -> None:
        i = self.attempt(effect.request_id)
        _put_leg(draft, i, draft.legs[i] & ~(P_OPEN if effect.role == "prefill" else D_OPEN))

    def replied(self, draft: PartialState, effect: Reply) -> None:
        client = draft.clients[effect.request]
        answer = f"client {effect.request} receives {effect.outcome}"
        if client not in (ClientStage.WAITING, ClientStage.GONE):
            raise Broken("S6", f"{answer}, but has received {ClientStage(client).name.lower()} before")
        if (effect.outcome == "cancelled") != (client == ClientStage.GONE):
            raise Broken("S6", f"{answer}, but is {ClientStage(client).name.lower()}")
        mine = [i for i, whose in enumerate(self.cluster.client_of) if whose == effect.request]
        has_landed = draft.stages[mine[effect.attempts - 1]] in (RequestStage.COMMITTED, RequestStage.DECODED)
        if effect.outcome == "completed" and not has_landed:
            raise Broken("S6", f"{answer}, but attempt {effect.attempts} was never committed")
        streaming = self.streaming(draft, effect.request)
        if effect.outcome == "completed" and streaming != self.cluster.requests[mine[effect.attempts - 1]]:
            raise Broken("S6", f"{answer} from attempt {effect.attempts}, but has received {streaming or 'nothing'}")
        if streaming and effect.outcome == "failed":
            self.goal("cut short")
        self.over(draft, mine, answer)
        draft.clients = tuple(
            OUTCOMES[effect.outcome] if i == effect.request else now for i, now in enumerate(draft.clients)
        )
        self.goal(effect.outcome)

    def over(self, draft: PartialState, attempts: list[int], when: str) -> None:
        for i in attempts:
            if draft.legs[i] & OPEN:
                which = "prefill" if draft.legs[i] & P_OPEN else "decode"
                raise Broken("L", f"{when}, and the {which} leg of {self.cluster.requests[i]} is still open")


def _put_leg(draft: PartialState, i: int, leg: int) -> None:
    draft.legs = (*draft.legs[:i], leg, *draft.legs[i + 1 :])


_ON: dict[type, Callable[[RoutedInvariantChecker, PartialState, Any], None]] = {
    AbortLeg: RoutedInvariantChecker.taken_back,
    DispatchDecode: RoutedInvariantChecker.dispatched_decode,
    DispatchPrefill: RoutedInvariantChecker.dispatched_prefill,
    Reply: RoutedInvariantChecker.replied,
}
