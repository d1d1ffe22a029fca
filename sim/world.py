"""One simulated world: what is in it, how requests enter, and what is written down when they leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, TypeAlias

from pdflow.cost.step import StepCost
from pdflow.engine.sequence import Sequence
from pdflow.protocol.messages import Code
from pdflow.protocol.values import Address, Instant, RequestId
from pdflow.results.records import FIRST_DECODE, Records
from pdflow.results.steps import Steps
from pdflow.results.totals import Totals
from pdflow.routing.effects import DispatchAlone, DispatchPrefill, Reply
from pdflow.routing.events import DecodeEnded, PrefillAnswered, RouterEvent
from pdflow.workload.request import PREFIX_BLOCK_TOKENS, WHEN_ONE_ENDS, Request
from sim.aggregated_node import AggregatedNode
from sim.clock import Clock
from sim.decode_node import DecodeNode
from sim.engine_node import EngineNode
from sim.fabric import Fabric
from sim.node import Node
from sim.patience import Patience
from sim.prefill_node import PrefillNode
from sim.recording import Recorder
from sim.router_node import RouterNode
from sim.sessions import Sessions
from sim.store_node import StoreNode

Observer: TypeAlias = Callable[[Address, Any, tuple[Any, ...], Instant], None]

REASONS = {
    Code.REJECTED: "does not fit the engine's KV cache",
    Code.DEADLINE: "deadline",
    Code.UNREACHABLE: "no engine could be reached",
    Code.PEER_DEAD: "its engine, or its engine's peer, died",
}


class World:
    """Built by `sim.build`. `records` and `totals` fill as it runs; the clock stops when the last request has ended."""

    def __init__(self) -> None:
        self.env = Clock()
        self.records = Records()
        self.totals = Totals()
        self.steps: dict[str, Steps] = {}
        self.done = False
        self.fabric: Fabric
        self.router: RouterNode
        self.prefills: list[PrefillNode | AggregatedNode] = []
        """Whoever the router may send a prompt to."""
        self.decodes: list[DecodeNode] = []
        self.stores: list[StoreNode] = []
        """Between the two, where the method has a store."""
        self.pulls = False
        self.poll_ns = 0
        self.writer_ns = 0
        self.prefill_tokens = 0
        """Tokens of the answer that P's first token stands for: 1 with first_token = "prefill"."""
        self.decoded: dict[RequestId, tuple[Sequence, Instant]] = {}
        """What D has generated and the router has not heard of yet: sequence, and when its last token came."""
        self.caches = False
        """Whether any engine remembers prefixes."""
        self.prefix_block_tokens = PREFIX_BLOCK_TOKENS
        """Tokens that one name of the workload's prefixes stands for."""
        self.prefixes: dict[int, tuple[int, ...]] = {}
        """Of open requests, if so: the names of their full prefix blocks, of the prompt's and, where these have names,
        of the answer's."""
        self.spoilt: set[RequestId] = set()
        """Attempts whose KV at D is not all their prompt's, which D does not know."""
        self.ended = 0
        self.workload: Iterator[Request]
        self.exhausted = False
        self.waiting_for_turn: Request | None = None
        self.on_end: Callable[[int], None] | None = None
        """Told of each request that has ended."""
        self.costs: dict[str, StepCost] = {}
        """What a step takes, by pool."""
        self.recorder: Recorder | None = None
        """Writes down what changes over time (`sim.recording`), if somebody asked."""
        self.tell: Callable[[Address, str], None] | None = None
        """Told in words who copies what and which memories are taken (`sim.narration`), if somebody asked."""
        self.shipping: Any = None
        """Carries operations that go in pieces or a few at a time (`sim.shipping`), where the method has any."""
        self.sessions: Sessions | None = None
        """Who sends requests, if they come in sessions (`sim.sessions`)."""
        self.patience: Patience | None = None
        """When clients give up (`sim.patience`), if they do."""
        self.heartbeats: Any = None
        """How the router knows who is there (`sim.heartbeats`), if engines report."""
        self.scaling: Any = None
        """Who starts and stops engines (`sim.scaling`), if anybody does."""
        self.faults: Any = None
        """What goes wrong (`sim.faults`), if anything is to."""
        self.observe: Observer | None = None

    def watch(self, observe: Observer) -> None:
        """Show every event into and effect out of every endpoint to `observe(node, event, effects, now)`."""
        self.observe = observe
        for node in (self.router, *self.prefills, *self.stores, *self.decodes):
            node.watch(observe)

    # Names.

    def node_at(self, leg: str, position: int) -> EngineNode:
        """Of the engines that get such legs, the one that stands there, in the life that it is in."""
        return self.decodes[position] if leg == "decode" else self.prefills[position]

    def request_of(self, request_id: RequestId) -> int:
        """The request that an attempt's id belongs to: "r17.1" is request 17."""
        return int(request_id[1 : request_id.index(".")])

    def digest(self, request: int) -> int:
        """What stands for the content of a prompt: every simulated prompt is different."""
        return request + 1

    def assert_empty(self) -> None:
        """At quiescence: every block is back in its pool, and no endpoint remembers a transfer that is still open."""
        for node in (*self.prefills, *self.decodes):
            if not node.alive:
                continue
            node.assert_empty()
            held = self.held(node)
            assert not held, held
        for store in self.stores:
            store.assert_empty()
            still = open_at(store)
            assert not still, still

    def held(self, node: EngineNode) -> str:
        """What an engine without work holds still, in words."""
        pool = node.engine.pool
        if pool.free != pool.num_blocks:
            return f"{node.name} has lost {pool.num_blocks - pool.free} KV blocks"
        return open_at(node)

    # Requests come in.

    def open(self, workload: Iterator[Request]) -> None:
        """Let requests arrive, one in the queue at a time."""
        self.workload = workload
        self._next_arrival()

    def _next_arrival(self) -> None:
        request = next(self.workload, None)
        if request is None:
            self.exhausted = True
            self._check_done()
        elif request.arrival_ns == WHEN_ONE_ENDS:
            self.waiting_for_turn = request
        else:
            self.env.call(max(0, request.arrival_ns - self.env.now), self._arrived, request)

    def _arrived(self, request: Request) -> None:
        self.enter(request)
        self._next_arrival()

    def enter(self, request: Request) -> None:
        """A client sends it now."""
        index = self.records.add(self.env.now, request.input_tokens, request.output_tokens)
        if request.class_:
            self.records.classify(index, request.class_)
        if self.caches and request.prefix:
            # The KV of an answer's last token is computed only where it is part of a prompt.
            tokens = request.input_tokens + (request.output_tokens - 1 if request.answer_named else 0)
            self.prefixes[index] = request.prefix[: tokens // self.prefix_block_tokens]
        self.router.arrive(index, request.output_tokens <= self.prefill_tokens)
        if self.faults is not None:
            self.faults.arrived(index)
        if self.patience is not None:
            self.patience.arrived(index, request)

    # Requests go through.

    def attempted(self, effect: DispatchPrefill) -> None:
        self.records.attempts[effect.request] += 1
        self.records.prefill_engine[effect.request] = self.prefills[effect.engine].name

    def attempted_alone(self, effect: DispatchAlone) -> None:
        self.records.attempts[effect.request] += 1
        self.records.prefill_engine[effect.request] = self.decodes[effect.engine].name

    def answered(self, event: RouterEvent, now: Instant) -> None:
        """What an engine's answer means for the client, if the router still waits for it."""
        if type(event) is DecodeEnded or (type(event) is PrefillAnswered and event.request_id in self.decoded):
            decoded = self.decoded.pop(event.request_id, None)
            if decoded is not None and self.router.awaits(event.request_id):
                request = self.request_of(event.request_id)
                self.stamp_tokens(request, *decoded)
                if event.request_id in self.spoilt:
                    assert self.records.wrong_kv is not None
                    self.records.wrong_kv.add(request)
        elif self.prefill_tokens and type(event) is PrefillAnswered and event.params is not None:
            # With first_token = "prefill", the prefill leg's answer brings the client its first token.
            request = self.request_of(event.request_id)
            if self.router.first_token_told(event.request_id):
                self.records.first_token_ns[request] = now
                self.records.last_token_ns[request] = now

    def stamp_tokens(self, request: int, seq: Sequence, at_ns: Instant) -> None:
        """All tokens are generated; each takes one hop to the client."""
        records, http = self.records, self.router.http_ns
        first = seq.first_token_ns + http
        records.ends[FIRST_DECODE][request] = first
        if records.first_token_ns[request] < 0 or not self.prefill_tokens:
            records.first_token_ns[request] = first
        records.last_token_ns[request] = at_ns + http
        runs = seq.token_runs
        records.token_steps[request] = runs[0] if len(runs) == 1 else tuple(chain.from_iterable(runs))

    # Requests end.

    def replied(self, effect: Reply) -> None:
        records = self.records
        records.outcome[effect.request] = effect.outcome
        records.attempts[effect.request] = effect.attempts
        if effect.outcome != "completed":
            said = REASONS.get(effect.code, effect.code.name.lower().replace("_", " "))
            records.reason[effect.request] = effect.reason or said
        self.prefixes.pop(effect.request, None)
        self.ended += 1
        if self.on_end is not None:
            self.on_end(effect.request)
        request = self.waiting_for_turn
        if request is not None:
            self.waiting_for_turn = None
            self.enter(request)
            self._next_arrival()
        if self.sessions is not None:
            self.sessions.ended(effect.request, effect.outcome)
        self._check_done()

    def _check_done(self) -> None:
        if self.exhausted and self.ended == len(self.records) and not self.done:
            self.totals.duration_ns = self.env.now
            self.done = True
            self.env.stop()


def open_at(node: Node) -> str:
    """What its endpoints remember of a transfer that is still open, in words."""
    for port in node.ports.values():
        for table in ("cells", "products", "reads"):
            left = getattr(port.endpoint, table, None)
            if left:
                return f"{port.address} still holds {table}: {left}"
    return ""
