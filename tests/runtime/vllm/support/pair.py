"""A P and a D in vLLM's order of hooks, and between their workers a network that a test carries out item by item.

The endpoints, the cores and the geometry are pdflow's own; the oracle of `pdflow/protocol/invariants/oracle.py` sees
every event of every endpoint. Beside it stands what only vLLM's pools know: a WRITE or READ must find its blocks given
out as they were when they were named, on either side.
"""

from __future__ import annotations

from typing import Any, Literal

from pdflow.layout.groups import runs_kept
from pdflow.protocol.consumer.scheduler import ConsumerScheduler
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
    StopWrite,
)
from pdflow.protocol.events import Received, TimeReached, WriteEnded, WriteStopped
from pdflow.protocol.ids import KvParams, engine_of, rank_address
from pdflow.protocol.invariants.obligations import wrong_quarantine
from pdflow.protocol.invariants.oracle import Oracle
from pdflow.protocol.invariants.rest import leftovers
from pdflow.protocol.messages import Register
from pdflow.protocol.values import MS, Allocation, BlockTables
from pdflow.serving.core import Port
from pdflow.serving.effects import Admit, Computed, EndDecode, EndPrefill, Landed, Released
from pdflow_runtime.vllm.events_file import EventsFile, events_file
from pdflow_runtime.vllm.instance import Instance, KvGroup, Role, protocol_of
from pdflow_runtime.vllm.options import Options
from pdflow_runtime.vllm.scheduler.decode_side import DecodeSide
from pdflow_runtime.vllm.scheduler.guard import GuardedSide
from pdflow_runtime.vllm.scheduler.params import read_answer
from pdflow_runtime.vllm.scheduler.prefill_side import PrefillSide
from tests.runtime.vllm.support.fake_engine import Request, Status, VllmEngine
from tests.runtime.vllm.support.rank_stub import RankStub
from tests.support.endpoints import SHAPE, Agreed, engine_info
from tests.support.network import Item, Network

INCARNATIONS = {"P": 101, "D": 201}
WEIGHTS = 1
HOOKS = (
    *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "take_down", "take_failed"),
    *("update_output", "request_finished"),
)
RECORDED = (Admit, Computed, EndDecode, EndPrefill, Landed, Released)
CARRIED = (BumpWord, Fence, Flush, Handshake, Note, PostRead, PostWrite, ReadWord, Send, StopWrite)


ROLES: dict[Role, str] = {"prefill": "P", "decode": "D"}


def must_not_break(why: str) -> None:
    raise AssertionError(f"the connector is broken: {why}")


class Pair(Network):
    """Args: `tp`: ranks of either engine; `p` and `d`: how vLLM is started there; `events`: where endpoints write;
    `windows`: of the KV cache groups.

    What is under way waits in `pending`, as in a Cluster; a step of both engines takes a millisecond.
    """

    def __init__(
        self,
        pulls: bool = False,
        tp: int = 1,
        p: dict[str, Any] | None = None,
        d: dict[str, Any] | None = None,
        events: str | None = None,
        progressive: bool = False,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        super().__init__()
        agreed = Agreed(pulls=pulls)
        self.pulls = pulls
        self.events = events
        self.progressive = progressive
        self.windows = windows
        self.moved: list[Allocation] = []
        """What WRITEs and READs have landed in."""
        self.files: list[EventsFile] = []
        self.unoffered: list[Item] = []
        """WRITEs of prompts of which not all has been computed."""
        self.incarnations.update(INCARNATIONS)
        self.infos = {name: engine_info(name, tp) for name in INCARNATIONS}
        self.oracle = Oracle(agreed.geometry, agreed.done_is_remote)
        self.now = 0
        self.fenced: list[Item] = []
        """What was under way when one of its ends was fenced: frames are lost, and no byte of an operation lands."""
        self.tickets: dict[tuple[str, int], tuple[int, ...]] = {}
        """By engine and generation of an allocation: how often each of its blocks had been given out."""
        self.record: dict[str, list[Any]] = {name: [] for name in INCARNATIONS}
        """Effects of each engine's core that are for the record."""
        self.calls: dict[str, list[list[str]]] = {}
        prefill, decode = (self.instance(role) for role in ROLES)
        ranks = tuple(("127.0.0.1", 1 + rank) for rank in range(tp))
        self.prefill_side = PrefillSide(prefill, INCARNATIONS["P"], WEIGHTS, ranks, lambda: self.now)
        self.decode_side = DecodeSide(decode, INCARNATIONS["D"], WEIGHTS, lambda: self.now)
        endpoints = {
            **agreed.prefill(self.infos["P"], INCARNATIONS["P"]),
            **agreed.decode(self.infos["D"], INCARNATIONS["D"]),
        }
        self.workers: dict[str, RankStub] = {}
        for name, side in (("P", self.prefill_side), ("D", self.decode_side)):
            side.core.observe = self.observing(side.core.observe)
            kept = {kind: self.recorded(name) for kind in RECORDED if kind in side.core.perform}
            side.core.perform.update(kept)
            for rank in range(tp):
                address = rank_address(name, rank)
                self.start_worker(address, endpoints[address])
        self.p = self.start("P", self.prefill_side, p or {})
        self.d = self.start("D", self.decode_side, d or {})

    def instance(self, role: Role) -> Instance:
        info = self.infos[ROLES[role]]
        mode: Literal["push", "pull"] = "pull" if self.pulls else "push"
        options = Options(transfer_mode=mode, events=self.events, progressive=self.progressive)
        protocol = protocol_of(SHAPE, options)
        groups = tuple([KvGroup((), window) for window in self.windows])
        return Instance(role=role, info=info, protocol=protocol, num_blocks=1000, options=options, groups=groups)

    def recorded(self, name: str) -> Any:
        return lambda _, effect: self.record[name].append(effect)

    def start_worker(self, address: str, endpoint: Any) -> None:
        worker = RankStub(Port(address, endpoint, INCARNATIONS[engine_of(address)]), self.begin, lambda: self.now)
        worker.does(CARRIED)
        engine = engine_of(address)
        role: Role = "prefill" if engine == "P" else "decode"
        file = events_file(self.instance(role), INCARNATIONS[engine], address)
        if file is not None:
            self.files.append(file)
        worker.core.observe = self.observing(file and (lambda p, *turn: file.observe(p.address, *turn)))
        self.workers[address] = worker

    def start(self, name: str, side: Any, how: dict[str, Any]) -> VllmEngine:
        workers = [worker for address, worker in self.workers.items() if engine_of(address) == name]
        guarded = GuardedSide(side, must_not_break)
        engine = VllmEngine(guarded, workers, windows=self.windows, **how)
        side.bind(engine.pool, lambda request_id: engine.requests[request_id].tables)
        self.trace(name, guarded)
        allocation_of = side.allocation

        def ticketed(blocks: Any) -> Allocation:
            allocation: Allocation = allocation_of(blocks)
            self.tickets[name, allocation.generation] = tuple(engine.pool.given[b] for b in allocation.blocks)
            return allocation

        side.allocation = ticketed
        return engine

    def trace(self, name: str, guarded: GuardedSide) -> None:
        """Keeps what EngineCore calls, and what the core is fed of it: "hook: event event"."""
        calls = self.calls[name] = []

        def traced(hook: str) -> Any:
            call = getattr(guarded, hook)

            def called(*args: Any) -> Any:
                calls.append([hook])
                return call(*args)

            return called

        for hook in HOOKS:
            setattr(guarded, hook, traced(hook))
        side: Any = guarded.side
        feed = side.feed

        def fed(event: Any) -> None:
            calls[-1].append(type(event).__name__)
            feed(event)

        side.feed = fed

    def core_events(self, name: str) -> list[str]:
        """Hooks of this engine by which its core was fed something, and what."""
        return [f"{hook}: {' '.join(events)}" for hook, *events in self.calls[name] if events]

    # The network.

    def observing(self, recorded: Any) -> Any:
        """Show the oracle every event, and the file of the endpoint, if it has one."""

        def observe(port: Port, event: Any, effects: tuple[Any, ...], now: int) -> None:
            self.oracle.observe(port.address, event, effects, now)
            if recorded is not None:
                recorded(port, event, effects, now)

        return observe

    def feed(self, node: str, event: Any) -> list[Any]:
        """Something has arrived at a worker."""
        self.workers[node].feed(event)
        return []

    def begin(self, node: str, effect: Any) -> bool:
        if type(effect) is StopWrite:
            self.pending.append(Item("stop", node, node, effect))
            return True
        if type(effect) is PostWrite and not self.all_offered(node, effect):
            self.unoffered.append(Item("WRITE", node, effect.to, effect))
            return True
        return super().begin(node, effect)

    def all_offered(self, node: str, effect: PostWrite) -> bool:
        """Whether all that a WRITE sends has been computed."""
        pieces = self.instance("prefill").offered_layers
        return self.workers[node].offered.get(effect.registration.xid, 0) == pieces

    def begin_offered(self) -> None:
        """Begin the WRITEs whose bytes are there now."""
        for item in tuple(self.unoffered):
            if self.all_offered(item.node, item.what):
                self.unoffered.remove(item)
                self.pending.append(item)

    def end_unoffered(self, item: Item) -> None:
        """A stop or a fence ends WRITEs of which nothing has been sent."""
        for write in tuple(self.unoffered):
            if item.kind == "stop" and write.what.op == item.what.op:
                self.unoffered.remove(write)
                self.feed(write.node, WriteStopped(write.what.op))
            elif item.kind == "fence" and {write.node, write.peer} == {item.node, item.peer}:
                self.unoffered.remove(write)
                self.feed(write.node, WriteEnded(write.what.op, False))

    def carry_out(self, item: Item, ok: bool = True) -> None:
        if item.kind in ("stop", "fence"):
            self.end_unoffered(item)
        if item.kind == "stop":
            self.pending.remove(item)
            return
        if item.kind == "fence":
            between = [i for i in self.pending if {i.node, i.peer} == {item.node, item.peer}]
            self.fenced += between
            for frame in between:
                if type(frame.what) is Received:
                    self.pending.remove(frame)
        ok = ok and not (item in self.fenced and item.kind in ("WRITE", "READ"))
        if ok and item.kind == "WRITE":
            self.assert_owned("P", item.what.source)
            self.assert_owned("D", item.what.registration.target)
            self.assert_has_what_d_keeps(item.what.source.tables, item.what.registration)
        elif ok and item.kind == "READ":
            self.assert_owned("D", item.what.registration.target)
            self.assert_has_what_d_keeps(item.what.groups or (item.what.blocks,), item.what.registration)
        super().carry_out(item, ok)
        self.assert_fulfilled()

    def assert_fulfilled(self) -> None:
        """D's half holds references on what it has granted, as its endpoint says (S12)."""
        side = self.decode_side
        scheduler = side.port.endpoint
        assert isinstance(scheduler, ConsumerScheduler)
        wrong = wrong_quarantine(scheduler, side.references)
        assert not wrong, wrong

    def assert_has_what_d_keeps(self, tables: BlockTables, registration: Register) -> None:
        """In each KV cache group, P has a block of every token that D has one of."""
        self.moved.append(registration.target)
        start, size = registration.token_start, registration.shards.block_size
        for source, target in zip(tables, registration.target.tables, strict=True):
            assert runs_kept(source, size, target, size, start, start, start + registration.num_tokens)

    def assert_owned(self, name: str, allocation: Allocation) -> None:
        pool = (self.p if name == "P" else self.d).pool
        for block, ticket in zip(allocation.blocks, self.tickets[name, allocation.generation], strict=True):
            assert pool.references[block] > 0, f"{name}'s block {block} is free"
            assert pool.given[block] == ticket, f"{name}'s block {block} is another request's"

    # Steps.

    def step(self, count: int = 1) -> None:
        """One of each engine, and then whatever the network does in the meantime."""
        for _ in range(count):
            for engine in (self.p, self.d):
                engine.step()
                self.assert_fulfilled()
                self.begin_offered()
            self.run()
            self.now += MS
            self.wake_workers()

    def wake_workers(self) -> None:
        for worker in self.workers.values():
            if worker.wake_at() <= self.now:
                worker.feed(TimeReached())

    def idle(self, ns: int) -> None:
        """Time in which EngineCore makes no step, though workers' threads go on."""
        until = self.now + ns
        self.run()
        while (at := min(worker.wake_at() for worker in self.workers.values())) < until:
            self.now = max(self.now, at)
            self.wake_workers()
            self.run()
        self.now = until

    # Requests.

    def submit_prefill(self, xid: str = "x", num_tokens: int = 40) -> Request:
        request = Request(f"p-{xid}", num_tokens, 1, {"do_remote_decode": True, "pdflow": {"xid": xid}})
        self.p.add_request(request)
        return request

    def params_of(self, xid: str = "x") -> KvParams:
        """P's answer, as D's half reads it."""
        return read_answer(self.p.answers[f"p-{xid}"][1], f"nixl-{'pull' if self.pulls else 'push'}")[0]

    def submit_decode(
        self, request_id: str = "r", xid: str = "x", num_tokens: int = 40, max_tokens: int = 3, cached_tokens: int = 0
    ) -> Request:
        """With P's answer to this prompt."""
        status, answer = self.p.answers[f"p-{xid}"]
        assert status is Status.FINISHED_LENGTH_CAPPED
        for rank, lease_word in enumerate(self.params_of(xid).rank_words):
            # Where READs find it, unless it has been bumped since.
            self.word_values.setdefault((rank_address("P", rank), lease_word.index), lease_word.value)
        request = Request(request_id, num_tokens, max_tokens, answer, cached_tokens)
        self.d.add_request(request)
        return request

    def close(self) -> None:
        """Close the files of endpoints."""
        for each in (*self.files, self.prefill_side, self.decode_side):
            each.close()

    # What must hold in the end.

    def assert_at_rest(self) -> None:
        """No request, no block and no reference is left, nobody is kept, and the oracle agrees."""
        self.holding = set()
        for _ in range(2_000):
            if self.p.parked() and self.d.parked() and not self.pending and not self.unoffered:
                break
            self.step()
            self.now += 99 * MS
        for engine in (self.p, self.d):
            assert engine.parked()
            assert not any(engine.pool.references), engine.pool.references
            assert len(engine.pool.free) == len(engine.pool.references)
        self.prefill_side.core.assert_empty("P")
        self.decode_side.core.assert_empty("D")
        for side in (self.prefill_side, self.decode_side):
            side.assert_empty()
        for port in (self.prefill_side.port, self.decode_side.port, *(each.port for each in self.workers.values())):
            assert not leftovers(port.endpoint), f"{port.address} keeps {leftovers(port.endpoint)} at rest"
        self.oracle.finish(self.now)
