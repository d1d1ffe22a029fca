"""The simulated node of a setting, with a scripted engine and a scripted host. All that is known here of `sim/` is in
this file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs

from pdflow.cost.step import StepCost
from pdflow.engine.hosted import HostedEngine
from pdflow.engine.sequence import Dropped, Limits, Outcome, Sequence
from pdflow.methods.method import Hop, MemoryKind
from pdflow.methods.shipment import Piece
from pdflow.methods.staging import Staging
from pdflow.methods.store.memory import Item
from pdflow.protocol.effects import PostRead, PostWrite, Send
from pdflow.protocol.ids import EngineInfo, LeaseWord, Op, rank_address
from pdflow.protocol.messages import Code
from pdflow.protocol.values import MS, Address, Allocation, Instant, Xid
from pdflow.routing.effects import DispatchAlone, DispatchDecode, DispatchPrefill
from pdflow.routing.events import DecodeEnded, PrefillAnswered
from pdflow.serving.effects import AnswerCall
from pdflow.serving.events import LookupRequested, PutRequested
from pdflow.wiring.endpoints import Consumer
from pdflow.wiring.stores import load_xid
from pdflow_sim.build import SimulationBuilder
from pdflow_sim.engine_slot import EngineSlot
from pdflow_sim.nodes.aggregated_node import AggregatedNode
from pdflow_sim.nodes.engine_node import SimEngineNode
from pdflow_sim.nodes.node import SimPort
from pdflow_sim.nodes.prefill_node import SimPrefillNode
from pdflow_sim.nodes.store_node import SimStoreNode
from tests.serving.peers import number_of
from tests.serving.script import Abort, Arrive, Call, Do, Event, FirstToken, Look, Store, Together, Wait
from tests.serving.scripted_engine import EngineModel
from tests.serving.setting import (
    BLOCK,
    BLOCKS,
    INCARNATION,
    LAYERS,
    REQUESTS,
    STORE,
    WEIGHTS,
    Setting,
    digest,
    found_params,
    items_of,
    params_of,
    put_params,
    request_id_of,
    store_memory,
    store_wiring,
    xid_of,
)
from tests.serving.watched import Record, answer, lookup_answer, recorded, recorded_memory, staging_in, watch


class Engine(HostedEngine):
    """What simulated nodes call, passed on to the model."""

    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self.limits = Limits(block_size=BLOCK)
        self.pool = model.pool
        self.wake_ns = None
        self._reports = False

    @property
    def reports_chunks(self) -> bool:  # type: ignore[override]
        return self.model.reports_chunks

    @reports_chunks.setter
    def reports_chunks(self, value: bool) -> None:
        self.model.reports_chunks = value

    def submit(self, seq: Sequence, now: Instant) -> None:
        self.model.submit(seq.index, seq)

    def loaded(self, seq: Sequence, now: Instant) -> None:
        self.model.loaded(seq)

    def release(self, allocation: Allocation, now: Instant) -> None:
        self.model.release(allocation)

    def drop(self, seq: Sequence, now: Instant) -> Dropped:
        return self.model.drop(seq)

    def freeze(self, now: Instant) -> list[Outcome]:
        self.model.hold()
        return []

    def thaw(self, now: Instant) -> None:
        self.model.go_on()

    def stretch(self, now: Instant, until: Instant) -> list[Outcome]:
        return []


class Fabric:
    """What goes between nodes, recorded."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.ports: dict[Address, SimPort] = {}
        self.control_ns = 0

    def send(self, port: SimPort, effect: Send) -> None:
        self.record(Call("send", port.address, (effect.to, effect.message)))

    def handshake(self, port: SimPort, peer: Address) -> None:
        self.record(Call("handshake", port.address, (peer,)))

    def fence(self, port: SimPort, peer: Address) -> None:
        self.record(Call("fence", port.address, (peer,)))

    def write(self, port: SimPort, effect: PostWrite, request: int) -> None:
        self.record(Call("write", port.address, (effect,)))

    def read(self, port: SimPort, effect: PostRead, request: int) -> None:
        self.record(Call("read", port.address, (effect,)))

    def read_word(self, port: SimPort, op: Op, source: Address, index: int) -> None:
        self.record(Call("read word", port.address, (op, source, index)))

    def expose_word(self, rank: Address, lease_word: LeaseWord) -> None:
        self.record(Call("show word", rank, (lease_word.index, lease_word.value)))

    def forget_word(self, rank: Address, lease_word: LeaseWord) -> None:
        self.record(Call("bump word", rank, (lease_word.index,)))


class Shipping:
    """What carries pieces and copies, recorded. A copy takes no time."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.hops = self
        """Hops of pieces are recorded here, too."""

    def offer(self, rank: Address, xid: Xid, piece: Piece) -> None:
        self.record(Call("offer", xid, (rank, piece)))

    def withdraw(self, rank: Address, xid: Xid) -> None:
        self.record(Call("withdraw", xid, (rank,)))

    def stop(self, op: Op) -> None:
        self.record(Call("stop", rank_address(op.reg.engine, op.d_rank), (op,)))

    def ended(self, request_id: str) -> None:
        """Of what stands still: only as published does anything."""

    def copy(self, port: SimPort, hop: Hop, nbytes: int, then: Callable[[bool], None]) -> None:
        self.record(Call("copy", port.address))
        then(True)


class Router:
    """Whoever is answered."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.first_follows: set[str] = set()
        self.decoded: dict[str, Any] = {}
        self.alone: set[str] = set()
        """Legs that no KV comes from: their parameters say nothing, and live nodes have none."""

    def later(self, event: DecodeEnded | PrefillAnswered) -> None:
        kept = isinstance(event, PrefillAnswered) and event.request_id not in self.alone
        params = event.params if kept else None
        self.record(answer(event.request_id, event.code, params))


class ScriptedStore:
    """A store's node, as P calls it."""

    name = STORE

    def __init__(self, record: Record) -> None:
        self.record = record
        self.looks: dict[int, Callable[[AnswerCall], None]] = {}
        self.puts: dict[int, Callable[[AnswerCall], None]] = {}

    def look(self, arg: tuple[LookupRequested, Callable[[AnswerCall], None]]) -> None:
        ask, self.looks[number_of(arg[0].request_id)] = arg
        self.record(Call("store look", ask.request_id, (ask.xid, ask.items, ask.digest, ask.weights)))

    def start(self, arg: tuple[PutRequested, Callable[[AnswerCall], None]]) -> None:
        put, on_answer = arg
        self.puts[number_of(put.params.request_id)] = on_answer
        self.record(Call("store put", put.params.request_id, (put.params, put.items)))

    def abort(self, arg: tuple[str, Xid]) -> None:
        self.record(Call("store withdraw", arg[0], (arg[1],)))


class Stores:
    """All of one node."""

    def __init__(self, builder: SimulationBuilder, record: Record) -> None:
        self.node = ScriptedStore(record)
        self.wiring = store_wiring(builder)

    @property
    def most_tokens(self) -> int:
        return self.wiring.most_tokens

    @property
    def nodes(self) -> list[ScriptedStore]:
        return [self.node]

    def items(self, request: int, salt: int) -> tuple[Item, ...]:
        return items_of(request)

    def node_of(self, items: tuple[Item, ...]) -> ScriptedStore:
        return self.node

    def loads(self, engine: EngineInfo, blocks: int, incarnation: int) -> Consumer | None:
        return self.wiring.loads(engine, incarnation, blocks)


class ScriptedBuilder(SimulationBuilder):
    """Chooses node classes as the simulator's does; what is around them is scripted."""

    def __init__(self, setting: Setting, record: Record) -> None:
        super().__init__(setting.scenario)
        wiring = setting.wiring()
        self.shapes, self.geometry = wiring.shapes, wiring.geometry
        self.ranks = setting.ranks
        self.record = record
        scripted: Any = Fabric(record), Shipping(record) if self.method.is_carried(self.pipeline_policy) else None
        router: Any = Router(record)
        self.ports = attrs.evolve(self.node_ports(*scripted), router=router)
        self.prompts.digest = digest  # type: ignore[method-assign]
        if self.method.stores:
            self.stores = Stores(self, record)  # type: ignore[assignment]
        for prompt, output in REQUESTS:
            self.metrics.records.add(0, prompt, output)

    def staging(self, memory: MemoryKind, pool: Any, generation: int, reserves_whole: bool = True) -> Staging:
        assert reserves_whole, "only strict is scripted"
        return recorded(staging_in(memory, self.method, self.ranks), self.record)


class Simulated:
    """See `sides.Side`."""

    name = "simulated"

    def __init__(self, setting: Setting) -> None:
        self.calls: list[Call] = []
        record = self.calls.append
        self.setting = setting
        self.builder = ScriptedBuilder(setting, record)
        self.ports = self.builder.ports
        self.record: Record = record
        self.engine = EngineModel(record, BLOCKS, BLOCK, LAYERS)
        self.node = self._node(Engine(self.engine))
        self.node.watch(watch(record))

    def _node(self, engine: Engine) -> Any:
        builder, setting = self.builder, self.setting
        info = setting.info
        slot = EngineSlot(
            index=0,
            pool=setting.pool,
            position=0,
            info=info,
            limits=engine.limits,
            cost=_no_cost(),
            blocks=BLOCKS,
            block_bytes=1,
            span=0,
        )
        node: SimEngineNode
        if setting.role == "aggregated":
            return AggregatedNode(builder.components(slot, info, engine), info)
        if setting.role == "store":
            memory = recorded_memory(store_memory(), self.record)
            store = SimStoreNode(self.ports, STORE, memory, BLOCK)
            wiring = store_wiring(builder)
            ends = wiring.put_to(STORE, INCARNATION), wiring.got_from(STORE, INCARNATION)
            store.make_ends(*ends, setting.shards, INCARNATION)
            return store
        if setting.role == "decode":
            decode = builder.decode_node(slot, info, engine, 0)
            scheduler, ranks = builder.consumer(info, INCARNATION, BLOCKS)
            decode.make_scheduler(scheduler, INCARNATION)
            node = decode
        else:
            prefill = builder.prefill_node(slot, info, engine, 0)
            produce, ranks = builder.producer(info, INCARNATION)  # type: ignore[assignment]
            prefill.make_scheduler(produce, INCARNATION)
            node = prefill
        for number, endpoint in enumerate(ranks):
            node.add(rank_address(info.engine, number), endpoint, INCARNATION)
        if isinstance(node, SimPrefillNode):
            node.make_loads(INCARNATION)
        return node

    @property
    def now(self) -> Instant:
        return self.ports.clock.now

    async def step(self, step: Any) -> list[Call]:
        """Play one, and say what the node did."""
        self._happen(step)
        self._run_until(self.now)
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
                request_id = request_id_of(r)
                self.node.abort((request_id, xid_of(r)) if self.setting.role == "store" else request_id)
            case FirstToken(r):
                self.node.first_token_known(request_id_of(r))
            case Store(what, r):
                self._answered(what, r)
            case Look(r):
                ask = LookupRequested(request_id_of(r), load_xid(xid_of(r)), items_of(r)[:-1], digest(r), WEIGHTS)
                self.node.look((ask, partial(self._lookup_answered, ask.request_id)))
            case Event(address, event):
                port = self.node.ports[address]
                self.node.receive(port, event)
            case Do():
                self._do(step)

    def _arrive(self, step: Arrive) -> None:
        r, request_id = step.r, request_id_of(step.r)
        if self.setting.role == "store":
            params = put_params(self.setting, r)
            self.node.start((PutRequested(params, items_of(r)), partial(self._put, request_id)))
            return
        if self.setting.role != "decode":
            if step.alone:
                self.ports.router.alone.add(request_id)  # type: ignore[attr-defined]
            keeps = not step.alone or self.setting.role == "aggregated"
            self.node.accept(DispatchPrefill(0, r, request_id, xid_of(r), keeps))
        elif step.alone:
            self.node.accept_alone(DispatchAlone(0, r, request_id))
        else:
            params = params_of(self.setting, r, self.builder.pulls)
            if step.first == "follows":
                self.ports.router.first_follows.add(request_id)
            self.node.accept(DispatchDecode(0, r, request_id, params))

    def _answered(self, what: str, r: int) -> None:
        """A store answers P."""
        store = self.builder.stores.node
        found = found_params(self.setting, r) if what in ("found", "put") else None
        on_answer = (store.looks if what in ("found", "nothing") else store.puts).pop(r)
        on_answer(AnswerCall(xid_of(r), found, Code.REJECTED if what == "refused" else Code.NONE))

    def _put(self, request_id: str, call: AnswerCall) -> None:
        self.record(answer(request_id, call.code, call.params))

    def _lookup_answered(self, request_id: str, call: AnswerCall) -> None:
        self.record(lookup_answer(request_id, call.params))

    def _do(self, step: Do) -> None:
        if step.act == "layer" and step in self.engine.possible():
            self._run_until(self.now + _layer_ns())
        for outcome in self.engine.do(step, self.now):
            self.node.on_engine_output(outcome)
        self.node.rearm()

    def _run_until(self, until: Instant) -> None:
        """All that is due by then, as the clock's own loop does it."""
        clock = self.ports.clock
        while clock.next_at is not None and clock.next_at <= until:
            clock.step()
        clock.now = until


def _layer_ns() -> Instant:
    from tests.serving.scripted_engine import LAYER_NS

    return LAYER_NS


def _no_cost() -> StepCost:
    """No engine that is scripted asks."""
    return partial(StepCost)  # type: ignore[return-value]
