"""The router's endpoint for a live cluster, made as in every other driver, and the event with which a request arrives
at it."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from pdflow.routing.events import NO_SESSION, EngineChanged, RequestArrived
from pdflow.routing.governed import GovernedRouter
from pdflow.routing.prefix_aware import PrefixAware
from pdflow.routing.router import Router
from pdflow.scenario.costs.step_costs import step_cost
from pdflow.scenario.costs.transfer_time import Crossover
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow.wiring.router import RoutedEngines, Target, dispatch_of
from pdflow.wiring.router import router_of as wired
from pdflow.workload.request import SESSION_BLOCK_TOKENS
from pdflow_runtime.build import LiveBuilder, engines_of
from pdflow_runtime.engines.prefix import block_names
from pdflow_runtime.http.messages import HttpRequest
from pdflow_runtime.http.openai.fields import Fields
from pdflow_runtime.router.call import Call
from pdflow_runtime.store.build import stores_of

STORE: Final = "store"
"""The role of a store's node, which is no engine and gets no legs."""
SESSION: Final = b"x-session-id"
"""The header by which a client names its session; without it the field `user` does."""
NOBODY: Final = (b"", b'""', b"null")


def seats_of(scenario: ResolvedScenario, role: str) -> list[str]:
    """Return the engines of that role, or that get that leg, that there may ever be: those of the scenario, then those
    that may be added; or the nodes of the store."""
    if role == STORE:
        return stores_of(scenario)
    pools = [pool for pool in scenario.pools if role in (pool.leg, pool.role)]
    spares = range(scenario.serve.spare_engines)
    return engines_of(pools) + [f"{pool.name}-{pool.replicas + more}" for pool in pools for more in spares]


def governed_of(builder: LiveBuilder) -> GovernedRouter:
    """Return a router whose engines may be drained and added."""
    router = router_of(builder, changes=True)
    assert isinstance(router, GovernedRouter)
    return router


def router_of(builder: LiveBuilder, changes: bool = False) -> Router:
    """Return the router's endpoint; all engines are down until they report."""
    prefill, decode = (
        tuple(Target(builder.info_of(name), builder.pool_of(name)) for name in seats_of(builder.scenario, role))
        for role in ("prefill", "decode")
    )
    router = wired(
        RoutedEngines(
            scenario=builder.scenario,
            method=builder.method,
            prefill=prefill,
            decode=decode,
            prefix_block_tokens=SESSION_BLOCK_TOKENS,
            crossover=lambda position: crossover_of(builder).thresholds(decode[position].pool),
            changes=changes,
            may_stall=True,
        )
    )
    for target in (*prefill, *decode):
        router.handle(EngineChanged(target.info.engine, False), 0)
    return router


def crossover_of(builder: LiveBuilder) -> Crossover:
    """Return the rule by which short prompts stay at D, from what the scenario says that steps and transfers take."""
    scenario = builder.scenario
    return Crossover(
        scenario=scenario,
        costs={pool.name: step_cost(scenario.model, pool, scenario.base_dir) for pool in scenario.pools},
        initiator=builder.initiator,
        rule=builder.rule,
        sequential=dispatch_of(scenario, builder.method) == "sequential",
    )


def arrival(router: Router, call: Call, prefill_only: bool = False) -> RequestArrived:
    """Return the event of a request. Its prefix blocks are named only where a routing choice looks at them: 4,000
    tokens take some 0.1 ms."""
    looks = isinstance(router.prefill_choice, PrefixAware) or isinstance(router.decode_choice, PrefixAware)
    tokens = call.tokens
    names = block_names(tokens, SESSION_BLOCK_TOKENS) if looks else ()
    return RequestArrived(
        call.number,
        prefill_only,
        len(tokens),
        names,
        call.session,
        streams=call.streams,
        resumable=call.passed is not None and call.responder.chunked_ok,
    )


def session_of(request: HttpRequest, fields: Fields) -> int:
    """Return a number for the session that the client names; NO_SESSION only if it names none."""
    named = request.header(SESSION) or bytes(fields.get("user", b""))
    if named in NOBODY:
        return NO_SESSION
    return int.from_bytes(blake2b(named, digest_size=7).digest(), "little")
