"""The live node of a setting, with a scripted engine and a scripted host. All that is known here of `runtime/` is in
this file."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import attrs
import trio
import trio.testing

import pdflow_runtime.nodes.ranked_node
from pdflow.engine.sequence import ChunkBegun, Dropped, Finished, NeverFitsError, Outcome, Sequence
from pdflow.layout.shapes import stage_layers
from pdflow.methods.method import MemoryKind
from pdflow.methods.shipment import Piece
from pdflow.methods.store.memory import Item
from pdflow.protocol.effects import Fence, Handshake, PostRead, PostWrite, ReadWord, Send
from pdflow.protocol.ids import EngineInfo, KvParams, LeaseWord, Op, rank_address
from pdflow.protocol.messages import Code
from pdflow.protocol.values import MS, Address, Allocation, EngineId, Instant, S, Xid
from pdflow.serving.core import Port
from pdflow.serving.events import EngineRejected
from pdflow.wiring.stores import load_xid, put_name
from pdflow_runtime.build import LiveBuilder
from pdflow_runtime.engines.job import Job, Sampling, Token
from pdflow_runtime.engines.loop import LayerComputed
from pdflow_runtime.nodes.kv_params import Coordinates
from pdflow_runtime.nodes.ranked_node import NodeConfig
from pdflow_runtime.store.calls import StoredKv
from pdflow_runtime.store.node import LiveStoreNode
from pdflow_runtime.transports.base import DoneMeans, EventSink, Fences, Transport
from tests.serving.script import Abort, Arrive, Call, Do, Event, FirstToken, Look, Store, Together, Wait
from tests.serving.scripted_engine import LAYER_NS, EngineModel
from tests.serving.setting import (
    BLOCK,
    BLOCKS,
    INCARNATION,
    LAYERS,
    REQUESTS,
    SHAPE,
    STORE,
    STORE_BLOCKS,
    WEIGHTS,
    Setting,
    digest,
    found_params,
    items_of,
    params_of,
    prompt_of,
    put_params,
    request_id_of,
    store_memory,
    store_wiring,
    xid_of,
)
from tests.serving.watched import Record, answer, lookup_answer, recorded, recorded_memory, staging_in, watch

FIRST = 77
"""P's token."""


class Clock:
    """What live nodes read in the place of trio's clock: exact, as `now_ns` multiplies seconds."""

    def __init__(self) -> None:
        self.now: Instant = 0

    def current_time(self) -> Fraction:
        return Fraction(self.now, S)


class NoTransport:
    """In the place of what makes transports: it says what the others do."""

    done_means: DoneMeans = "remote"
    fences: Fences = "revoke"

    def __call__(self, me: Address, on_event: EventSink, /) -> Transport:
        raise AssertionError("ranks are recorded, and have no transport")


class Engine:
    """What live nodes call, passed on to the model."""

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self.pool = model.pool

    @property
    def reports_chunks(self) -> bool:
        return self.model.reports_chunks

    @reports_chunks.setter
    def reports_chunks(self, value: bool) -> None:
        self.model.reports_chunks = value

    def names(self, tokens: Any) -> tuple[int, ...]:
        return ()

    def submit(self, job: Job) -> None:
        assert job.seq.prompt_tokens == len(job.tokens)
        self.model.submit(job.tokens[0], job.seq)

    def enqueue(self, job: Job) -> EngineRejected | None:
        try:
            self.submit(job)
        except NeverFitsError as error:
            return EngineRejected(job.seq.handle, str(error))
        return None

    def loaded(self, seq: Sequence) -> None:
        self.model.loaded(seq)

    def drop(self, seq: Sequence) -> Dropped:
        return self.model.drop(seq)

    def release(self, allocation: Allocation) -> None:
        self.model.release(allocation)

    def hold(self) -> None:
        self.model.hold()

    def resume(self) -> None:
        self.model.go_on()


class RecordedTransfers:
    """One rank's operations in pieces, recorded."""

    def __init__(self, address: Address, record: Record) -> None:
        self.address = address
        self.record = record
        self.event_log: Any = None
        self.pipeline_policy: Any = None

    def offer(self, xid: Xid, piece: Piece) -> None:
        self.record(Call("offer", xid, (self.address, piece)))

    def withdraw(self, xid: Xid) -> None:
        self.record(Call("withdraw", xid, (self.address,)))

    def stop(self, op: Op) -> None:
        self.record(Call("stop", rank_address(op.reg.engine, op.d_rank), (op,)))


class Rank:
    """One rank's memory and transport, recorded."""

    def __init__(self, record: Record, engine: EngineInfo, number: int) -> None:
        shards = engine.shards
        self.record = record
        self.address = rank_address(engine.engine, number)
        self.layers = stage_layers(LAYERS, shards.pp)[number // shards.tp]
        self.memory = SimpleNamespace(num_layers=len(self.layers))
        self.transfers = RecordedTransfers(self.address, record)
        self.staged: dict[Xid, Allocation] = {}
        self.meter = None
        self.transport = NoTransport()
        self.lost: Callable[[Address], None] = lambda peer: None

    def write(self, effect: PostWrite) -> None:
        self.record(Call("write", self.address, (effect,)))

    def read(self, effect: PostRead) -> None:
        self.record(Call("read", self.address, (effect,)))

    def read_word(self, effect: ReadWord) -> None:
        self.record(Call("read word", self.address, (effect.op, effect.source, effect.index)))

    def fence(self, peer: Address, newest_generation: int) -> None:
        self.record(Call("fence", self.address, (peer,)))

    def expose(self, lease_word: LeaseWord) -> None:
        self.record(Call("show word", self.address, (lease_word.index, lease_word.value)))

    def bump(self, lease_word: LeaseWord) -> None:
        self.record(Call("bump word", self.address, (lease_word.index,)))

    def copy_in(self, staged: Allocation, blocks: Any, tokens: int, piece: Piece) -> None:
        self._copied(piece)

    def copy_out(self, blocks: Any, staged: Allocation, tokens: int, piece: Piece) -> None:
        self._copied(piece)

    def _copied(self, piece: Piece) -> None:
        self.record(Call("copy", self.address))


class Links:
    """Streams to peers, recorded."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def send(self, port: Port, effect: Send) -> None:
        self.record(Call("send", port.address, (effect.to, effect.message)))

    def handshake(self, port: Port, effect: Handshake) -> None:
        self.record(Call("handshake", port.address, (effect.peer,)))

    def fence(self, port: Port, effect: Fence) -> None:
        """Its stream goes with the memory, which the rank's fence records."""

    def lose(self, me: Address, peer: Address) -> None:
        raise AssertionError("a scripted transport loses nobody")

    async def update_address(self, engine: EngineId, host: str, tcp_port: int) -> None:
        """Where peers hear is no matter here."""


class StoreClient:
    """What P says to a store's node, which answers when the script says so. A call that is taken back is a withdrawal:
    over HTTP that is what hanging up means."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.answers: dict[tuple[str, str], StoredKv] = {}
        self.waiting: dict[tuple[str, str], trio.Event] = {}

    async def look(
        self, node: str, at: Any, request_id: str, xid: Xid, items: Any, *, digest: int, weights: int
    ) -> StoredKv:
        self.record(Call("store look", request_id, (xid, items, digest, weights)))
        return await self._answer(("look", request_id))

    async def put(self, node: str, at: Any, params: KvParams, port: int, items: Any) -> StoredKv:
        self.record(Call("store put", params.request_id, (params, items)))
        try:
            return await self._answer(("put", params.request_id))
        except trio.Cancelled:
            self.record(Call("store withdraw", params.request_id, (params.xid,)))
            raise

    async def withdraw(self, node: str, at: Any, request_id: str, xid: Xid) -> None:
        self.record(Call("store withdraw", request_id, (xid,)))

    async def _answer(self, call: tuple[str, str]) -> StoredKv:
        self.waiting[call] = trio.Event()
        await self.waiting[call].wait()
        return self.answers.pop(call)

    def resolve(self, call: tuple[str, str], found: StoredKv) -> None:
        self.answers[call] = found
        self.waiting.pop(call).set()

    def close(self) -> None: ...


class StoreKeys:
    """Of one node."""

    most_tokens = STORE_BLOCKS * BLOCK

    def objects(self, tokens: list[int]) -> tuple[Item, ...]:
        return items_of(tokens[0])

    def home(self, items: Any) -> int:
        return 0


class Nursery:
    """Where a node's tasks run: beside the script, so that what they raise is not taken for the script's."""

    def start_soon(self, task: Callable[..., Any], *args: Any) -> None:
        trio.lowlevel.spawn_system_task(task, *args)


class RecordedChannel:
    """The end of a decode leg that its client reads."""

    def __init__(self, record: Record, request_id: str) -> None:
        self.record = record
        self.request_id = request_id

    def send_nowait(self, item: Token | Code) -> None:
        if isinstance(item, Code):
            self.record(answer(self.request_id, item))


class Answered:
    """Set when a prefill leg, or a call of a store, has its answer. `as_call` makes a call of it."""

    def __init__(self, record: Record, leg: Any, as_call: Callable[[Any], Call] | None = None) -> None:
        self.record = record
        self.leg = leg
        self.as_call = as_call or (lambda leg: answer(leg.request_id, leg.code, leg.params))
        self.answered = False

    def is_set(self) -> bool:
        return self.answered

    def set(self) -> None:
        leg, self.answered = self.leg, True
        self.record(self.as_call(leg))


class Live:
    """See `sides.Side`."""

    name = "live"

    def __init__(self, setting: Setting) -> None:
        self.calls: list[Call] = []
        self.record: Record = self.calls.append
        self.setting = setting
        self.clock = Clock()
        self.engine = EngineModel(self.record, BLOCKS, BLOCK, LAYERS)
        self.legs: dict[int, Any] = {}
        wiring = setting.wiring()
        self.builder = LiveBuilder(setting.scenario, NoTransport())
        self.builder.shapes, self.builder.geometry = wiring.shapes, wiring.geometry
        with self._patched():
            self.node = self._node()
        if setting.role != "store":
            self.node.engine = Engine(self.engine)
            self.node.engine.reports_chunks = setting.role == "prefill" and self.builder.pipeline_policy.early
        self.node.observe = watch(self.record)

    def _patched(self) -> Any:
        """The clock of live nodes is the script's; their ranks and links are recorded."""
        return patch.multiple("pdflow_runtime.clock", trio=self.clock)

    def _node(self) -> Any:
        setting, builder, record = self.setting, self.builder, self.record
        memory = {"prefill": builder.method.p_memory, "decode": builder.method.d_memory}.get(
            setting.role, MemoryKind.BLOCKS
        )
        staging = None
        if memory is not MemoryKind.BLOCKS:
            staging = recorded(staging_in(memory, builder.method, setting.ranks), record)
        config = NodeConfig(
            info=setting.info,
            incarnation=INCARNATION,
            shape=SHAPE,
            num_blocks=BLOCKS,
            layouts=None,  # type: ignore[arg-type]
            weights=WEIGHTS,
        )

        def rank(info: EngineInfo, number: int, *_: Any) -> Rank:
            return Rank(record, info, number)

        def links(*_: Any) -> Links:
            return Links(record)

        with patch.multiple(pdflow_runtime.nodes.ranked_node, Rank=rank, RankLinks=links):
            if setting.role == "store":
                return self._store(config)
            make = builder.empty_prefill_node if setting.role == "prefill" else builder.empty_decode_node
            node: Any = make(config, staging)
        if builder.method.stores and setting.role == "prefill":
            node.keys, node.client, node.nursery = StoreKeys(), StoreClient(record), Nursery()
            node.stores = (Coordinates("store", 1),)
        return node

    def _store(self, config: NodeConfig) -> Any:
        wiring = store_wiring(self.builder)
        config = attrs.evolve(config, info=EngineInfo(put_name(STORE), self.setting.shards), leases=64)
        ends = wiring.put_to(STORE, INCARNATION), wiring.got_from(STORE, INCARNATION)
        memory = recorded_memory(store_memory(), self.record)
        return LiveStoreNode(STORE, config, *ends, memory, NoTransport())

    @property
    def now(self) -> Instant:
        return self.clock.now

    async def step(self, step: Any) -> list[Call]:
        """Play one, and say what the node did."""
        with self._patched():
            self._happen(step)
            self.node.turn(self.now)
            if self.builder.method.stores:
                # What runs beside the node goes as far as it can.
                await trio.testing.wait_all_tasks_blocked()
                self.node.turn(self.now)
                await trio.testing.wait_all_tasks_blocked()
        calls = self.calls.copy()
        self.calls.clear()
        return calls

    def _happen(self, step: Any) -> None:
        match step:
            case Together(steps):
                for one in steps:
                    self._happen(one)
            case Wait(ms, ns):
                self._run_until(self.now + ms * MS + ns)
            case Arrive():
                self._arrive(step)
            case Abort(r):
                if (leg := self.legs.get(r)) is not None:
                    self._abort(leg)
            case FirstToken(r):
                if (leg := self.legs.get(r)) is not None:
                    self.node.set_first_token(leg, FIRST)
            case Store(what, r):
                self._answered(what, request_id_of(r), r)
            case Look(r):
                self._look(r)
            case Event(address, event):
                self.node.put(self.node.ports[address], event)
            case Do():
                self._do(step)

    def _abort(self, leg: Any) -> None:
        """As the engine's API does when whoever asked hangs up."""
        if self.setting.role == "store":
            self.node.withdraw(leg.request_id, leg.xid)
        elif self.setting.role != "prefill" or not leg.answered.is_set():
            self.node.abort(leg)

    def _arrive(self, step: Arrive) -> None:
        self.legs[step.r] = leg = self._begin(step)
        if self.setting.role in ("prefill", "store"):
            leg.answered = Answered(self.record, leg)
        else:
            leg.send_channel = RecordedChannel(self.record, leg.request_id)

    def _begin(self, step: Arrive) -> Any:
        node, r = self.node, step.r
        request_id, tokens = request_id_of(r), prompt_of(r)
        sampling = Sampling(max_tokens=REQUESTS[r].output)
        if self.setting.role == "store":
            return node.start(put_params(self.setting, r), items_of(r))
        if self.setting.role == "prefill":
            if step.alone:
                return node.begin_alone(request_id, tokens, Sampling(max_tokens=1))
            return node.begin(request_id, xid_of(r), tokens)
        if step.alone or self.setting.role == "aggregated":
            return node.begin_alone(request_id, tokens, sampling)
        params = params_of(self.setting, r, self.builder.pulls)
        first = FIRST if step.first == "known" else None
        return node.begin(request_id, params, tokens, sampling, first, step.first == "follows")

    def _answered(self, what: str, request_id: str, r: int) -> None:
        client: StoreClient = self.node.client
        if what in ("found", "nothing"):
            params = found_params(self.setting, r) if what == "found" else None
            client.resolve(("look", request_id), StoredKv(params, Coordinates("store", 1)))
        else:
            ok = what == "put"
            params = found_params(self.setting, r) if ok else None
            client.resolve(("put", request_id), StoredKv(params, None, Code.NONE if ok else Code.REJECTED))

    def _look(self, r: int) -> None:
        def as_call(call: Any) -> Call:
            return lookup_answer(call.request_id, call.params)

        args = (request_id_of(r), load_xid(xid_of(r)), items_of(r)[:-1], digest(r), WEIGHTS)
        call = self.node.look(*args)
        if call.answered.is_set():
            self.record(as_call(call))
        else:
            call.answered = Answered(self.record, call, as_call)

    def _do(self, step: Do) -> None:
        # As an engine does before it composes a step, or completes one.
        self.node.settle()
        known = step in self.engine.possible()
        if step.act == "layer" and known:
            self._run_until(self.now + LAYER_NS)
        outcomes = self.engine.do(step, self.now)
        if known and step.act == "token":
            self.node.on_engine_output(Token(self.engine.seqs[step.r], 1, None, None))
        if known and step.act == "layer":
            self.node.on_engine_output(LayerComputed(self.engine.layers_done - 1, self.now))
        for outcome in outcomes:
            self._deliver(outcome)

    def _deliver(self, outcome: Outcome) -> None:
        if isinstance(outcome, Finished):
            self.node.on_engine_output(Token(outcome.seq, 1, None, "length"))
        if isinstance(outcome, ChunkBegun) and not outcome.seq.prefill_only:
            return
        self.node.on_engine_output(outcome)

    def _run_until(self, until: Instant) -> None:
        """All deadlines that are due by then."""
        self.node.turn(self.now)
        while (at := self.node.wake_at()) is not None and at <= until:
            self.clock.now = max(self.clock.now, at)
            self.node.turn(self.clock.now)
        self.clock.now = until
