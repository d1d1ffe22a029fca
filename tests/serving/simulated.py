"""The simulated node of a setting, with a scripted engine and a scripted host. All that is known here of `sim/` is in
this file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from heapq import heappop
from typing import Any

from pdflow.cost.step import StepCost
from pdflow.engine.sequence import Dropped, Limits, Outcome, Sequence
from pdflow.methods.method import Hop, Memory
from pdflow.methods.shipment import Piece
from pdflow.methods.staging import Staging
from pdflow.protocol.effects import PostRead, PostWrite, Send
from pdflow.protocol.ids import Op, rank_address
from pdflow.protocol.values import MS, Address, Allocation, Instant, Xid
from pdflow.routing.router import DecodeEnded, DispatchAlone, DispatchDecode, DispatchPrefill, PrefillAnswered
from sim.aggregated_node import AggregatedNode
from sim.build import Builder, Place
from sim.engine_node import EngineNode, HostedEngine
from sim.node import Port
from sim.store_prefill_node import StorePrefillNode
from tests.serving.script import Abort, Arrive, Call, Do, Event, FirstToken, Together, Wait
from tests.serving.scripted_engine import EngineModel
from tests.serving.setting import (
    BLOCK,
    BLOCKS,
    INCARNATION,
    LAYERS,
    REQUESTS,
    Setting,
    digest,
    params_of,
    request_id_of,
    xid_of,
)
from tests.serving.watched import Record, answer, recorded, staging_in, watch


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


class Fabric:
    """What goes between nodes, recorded."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.ports: dict[Address, Port] = {}
        self.words = Words(record)
        self.control_ns = 0

    def send(self, port: Port, effect: Send) -> None:
        self.record(Call("send", port.address, (effect.to, effect.message)))

    def handshake(self, port: Port, peer: Address) -> None:
        self.record(Call("handshake", port.address, (peer,)))

    def fence(self, port: Port, peer: Address) -> None:
        self.record(Call("fence", port.address, (peer,)))

    def write(self, port: Port, effect: PostWrite, request: int) -> None:
        self.record(Call("write", port.address, (effect,)))

    def read(self, port: Port, effect: PostRead, request: int) -> None:
        self.record(Call("read", port.address, (effect,)))

    def read_word(self, port: Port, op: Op, source: Address, index: int) -> None:
        self.record(Call("read word", port.address, (op, source, index)))

    def forget_word(self, rank: Address, index: int) -> None:
        self.record(Call("bump word", rank, (index,)))


class Words(dict[tuple[Address, int], int]):
    """P's lease words, as a node shows them to readers."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __setitem__(self, at: tuple[Address, int], word: int) -> None:
        self.record(Call("show word", at[0], (at[1], word)))
        super().__setitem__(at, word)


class Shipping:
    """What carries pieces and copies, recorded. A copy takes no time."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def offer(self, rank: Address, xid: Xid, piece: Piece) -> None:
        self.record(Call("offer", xid, (rank, piece)))

    def withdraw(self, rank: Address, xid: Xid) -> None:
        self.record(Call("withdraw", xid, (rank,)))

    def stop(self, op: Op) -> None:
        self.record(Call("stop", rank_address(op.reg.engine, op.d_rank), (op,)))

    def ended(self, request_id: str) -> None:
        """Of what stands still: only as published does anything."""

    def copy(self, port: Port, hop: Hop, nbytes: int, then: Callable[[bool], None]) -> None:
        self.record(Call("copy", port.address))
        then(True)


class Router:
    """Whoever is answered."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.alone: set[str] = set()
        """Legs that no KV comes from: their parameters say nothing, and live nodes have none."""

    def later(self, event: DecodeEnded | PrefillAnswered) -> None:
        kept = isinstance(event, PrefillAnswered) and event.request_id not in self.alone
        params = event.params if kept else None
        self.record(answer(event.request_id, event.code, params))


class ScriptedBuilder(Builder):
    """Chooses node classes as the simulator's does; what is around them is scripted."""

    def __init__(self, setting: Setting, record: Record) -> None:
        super().__init__(setting.scenario)
        wiring = setting.wiring()
        self.shapes, self.geometry = wiring.shapes, wiring.geometry
        self.ranks = setting.ranks
        self.record = record
        world: Any = self.world
        world.pulls = self.pulls
        world.fabric, world.router = Fabric(record), Router(record)
        world.shipping = Shipping(record) if self.method.is_carried(self.conduct) else None
        world.prefill_tokens = 1 if setting.first_token == "prefill" else 0
        world.digest = digest
        for prompt, output in REQUESTS:
            world.records.add(0, prompt, output)

    def staging(self, memory: Memory, pool: Any, generation: int, reserves_whole: bool = True) -> Staging:
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
        self.world = self.builder.world
        self.engine = EngineModel(record, BLOCKS, BLOCK, LAYERS)
        self.node = self._node(Engine(self.engine))
        self.node.observe = watch(record)

    def _node(self, engine: Engine) -> Any:
        builder, setting = self.builder, self.setting
        info = setting.info
        place = Place(0, setting.pool, 0, info.engine, engine.limits, _no_cost(), BLOCKS, 1, 0)
        node: EngineNode
        if setting.role == "aggregated":
            return AggregatedNode(self.world, 0, info, engine, 1)
        if setting.role == "decode":
            decode = builder.decode_node(place, info, engine, 0)
            scheduler, ranks = builder.consumer(info, INCARNATION, BLOCKS)
            decode.make_scheduler(scheduler, INCARNATION)
            node = decode
        else:
            prefill = builder.prefill_node(place, info, engine, 0)
            assert not isinstance(prefill, StorePrefillNode)
            produce, ranks = builder.producer(info, INCARNATION)  # type: ignore[assignment]
            prefill.make_scheduler(produce, INCARNATION)
            node = prefill
        for number, endpoint in enumerate(ranks):
            node.add(rank_address(info.engine, number), endpoint, INCARNATION)
        return node

    @property
    def now(self) -> Instant:
        return self.world.env.now

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
            case Wait(ms):
                self._run_until(self.now + ms * MS)
            case Arrive():
                self._arrive(step)
            case Abort(r):
                self.node.abort(request_id_of(r))
            case FirstToken():
                pass
            case Event(address, event):
                port = self.node.ports[address]
                self.node.receive(port, event)
            case Do():
                self._do(step)

    def _arrive(self, step: Arrive) -> None:
        r, request_id = step.r, request_id_of(step.r)
        if self.setting.role != "decode":
            if step.alone:
                self.world.router.alone.add(request_id)  # type: ignore[attr-defined]
            keeps = not step.alone or self.setting.role == "aggregated"
            self.node.accept(DispatchPrefill(0, r, request_id, xid_of(r), keeps))
        elif step.alone:
            self.node.accept_alone(DispatchAlone(0, r, request_id))
        else:
            params = params_of(self.setting, r, self.builder.pulls)
            self.node.accept(DispatchDecode(0, r, request_id, params))

    def _do(self, step: Do) -> None:
        if step.act == "layer" and step in self.engine.possible():
            self._run_until(self.now + _layer_ns())
        for outcome in self.engine.do(step, self.now):
            self.node.came(outcome)
        self.node.rearm()

    def _run_until(self, until: Instant) -> None:
        """All that is due by then, as the clock's own loop does it."""
        env = self.world.env
        queue, last = env._turns, env._last
        while True:
            if last and (not queue or queue[0][0] > env.now):
                _, _, callback, about = heappop(last)
            elif queue and queue[0][0] <= until:
                env.now, _, _, callback, about = heappop(queue)
            else:
                break
            callback(about)
        env.now = until


def _layer_ns() -> Instant:
    from tests.serving.scripted_engine import LAYER_NS

    return LAYER_NS


def _no_cost() -> StepCost:
    """No engine that is scripted asks."""
    return partial(StepCost)  # type: ignore[return-value]
