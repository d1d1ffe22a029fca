"""The process of an engine, or of a node of the store: `python -m pdflow_runtime.process.worker FILE --name prefill-0`.

Its first line on stdout says where it listens; logs go to stderr. It reports to the router: started by itself, where
the scenario says that the router is; with --child, where its stdin says so, if that does. SIGTERM drains it: it takes
nothing new, and ends when what it has begun has ended and no KV is held here any more. With --child it ends at once
when its stdin does.
"""

from __future__ import annotations

import logging
import math
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import msgspec
import trio

from pdflow.errors import Problem, ScenarioError
from pdflow.protocol.values import S
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow.wiring.router import heartbeat_ns
from pdflow_runtime.build import LiveBuilder, engines_of
from pdflow_runtime.clock import wall_ns
from pdflow_runtime.gpu.driver import gpus
from pdflow_runtime.http.server import RequestHandler, serve_http
from pdflow_runtime.http.sockets import listen
from pdflow_runtime.nodes.decode_api import DecodeApi
from pdflow_runtime.nodes.engine_node import LiveEngineNode
from pdflow_runtime.nodes.kv_params import Coordinates
from pdflow_runtime.nodes.models import open_model
from pdflow_runtime.nodes.prefill_api import PrefillApi
from pdflow_runtime.nodes.ranked_node import RankedNode
from pdflow_runtime.observe.engine_traces import EngineTraces
from pdflow_runtime.observe.record import Record
from pdflow_runtime.observe.spans import spans_of
from pdflow_runtime.process.addresses import EngineAddress, is_loopback, reached_at, read_router
from pdflow_runtime.process.component import HEARTBEAT_S, arguments, record_of, run_component
from pdflow_runtime.process.processes import drain_on_signal, end_process, read_stdin
from pdflow_runtime.process.reports import Reporter, RouterReporters, other_routers, reporter_of, routers_at
from pdflow_runtime.security.secret import secret_beyond_loopback
from pdflow_runtime.security.signed import Gate, Signer
from pdflow_runtime.security.tls import Tls, tls_of
from pdflow_runtime.store.api import StoreApi
from pdflow_runtime.store.build import store_node, stores_of
from pdflow_runtime.transports.at_host import AtHost
from pdflow_runtime.transports.base import MakeTransport
from pdflow_runtime.transports.named import WITHIN_ONE_HOST, caution_of, transport_named

log = logging.getLogger("pdflow_runtime.process.worker")  # not __name__, which is __main__ in its own process
MakeApi: TypeAlias = Callable[[Coordinates, Gate, Callable[[], None]], RequestHandler]
"""Makes the handler of requests. Args: where ranks listen, the gate, and a function that drains the process."""
STILL_S = 0.05
"""Time between two checks whether KV is still held here."""


async def work(scenario: ResolvedScenario, name: str, child: bool, record: Record) -> None:
    """Serve as that engine or node, until drained or cancelled."""
    host = scenario.serve.engine_host
    secret, tls = secret_beyond_loopback(scenario, "engine_host"), tls_of(scenario)
    routers = other_routers(scenario) if child else routers_at(scenario)
    if not child and (caution := caution_of(scenario.serve.transport)) is not None:
        log.warning("%s", caution)
    listeners = listening(scenario), listening(scenario)
    builder = LiveBuilder(scenario, transport_at(scenario, tls))
    node, make_api = opened(builder, name)
    node.secured_by(secret, tls)
    gate = Gate(secret, name, incarnation=node.config.incarnation)
    spans = spans_of(scenario, name, follows=True) if isinstance(node, LiveEngineNode) else None
    ports = [listener.getsockname()[1] for listener in listeners]
    http, ranks = (Coordinates(host, port) for port in ports)
    address = EngineAddress(name, http, ranks, node.config.incarnation, wall_ns())
    every_ns = heartbeat_ns(scenario)
    every_s = HEARTBEAT_S if every_ns is None else every_ns / S
    reporters = [reporter_of(scenario, tls, address, Signer(secret), every_s) for _ in routers]
    for reporter, router in zip(reporters, routers, strict=True):
        reporter.set_router(router)
    child_every_s = math.inf if every_ns is None else every_s
    started_by = reporter_of(scenario, tls, address, Signer(secret), child_every_s) if child else None
    try:
        with record.of(node, scenario, node.config.incarnation):
            if spans is not None and isinstance(node, LiveEngineNode):
                node.traces = EngineTraces(spans, name, node.pool_role, node.event_log)
            await serve(node, address, make_api, scenario, listeners, gate, reporters, started_by, tls)
    finally:
        await node.aclose()


def opened(builder: LiveBuilder, name: str) -> tuple[RankedNode, MakeApi]:
    """Return a new incarnation of that engine or node, and a function that makes its request handler. ScenarioError."""
    scenario = builder.scenario
    stores = stores_of(scenario)
    if name in stores:
        store = store_node(builder, builder.transport, name)
        return store, partial(StoreApi, store, model=scenario.model.name)
    try:
        pool = builder.pool_of(name)
    except KeyError:
        known = ", ".join((*engines_of(scenario.pools), *stores))
        raise ScenarioError([Problem(scenario.path, "", f"unknown engine {name!r}; known: {known}")]) from None
    model, method = open_model(scenario, pool), scenario.transfer.method
    if pool.role == "prefill":
        prefill = builder.prefill_node(name, model)
        return prefill, partial(PrefillApi, prefill, model.prompts, method)
    decode = builder.decode_node(name, model)
    return decode, partial(DecodeApi, decode, model.prompts, method)


async def serve(
    node: RankedNode,
    address: EngineAddress,
    make_api: MakeApi,
    scenario: ResolvedScenario,
    listeners: tuple[socket.socket, socket.socket],
    gate: Gate,
    reporters: Sequence[Reporter],
    started_by: Reporter | None,
    tls: Tls | None,
) -> None:
    """Serve until drained or cancelled. Args: `listeners`, for requests, and for ranks; `reporters`, to routers that
    the scenario names; `started_by`, to that of the supervisor, whose address comes from stdin, if there is one; `tls`,
    by which requests must come."""
    reporter = RouterReporters([*reporters, *([] if started_by is None else [started_by])])
    async with trio.open_nursery() as nursery:
        scope = nursery.cancel_scope

        async def leave() -> None:
            await reporter.leave()
            server.drain()

        def drain() -> None:
            nursery.start_soon(leave)

        if started_by is not None:
            nursery.start_soon(read_stdin, scope, lambda line: started_by.set_router(read_router(line).at))
        if node.traces is not None:
            nursery.start_soon(node.traces.spans.run)
        await nursery.start(node.serve, trio.SocketListener(trio.socket.from_stdlib_socket(listeners[1])))
        api = make_api(address.kv, gate, drain)
        async with trio.open_nursery() as serving:
            accepting = None if tls is None else tls.accepting
            server = await serving.start(partial(serve_http, listeners[0], api, tls=accepting))
            nursery.start_soon(drain_on_signal, drain, scenario.serve.drain_s, scope)
            sys.stdout.write(msgspec.json.encode(address).decode() + "\n")
            sys.stdout.flush()
            log.info("HTTP on %s:%d; rank port %d", address.http.host, address.http.port, address.kv.port)
            nursery.start_soon(reporter.run)
        await still(node)
        await reporter.end()
        scope.cancel()


def listening(scenario: ResolvedScenario) -> socket.socket:
    """Return a socket that listens at the address that other processes connect to. ScenarioError."""
    host = scenario.serve.engine_host
    problem = "is not an address of one host: other hosts could not connect to it"
    if reached_at(host) == host:
        try:
            return listen(host, 0)
        except OSError as error:
            problem = f"cannot be listened on: {error.strerror}"
    raise ScenarioError([Problem(scenario.path, "serve.engine_host", f"{host} {problem}")])


def transport_at(scenario: ResolvedScenario, tls: Tls | None) -> MakeTransport:
    """Return the transport of the scenario, at this engine's address. ScenarioError."""
    serve_config = scenario.serve
    name, host = serve_config.transport, serve_config.engine_host
    made = transport_named(name)
    if is_loopback(host) and (tls is None or name in WITHIN_ONE_HOST):
        return made
    stands_in = name == "nccl" and not gpus()
    if not is_loopback(host) and (name in WITHIN_ONE_HOST or stands_in):
        problem = (
            f"{name}{' without a GPU (the stand-in)' if stands_in else ''} works within one host only, and "
            f"serve.engine_host is {host}; between hosts use tcp, nixl or mooncake"
        )
        raise ScenarioError([Problem(scenario.path, "serve.transport", problem)])
    return AtHost(made, host, tls)


async def still(node: RankedNode) -> None:
    """Wait until no block of the node is held, in whatever way."""
    while not node.is_drained():
        await trio.sleep(STILL_S)


def main(args: Sequence[str] | None = None) -> int:
    parser = arguments("pdflow_runtime.process.worker", __doc__)
    parser.add_argument("--name", required=True, help="name of the engine, such as prefill-0")
    asked = parser.parse_args(args)
    return run_component(asked, asked.name, lambda scenario: work(scenario, asked.name, asked.child, record_of(asked)))


if __name__ == "__main__":
    end_process(main())
