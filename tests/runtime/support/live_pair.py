"""Live engines in one process: real memory, real streams over loopback, a small model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, TypeAlias

import trio

from pdflow.protocol.ids import KvParams
from pdflow.protocol.invariants.oracle import Oracle
from pdflow.protocol.messages import Code
from pdflow.scenario.reading.load import parse, resolve
from pdflow.scenario.schema.scenario import ResolvedScenario
from pdflow_runtime.build import LiveBuilder
from pdflow_runtime.engines.job import Sampling, Token
from pdflow_runtime.http.server import serve_http
from pdflow_runtime.http.sockets import listen
from pdflow_runtime.nodes.decode_node import DecodeLeg
from pdflow_runtime.nodes.kv_params import Coordinates
from pdflow_runtime.nodes.models import ServedModel
from pdflow_runtime.nodes.prefill_node import LivePrefillLeg, LivePrefillNode
from pdflow_runtime.nodes.ranked_node import RankedNode
from pdflow_runtime.security.signed import Gate
from pdflow_runtime.store.api import StoreApi
from pdflow_runtime.store.build import store_node
from pdflow_runtime.store.node import LiveStoreNode
from pdflow_runtime.store.prefill_node import LiveStorePrefillNode
from pdflow_runtime.transports.base import MakeTransport
from pdflow_runtime.transports.named import transport_named
from tests.runtime.support.obligations import ObligationInstrument, kept_at_rest

LOCAL: Final = "127.0.0.1"
CLUSTER: Final = """
[workload]
requests = 1
arrival = { process = "constant", rate_rps = 1.0 }
input_tokens = 64
output_tokens = 4
[model]
preset = "tiny"
[[pool]]
name = "prefill"
role = "prefill"
gpu = "cpu"
engine = "torch"
kv_tokens = 8192
max_num_seqs = 16
max_num_batched_tokens = 256
[[pool]]
name = "decode"
role = "decode"
replicas = 2
gpu = "cpu"
engine = "torch"
kv_tokens = 8192
max_num_seqs = 16
max_num_batched_tokens = 256
"""


def cluster(*overrides: str, model: str = 'preset = "tiny"') -> ResolvedScenario:
    """`model`: what stands under [model]."""
    draft = parse("cluster.toml", CLUSTER.replace('preset = "tiny"', model))
    draft.override(overrides, None)
    return resolve(draft)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Tokens that no other seed begins with."""
    return [(seed * 101 + at * 37) % 500 + 5 for at in range(length)]


ANSWER_TIMEOUT_S: Final = 300
"""For an answer: a machine may be busy, and a benchmark ask for much."""


class Answer(NamedTuple):
    tokens: list[int]
    code: Code


Prefill: TypeAlias = tuple[ResolvedScenario, ServedModel]
"""What P is made from where it differs from D, as on a host of its own."""


class LivePair:
    """One P and two D, of which the second computes alone what the other's answers must be."""

    def __init__(
        self, scenario: ResolvedScenario, model: ServedModel, transport: MakeTransport, prefill: Prefill | None = None
    ) -> None:
        builder = LiveBuilder(scenario, transport)
        of_p, p_model = (builder, model) if prefill is None else (LiveBuilder(prefill[0], transport), prefill[1])
        p = of_p.prefill_node("prefill-0", p_model)
        d, alone = (builder.decode_node(name, model) for name in ("decode-0", "decode-1"))
        self.p, self.d, self.alone = p, d, alone
        self.pulls: Final = builder.pulls
        self.oracle: Final = Oracle(builder.geometry, builder.done_is_remote)
        self.events: list[tuple[str, Any]] = []
        for node in (p, d):
            node.observe = self.observe
        self.store: LiveStoreNode | None = None
        self.store_at: Coordinates
        """Where it takes requests."""
        if builder.method.stores:
            self.store = store_node(builder, builder.transport, "store-0")
            self.store.observe = self.observe
        self.instrument: Final = ObligationInstrument([*self.nodes(), alone])

    def observe(self, address: str, event: Any, effects: tuple[Any, ...], now: int) -> None:
        self.events.append((address, event))
        self.oracle.observe(address, event, effects, now)

    async def ask(self, name: str, tokens: list[int], sampling: Sampling) -> Answer:
        """By way of both engines, as the method has it."""
        legs = self.send(name, tokens, sampling)
        if isinstance(legs, DecodeLeg):
            return await answer_of(legs)
        with trio.fail_after(ANSWER_TIMEOUT_S):
            await legs.answered.wait()
        if legs.params is None:
            return Answer([], legs.code)
        if legs.at is not None:
            await self.d.links.update_address(legs.params.prefill.engine, legs.at.host, legs.at.port)
        return await answer_of(self.d.begin(name, legs.params, tokens, sampling))

    def send(self, name: str, tokens: list[int], sampling: Sampling) -> DecodeLeg | LivePrefillLeg:
        prefill = self.p.begin(name, f"x-{name}", tokens)
        if self.pulls:
            return prefill
        params = KvParams(self.p.config.info, f"x-{name}", name, 0)
        return self.d.begin(name, params, tokens, sampling)

    async def ask_alone(self, name: str, tokens: list[int], sampling: Sampling) -> Answer:
        return await answer_of(self.alone.begin_alone(name, tokens, sampling))

    async def quiet(self, within_s: float = 10) -> None:
        """Until nobody holds anything for anybody, and no endpoint keeps what it must not keep at rest."""
        with trio.move_on_after(within_s) as scope:
            while not all(node.is_drained() for node in self.nodes()) or self.kept():
                await trio.sleep(0.01)
        if scope.cancelled_caught:
            raise trio.TooSlowError(self.kept() or "blocks, room or calls are still held")
        assert not self.instrument.found, self.instrument.found
        if self.store is not None:
            self.store.ledger.assert_empty("the store")

    def kept(self) -> str:
        return next(filter(None, map(kept_at_rest, self.nodes())), "")

    def nodes(self) -> list[RankedNode]:
        """All that hand KV on."""
        return [self.p, self.d] if self.store is None else [self.p, self.store, self.d]


async def answer_of(leg: DecodeLeg) -> Answer:
    tokens = []
    with trio.fail_after(ANSWER_TIMEOUT_S):
        async for item in leg.receive_channel:
            if not isinstance(item, Token):
                return Answer(tokens, item)
            tokens.append(item.token)
    raise AssertionError("the answer has no end")


@asynccontextmanager
async def live_pair(
    scenario: ResolvedScenario,
    model: ServedModel,
    transport: str | MakeTransport = "shm",
    prefill: Prefill | None = None,
) -> AsyncIterator[LivePair]:
    built = LivePair(scenario, model, transport_named(transport) if isinstance(transport, str) else transport, prefill)
    nodes = (*built.nodes(), built.alone)
    try:
        async with trio.open_nursery() as nursery:
            for node in nodes:
                await nursery.start(node.serve, (await trio.open_tcp_listeners(0, host=LOCAL))[0])
            built.d.links.book["prefill-0"] = (LOCAL, built.p.port)
            if built.store is not None:
                built.store_at = await open_store(built.store, [built.p], nursery)
            trio.lowlevel.add_instrument(built.instrument)
            try:
                yield built
            finally:
                trio.lowlevel.remove_instrument(built.instrument)
            assert not built.instrument.found, built.instrument.found
            nursery.cancel_scope.cancel()
    finally:
        for node in nodes:
            await node.aclose()


async def open_store(store: LiveStoreNode, engines: list[LivePrefillNode], nursery: trio.Nursery) -> Coordinates:
    """From now on these may put there."""
    api = StoreApi(store, Coordinates(LOCAL, store.port), Gate(None, store.name), nursery.cancel_scope.cancel)
    server = await nursery.start(serve_http, listen(LOCAL, 0), api)
    for engine in engines:
        assert isinstance(engine, LiveStorePrefillNode)
        engine.stores = (Coordinates(LOCAL, server.port),)
    return Coordinates(LOCAL, server.port)
