"""The cluster with the router's endpoint in it: one more node, and HTTP to and from each engine.

The router names attempts, so ids are the router's here: r0.2 is the second attempt of the first client's request, and
x0.2 its prompt. Every attempt that it may make has an entry in the tables from the start, its engines included: where
there are two of a kind, a retry goes to the other one.
"""

from __future__ import annotations

from typing import Any

from pdflow.protocol.values import Address, EngineId, RequestId
from pdflow.routing.router import Router
from pdflow_sim.check.scopes.scope import Scope
from pdflow_sim.check.state.cluster import ScopeCluster
from pdflow_sim.check.state.shadow_state import ClientStage, RequestStage, ShadowState

ROUTER = "router"


class RoutedCluster(ScopeCluster):
    """A cluster of engines and the router before them. Raises ValueError for a scope that it does not support."""

    def __init__(self, scope: Scope) -> None:
        for field in ("same_product", "same_base"):
            if getattr(scope, field):
                raise ValueError(f"attempts excludes {field}=true")
        several = scope.p_engines + scope.d_engines > 2
        if several and (scope.requests > 1 or scope.attempts > 2 or scope.p_engines == scope.d_engines):
            raise ValueError(
                "attempts: p_engines=2 or d_engines=2, not both, needs requests=1 and attempts of at most 2"
            )
        if scope.d_engines > 1 and (scope.pulls or not scope.concurrent):
            raise ValueError("attempts and d_engines=2 need concurrent=true and pulls=false")
        super().__init__(scope)
        self.at[ROUTER] = len(self.nodes)
        self.nodes.append(ROUTER)
        self.over = (*self.over, RequestStage.UNREGISTERED)
        # Each leg has a link of HTTP by itself: one leg's answer may overtake another's.
        self.http: dict[tuple[RequestId, Address, Address], int] = {}
        """(attempt, sender, receiver)"""
        self.loss_links: dict[EngineId, int] = {}
        """The link on which the router learns that an engine has died, and is up again."""
        for engine in self.engines:
            for i, request_id in enumerate(self.requests):
                for ends in ((ROUTER, engine), (engine, ROUTER)) if engine in self.ends_of(i) else ():
                    self.http[request_id, *ends] = len(self.links)
                    self.links.append(ends)
            self.loss_links[engine] = len(self.links)
            self.links.append((engine, ROUTER))

    def _name(self, scope: Scope) -> None:
        attempts = [(i, number) for i in range(scope.requests) for number in range(1, scope.attempts + 1)]
        self.requests = [f"r{i}.{number}" for i, number in attempts]
        self.product_of = list(range(len(attempts)))
        self.xids = [f"x{i}.{number}" for i, number in attempts]
        self.prefill_ids = self.requests
        self.client_of = [i for i, _ in attempts]
        """By attempt, the client whose request it is of."""

    def first_shadow(self) -> ShadowState:
        """Return the first shadow state, in which no client has made a request."""
        none, away = (0,) * len(self.requests), (ClientStage.AWAY,) * self.scope.requests
        return super().first_shadow()._replace(products=none, clients=away, legs=none)

    def first_events(self) -> list[tuple[Address, Any]]:
        """Return no events: the requests of clients are moves."""
        return []

    def endpoints(self) -> list[Any]:
        return [*super().endpoints(), self.router()]

    def router(self) -> Router:
        """Return the endpoint of a router that has just started. It knows the engines and no request."""
        scope = self.scope
        dispatch = "concurrent" if scope.concurrent and not scope.pulls else "sequential"
        reports = not scope.dialect.control_frames
        engines = (tuple(self.ps), tuple(self.ds))
        return Router(*engines, "round-robin", dispatch, scope.attempts, reports)  # type: ignore[arg-type]
