"""A P and a D with pdflow's connector in vLLM's own engines, and between their ranks a network that is carried out item
by item.

The connector is whole, but for what reaches outside its process: its workers' threads and transports, its weights and
its clock. Ranks are endpoints alone (`RankStub`); WRITEs and READs copy fingerprints between the engines' memories, so
KV that is not of a request's tokens is detected when it is read. The protocol's oracle sees every event.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any
from unittest import mock

import torch

from pdflow.layout.groups import runs_kept
from pdflow.protocol.effects import (
    BumpWord,
    Fence,
    Flush,
    Handshake,
    Note,
    PostRead,
    PostWrite,
    ReadWord,
    Send,
    SendLocal,
    StopWrite,
)
from pdflow.protocol.events import PeerLost, PrefillMissing, TimeReached
from pdflow.protocol.ids import engine_of, rank_address, rank_of
from pdflow.protocol.invariants.oracle import Oracle
from pdflow.protocol.values import MS, Allocation, S
from pdflow.serving.core import Port
from pdflow.serving.effects import EndDecode, Released
from pdflow.wiring.endpoints import consumer_rank, producer_rank, producer_scheduler
from pdflow_runtime.observe.transfer_samples import TransferSamples
from pdflow_runtime.vllm import connector as connector_module
from pdflow_runtime.vllm.connector import PdflowConnector
from pdflow_runtime.vllm.instance import Instance
from pdflow_runtime.vllm.scheduler.engine_clock import EngineClock
from pdflow_runtime.vllm.scheduler.params import read_answer
from tests.runtime.vllm.support.rank_stub import RankStub
from tests.support.network import Item, Network
from tests.vllm.support.random_schedule import EnginePair, PairSetting, Params
from tests.vllm.support.real_engine import RealEngine

CARRIED = (BumpWord, Fence, Flush, Handshake, Note, PostRead, PostWrite, ReadWord, Send, StopWrite)
OPERATIONS = ("WRITE", "READ")
HELD = (*OPERATIONS, "Register", "handshake", "Cancel", "CancelAck", "word", "SyncReply", "fence")
FAILING = (*OPERATIONS, "handshake", "word")
ROLES = {"P": "kv_producer", "D": "kv_consumer"}
WEIGHTS = 1
FEW_TURNS = 5
LEASES_NS = 31 * S
"""After it, leases of P's ranks are over, which are timed outside of EngineCore."""


class DrivenConnector(PdflowConnector):
    """Pdflow's connector, whose rank has no memory to register: the network copies fingerprints."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._sample = next(iter(kv_caches.values()))


class DrivenRank(RankStub):
    """In place of a WorkerSide."""

    def __init__(self, instance: Instance, rank: int, incarnation: int, pair: ConnectorPair) -> None:
        protocol = instance.protocol
        make = producer_rank if instance.role == "prefill" else consumer_rank
        endpoint = make(protocol, protocol.geometry(), instance.info, incarnation, rank)
        address = rank_address(instance.info.engine, rank)
        super().__init__(Port(address, endpoint, incarnation), pair.begin, lambda: pair.now)
        self.does(CARRIED)
        self.incarnation = incarnation
        self.address = "127.0.0.1", 1 + rank
        self.idle_scheduler = producer_scheduler(protocol, instance.info, incarnation)
        """What a parked EngineCore has, if it is P's."""
        self.samples = TransferSamples()

    def answer_while_parked(self) -> None:
        """As `RankNode` does: a prompt that D asks for is not known, where EngineCore has none and does not step."""
        found = [event for _, event in self.up if type(event) is PrefillMissing]
        self.up = [each for each in self.up if type(each[1]) is not PrefillMissing]
        for event in found:
            for effect in self.idle_scheduler.handle(event, self.clock()):
                assert isinstance(effect, SendLocal)
                self.feed(effect.event)

    def layer_computed(self, layer: str, done: Any) -> None:
        pass

    def step_computed(self, done: Any) -> None:
        pass


class ConnectorPair(Network, EnginePair):
    def __init__(self, setting: PairSetting) -> None:
        super().__init__()
        self.setting = setting
        self.random = Random(setting.seed)
        self.now = 0
        self.oracle: Oracle | None = None
        self.ranks: dict[str, DrivenRank] = {}
        self.engines: dict[str, RealEngine] = {}
        """By engine id, also those that were killed."""
        self.names: dict[str, str] = {}
        """Of the P and the D that live, by role."""
        self.fenced: list[Item] = []
        self.tickets: dict[tuple[str, int], tuple[int, ...]] = {}
        """By engine and generation of an allocation: how often each of its blocks had been given out."""
        self.ends: Counter[str] = Counter()
        self.p = self._start("P")
        self.d = self._start("D")

    # Engines.

    def _start(self, role: str) -> RealEngine:
        incarnation = 100 + len(self.engines)
        name = self.names[role] = f"{incarnation:08x}-0000-4000-8000-{0:012x}"
        self.incarnations[name] = incarnation
        given = self.setting.p if role == "P" else self.setting.d
        tp = self.setting.p_tp if role == "P" else self.setting.d_tp
        with self._replaced(incarnation):
            engine = RealEngine(
                None,
                [None] * tp,
                lags=self.setting.lags(self.random),
                connector_class=("DrivenConnector", __name__),
                extra_config={"transfer_mode": "pull" if self.setting.pulls else "push"},
                **given | {"role": ROLES[role], "engine_id": name},
            )
        self.engines[name] = engine
        self._watch(name, engine)
        return engine

    @contextmanager
    def _replaced(self, incarnation: int) -> Iterator[None]:
        """While the connector is constructed: what it looks up in its module."""
        ranks = iter(range(100))
        with ExitStack() as stack:
            for name, value in {
                "WorkerSide": self._make_rank,
                "EngineClock": lambda: EngineClock(lambda: self.now),
                "weights_of": lambda *_: WEIGHTS,
                "broadcast_from_first": lambda _: incarnation,
                "tensor_parallel_rank": lambda: next(ranks),
            }.items():
                stack.enter_context(mock.patch.object(connector_module, name, value))
            yield

    def _make_rank(self, instance: Instance, rank: int, incarnation: int) -> DrivenRank:
        if self.oracle is None:
            self.oracle = Oracle(instance.protocol.geometry(), instance.protocol.done_is_remote)
        driven = DrivenRank(instance, rank, incarnation, self)
        driven.core.observe = self._observe
        self.ranks[driven.port.address] = driven
        return driven

    def _watch(self, name: str, engine: RealEngine) -> None:
        side: Any = engine.connector._scheduler.side
        side.core.observe = self._observe
        for kind in (EndDecode, Released):
            if kind in side.core.perform:
                side.core.perform[kind] = self._counted(side.core.perform[kind])
        allocation_of = side.allocation

        def ticketed(blocks: Any) -> Allocation:
            allocation: Allocation = allocation_of(blocks)
            self.tickets[name, allocation.generation] = tuple(engine.given[block] for block in allocation.blocks)
            return allocation

        side.allocation = ticketed

    def _counted(self, perform: Callable[[Port, Any], None]) -> Callable[[Port, Any], None]:
        def counted(port: Port, effect: Any) -> None:
            self.ends[f"{type(effect).__name__} {effect.code.name}"] += 1
            perform(port, effect)

        return counted

    def _observe(self, port: Port, event: Any, effects: tuple[Any, ...], now: int) -> None:
        assert self.oracle is not None
        self.oracle.observe(port.address, event, effects, now)

    def restart(self, name: str) -> None:
        """The engine's processes are killed; another one takes its role. What its ranks had under way is lost; what
        other ranks had under way with it fails."""
        assert self.oracle is not None
        dead = self.names[name]
        self.oracle.lost(dead)
        self.unreachable.add(dead)
        self.ranks = {address: rank for address, rank in self.ranks.items() if engine_of(address) != dead}
        self.pending = [item for item in self.pending if engine_of(item.node) != dead]
        lost = [item for item in self.pending if engine_of(item.peer) == dead]
        for item in self.random.sample(lost, len(lost)):
            self.carry_out(item, ok=False)
        for rank in self.ranks.values():
            for number in range(len(self.engines[dead].memories)):
                rank.feed(PeerLost(rank_address(dead, number)))
        engine = self._start(name)
        if name == "P":
            self.p = engine
        else:
            self.d = engine

    # Requests.

    def prefill_params(self, xid: str, prompt: list[int]) -> Params:
        return {"do_remote_decode": True, "pdflow": {"xid": xid}}

    def decode_params(self, xid: str, answer: Params, prompt: list[int]) -> Params:
        params, _ = read_answer(answer, "nixl-pull" if self.setting.pulls else "nixl-push")
        for rank, lease_word in enumerate(params.rank_words):
            # Where READs find it, unless it has been bumped since.
            address = rank_address(params.prefill.engine, rank)
            self.word_values.setdefault((address, lease_word.index), lease_word.value)
        return dict(answer)

    # The network.

    def feed(self, node: str, event: Any) -> list[Any]:
        if node in self.ranks:
            self.ranks[node].feed(event)
        return []

    def carry_out(self, item: Item, ok: bool = True) -> None:
        if item.kind == "fence":
            between = [other for other in self.pending if {other.node, other.peer} == {item.node, item.peer}]
            self.fenced += [other for other in between if other.kind in OPERATIONS]
            self.pending = [other for other in self.pending if other not in between or not _is_frame(other)]
        ok = ok and item not in self.fenced and engine_of(item.peer) not in self.unreachable
        if ok and item.kind in OPERATIONS:
            self._move(item)
        super().carry_out(item, ok)

    def _move(self, item: Item) -> None:
        """Copy what a WRITE or READ names. Its blocks must be those of the allocations that it was made for."""
        registration = item.what.registration
        p, d = (item.node, item.peer) if item.kind == "WRITE" else (item.peer, item.node)
        self._assert_owned(engine_of(d), registration.target)
        if item.kind == "WRITE":
            self._assert_owned(engine_of(p), item.what.source)
            sources = item.what.source.tables
        else:
            sources = item.what.groups or (item.what.blocks,)
        start, size = registration.token_start, self.setting.p["block_size"]
        memory, source = (self.engines[engine_of(rank)].memories[rank_of(rank)] for rank in (d, p))
        for group, (at, to) in enumerate(zip(sources, registration.target.tables, strict=True)):
            runs = runs_kept(at, size, to, size, start, start, start + registration.num_tokens)
            memory.copy_from(source, [run.source_block for run in runs], [run.target_block for run in runs], group)
            self.ends["blocks outside of windows"] += len(to) - len(runs)

    def _assert_owned(self, name: str, allocation: Allocation) -> None:
        engine = self.engines[name]
        for block, ticket in zip(allocation.blocks, self.tickets[name, allocation.generation], strict=True):
            assert engine.pool.blocks[block].ref_cnt > 0, f"block {block} of {name} is free"
            assert engine.given[block] == ticket, f"block {block} of {name} has another owner"

    def hold(self, random: Random) -> None:
        self.holding = set(random.sample(HELD, random.randrange(3)))

    def fail(self, random: Random) -> None:
        if found := [item for item in self.pending if item.kind in FAILING]:
            self.carry_out(random.choice(found), ok=False)

    # Time.

    def step(self) -> None:
        for engine in (self.p, self.d):
            engine.step()
            guarded = engine.connector._scheduler
            assert not guarded.broken, guarded.broken
        self.run()
        self.now += MS
        self._wake()

    def _wake(self) -> None:
        for rank in list(self.ranks.values()):
            if rank.wake_at() <= self.now:
                rank.feed(TimeReached())

    def idle(self, ns: int) -> None:
        until = self.now + ns
        if ns >= S and self.p.parked():
            for address, rank in self.ranks.items():
                if engine_of(address) == self.names["P"]:
                    rank.answer_while_parked()
        self.run()
        while (at := min((rank.wake_at() for rank in self.ranks.values()), default=math.inf)) < until:
            self.now = max(self.now, int(at))
            self._wake()
            self.run()
        self.now = until

    # What must hold in the end.

    def seen(self) -> Counter[str]:
        return sum((engine.seen for engine in self.engines.values()), self.ends)

    def assert_at_rest(self) -> None:
        assert self.oracle is not None
        self.holding = set()
        pauses = [LEASES_NS, *[S] * FEW_TURNS]
        for _ in range(2_000):
            if self.p.parked() and self.d.parked() and not self.pending:
                break
            self.step()
            if not (self.p.scheduler.running or self.d.scheduler.running):
                self.idle(pauses.pop() if pauses else S)
        for engine in (self.p, self.d):
            engine.assert_at_rest()
            side: Any = engine.connector._scheduler.side
            side.core.assert_empty(side.port.address)
            side.assert_empty()
        self.oracle.finish(self.now)


def _is_frame(item: Item) -> bool:
    return item.kind not in (*OPERATIONS, "handshake", "word", "flush", "fence")
