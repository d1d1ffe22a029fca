"""One engine's process: `python -m runtime.worker FILE --name prefill-0`.

Its first line on stdout says where it hears; logs go to stderr. SIGTERM drains it: it takes nothing new, and ends when
what it has begun has ended and nobody holds KV here. With --child it ends at once when its stdin does.
"""

from __future__ import annotations

import logging
import sys

import msgspec
import trio

from pdflow.errors import Problem, ScenarioError
from pdflow.scenario.schema import Scenario
from runtime.build import Builder, engines_of
from runtime.engine_api import EngineApi
from runtime.engine_node import EngineNode
from runtime.http.server import serve_http
from runtime.http.sockets import listen
from runtime.kv_params import Coordinates
from runtime.models import open_model
from runtime.part import arguments, record_of, run_part
from runtime.places import LOOPBACK, EnginePlace
from runtime.processes import drain_on_signal, hear_stdin
from runtime.prompts import Prompts
from runtime.record import Record
from runtime.transports.named import transport_named

log = logging.getLogger(__name__)
STILL_S = 0.05
"""Between two looks at whether anybody still holds KV here."""


async def work(scenario: Scenario, name: str, child: bool, record: Record) -> None:
    """Serve as that engine, until drained or cancelled."""
    says = scenario.serve
    builder = Builder(scenario, transport_named(says.transport))
    try:
        model = open_model(scenario, builder.pool_of(name))
    except KeyError:
        engines = ", ".join(engines_of(scenario))
        raise ScenarioError([Problem(scenario.path, "", f"no engine {name}; there are {engines}")]) from None
    node = builder.node(name, model)
    try:
        with record.of(node, scenario, node.place.incarnation):
            await serve(node, model.prompts, scenario, child)
    finally:
        for rank in node.ranks.values():
            await rank.transport.aclose()


async def serve(node: EngineNode, prompts: Prompts, scenario: Scenario, child: bool) -> None:
    """Until drained or cancelled."""
    says = scenario.serve
    async with trio.open_nursery() as nursery:
        scope = nursery.cancel_scope
        if child:
            nursery.start_soon(hear_stdin, scope, ignore)
        (listener,) = await trio.open_tcp_listeners(0, host=LOOPBACK)
        await nursery.start(node.serve, listener)
        here = Coordinates(LOOPBACK, node.port)
        api = EngineApi(node, prompts, scenario.transfer.method, here)
        async with trio.open_nursery() as serving:
            server = await serving.start(serve_http, listen(LOOPBACK, 0), api)
            nursery.start_soon(drain_on_signal, server.drain, says.drain_s, scope)
            place = EnginePlace(node.name, Coordinates(LOOPBACK, server.port), here)
            sys.stdout.write(msgspec.json.encode(place).decode() + "\n")
            sys.stdout.flush()
            log.info("takes requests at %s:%d; its ranks hear at %d", LOOPBACK, server.port, node.port)
        await still(node)
        scope.cancel()


async def still(node: EngineNode) -> None:
    """Until nobody holds any of its blocks, in whatever way."""
    while node.pool.free < node.pool.num_blocks:
        await trio.sleep(STILL_S)


def ignore(line: bytes) -> None:
    pass


def main() -> int:
    parser = arguments("runtime.worker", __doc__)
    parser.add_argument("--name", required=True, help="the engine, as in prefill-0")
    asked = parser.parse_args()
    return run_part(asked, asked.name, lambda scenario: work(scenario, asked.name, asked.child, record_of(asked)))


if __name__ == "__main__":
    sys.exit(main())
