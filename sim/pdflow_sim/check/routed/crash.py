"""The router's crash: what engines and clients meet when its process ends, and another one starts that knows nothing.

As live: every connection of the router breaks. A client gets no further byte, which ends its request. An engine finds
the connection of a leg closed and aborts the leg, as it does for a leg that the router takes back (`abort` of
runtime/pdflow_runtime/nodes/prefill_node.py and decode_node.py). A leg that was under way reaches its engine before
that, or never. What engines answer to a leg of the former router is lost. Request ids of the new router differ from all
former ones, since it counts from another number (runtime/pdflow_runtime/router/router_node.py); here no client asks
twice. It knows the engines from their first reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, Literal

from pdflow.routing.effects import AbortLeg
from pdflow_sim.check.moves.acts import Acts, Move
from pdflow_sim.check.moves.components import Components
from pdflow_sim.check.routed.answers import ClientAnswers
from pdflow_sim.check.routed.cluster import ROUTER, RoutedCluster
from pdflow_sim.check.routed.invariant_checker import (
    D_OPEN,
    D_SENT,
    OPEN,
    P_OPEN,
    ROUTER_GONE,
    RoutedInvariantChecker,
)
from pdflow_sim.check.scopes.scope import FaultKind
from pdflow_sim.check.state.shadow_state import IN_FLIGHT, ClientStage, PromptStage, RequestStage, ShadowState
from pdflow_sim.check.state.space import Draft, State

DURING_TRANSFER, BETWEEN_LEGS = "the router crashes during a transfer", "the router crashes between the legs"
AFTER: dict[int, int] = {ClientStage.WAITING: ClientStage.FAILED, ClientStage.GONE: ClientStage.CANCELLED}
"""The stage of a client after the crash, by its stage before."""
ROLES: tuple[tuple[int, Literal["prefill", "decode"]], ...] = ((P_OPEN, "prefill"), (D_OPEN, "decode"))


class RouterCrash:
    """The move of a router that crashes and starts again."""

    def __init__(
        self, cluster: RoutedCluster, checker: RoutedInvariantChecker, base: Components, answers: ClientAnswers
    ) -> None:
        self.cluster = cluster
        self.checker = checker
        self.space = base.space
        self.answers = answers
        self.fresh = base.space.endpoint(ROUTER, cluster.router())

    def acts(self) -> Acts:
        return {"crash router": self.crash}

    def moves(self, state: State) -> Iterator[Move]:
        """Yield a crash for each set of legs that are under way and do not reach their engines. There is nothing to
        crash before the first request."""
        shadow = self.space.shadow_of(state)
        if any(client != ClientStage.AWAY for client in shadow.clients):
            under_way = self._under_way(shadow)
            for lost in product((False, True), repeat=len(under_way)):
                yield ("crash router", tuple(link for link, gone in zip(under_way, lost, strict=True) if gone))

    def _under_way(self, shadow: ShadowState) -> list[int]:
        """Return the links of open legs that have not reached their engines."""
        links = []
        for i, (request_id, legs) in enumerate(zip(self.cluster.requests, shadow.legs, strict=True)):
            p, d = self.cluster.ends_of(i)
            if legs & P_OPEN and shadow.products[i] == PromptStage.ABSENT:
                links.append(self.cluster.http[request_id, ROUTER, p])
            if legs & D_OPEN and shadow.stages[i] == RequestStage.UNREGISTERED:
                links.append(self.cluster.http[request_id, ROUTER, d])
        return links

    def crash(self, draft: Draft, move: Move) -> None:
        space, shadow = self.space, self.space.shadow_of(draft)
        space.spend(draft, FaultKind.ROUTER_RESTART)
        self._note(draft, shadow, move[1])
        for link, (_, to) in enumerate(self.cluster.links[self.cluster.first_http :], self.cluster.first_http):
            if to == ROUTER or link in move[1]:
                draft[space.first_link + link] = 0
        for i, legs in enumerate(shadow.legs):
            for opened, role in ROLES:
                if legs & opened:
                    self._break(draft, i, role, move[1])
            if legs:
                space.put_shadow(draft, "legs", i, legs & ~OPEN | ROUTER_GONE)
        for client, stage in enumerate(shadow.clients):
            space.put_shadow(draft, "clients", client, AFTER.get(stage, stage))
        self.answers.forget(draft)
        draft[self.cluster.at[ROUTER]] = self.fresh

    def _break(self, draft: Draft, i: int, role: Literal["prefill", "decode"], lost: tuple[int, ...]) -> None:
        """Let the engine of an open leg find its connection closed, if the leg reaches it."""
        request_id, (p, d) = self.cluster.requests[i], self.cluster.ends_of(i)
        link = self.cluster.http[request_id, ROUTER, p if role == "prefill" else d]
        if link not in lost:
            slot, chans = self.space.first_link + link, self.space.chans
            abort = self.space.frames.of(AbortLeg(role, 0, request_id))
            draft[slot] = chans.of((*chans.values[draft[slot]], abort))

    def _note(self, draft: Draft, shadow: ShadowState, lost: tuple[int, ...]) -> None:
        """Record the goals that this crash reaches. Between the legs, P holds the prompt and D receives no leg."""
        for i, legs in enumerate(shadow.legs):
            if legs & D_OPEN and self._has_in_flight(draft, i):
                self.checker.goal(DURING_TRANSFER)
            d_link = self.cluster.http[self.cluster.requests[i], ROUTER, self.cluster.d_of[i].engine]
            waits = shadow.clients[self.cluster.client_of[i]] == ClientStage.WAITING
            if waits and shadow.products[i] == PromptStage.HELD and (not legs & D_SENT or d_link in lost):
                self.checker.goal(BETWEEN_LEGS)

    def _has_in_flight(self, draft: Draft, i: int) -> bool:
        """True if an operation of this attempt is in flight."""
        ops = ((self.space.operations(op)[2], flags) for op, flags in self.space.ops_of(draft))
        return any(flags & IN_FLIGHT and self.checker.request_of(effect) == i for effect, flags in ops)

    def is_unheard(self, draft: Draft, link: int, what: Any) -> bool:
        """True for an answer to a leg of a router that has crashed."""
        if self.cluster.links[link][1] != ROUTER or not hasattr(what, "request_id"):
            return False
        return bool(self.space.shadow_of(draft).legs[self.checker.attempt(what.request_id)] & ROUTER_GONE)
