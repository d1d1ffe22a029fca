"""A P and a D in vLLM's order of hooks, and between their workers a network that a test carries out item by item.

The endpoints, the cores and the geometry are pdflow's own; the oracle of `pdflow/protocol/invariants/oracle.py` sees
every event of every endpoint. Beside it stands what only vLLM's pools know: a WRITE or READ must find its blocks given
out as they were when they were named, on either side.
"""

from __future__ import annotations

from typing import Any

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
from pdflow.protocol.events import Received, TimeReached
from pdflow.protocol.ids import engine_of, rank_address
from pdflow.protocol.invariants.oracle import Oracle
from pdflow.protocol.values import MS, Allocation
from pdflow.serving.core import Port
from pdflow.serving.decode import DecodeCore
from pdflow.serving.landing import Landing
from pdflow.serving.prefill import PrefillCore
from pdflow.serving.sending import Sending
from tests.serving.vllm_driver import DecodeSide, PrefillSide, RemoteDecode, RemotePrefill, SchedulerSide, WorkerSide
from tests.serving.vllm_engine import Request, Status, VllmEngine
from tests.support.endpoints import Agreed, engine_info
from tests.support.network import Item, Network

INCARNATIONS = {"P": 101, "D": 201}
WEIGHTS = 1
DIGEST = 7
HOOKS = (
    *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
    *("update_connector_output", "request_finished"),
)
CARRIED = (BumpWord, Fence, Flush, Handshake, Note, PostRead, PostWrite, ReadWord, Send, StopWrite)


class Pair(Network):
    """Args: `tp`: ranks of either engine; `p` and `d`: how vLLM is started there. What is under way waits in `pending`,
    as in a Cluster; a step of both engines takes a millisecond."""

    def __init__(
        self, pulls: bool = False, tp: int = 1, p: dict[str, Any] | None = None, d: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        agreed = Agreed(pulls=pulls)
        self.incarnations.update(INCARNATIONS)
        self.infos = {name: engine_info(name, tp) for name in INCARNATIONS}
        self.oracle = Oracle(agreed.geometry, agreed.done_is_remote)
        self.now = 0
        self.generation = 0
        self.fenced: list[Item] = []
        """What was under way when one of its ends was fenced: frames are lost, and no byte of an operation lands."""
        self.tickets: dict[tuple[str, int], tuple[int, ...]] = {}
        """By engine and generation of an allocation: how often each of its blocks had been given out."""
        endpoints = {
            **agreed.prefill(self.infos["P"], INCARNATIONS["P"]),
            **agreed.decode(self.infos["D"], INCARNATIONS["D"]),
        }
        self.calls: dict[str, list[list[str]]] = {}
        self.prefill_side = PrefillSide(PrefillCore(WEIGHTS, Sending()), *self.side_args("P", endpoints["P"]))
        self.decode_side = DecodeSide(DecodeCore(WEIGHTS, Landing()), *self.side_args("D", endpoints["D"]))
        sides: dict[str, SchedulerSide] = {"P": self.prefill_side, "D": self.decode_side}
        self.workers: dict[str, WorkerSide] = {}
        for name, side in sides.items():
            side.core.observe = self.observe
            for rank in range(tp):
                address = rank_address(name, rank)
                self.start_worker(address, endpoints[address])
        self.p = self.start("P", self.prefill_side, p or {})
        self.d = self.start("D", self.decode_side, d or {})

    def side_args(self, name: str, endpoint: Any) -> tuple[Port, Any, Any]:
        return Port(name, endpoint, INCARNATIONS[name]), lambda: self.now, self.next_generation

    def next_generation(self) -> int:
        self.generation += 1
        return self.generation

    def start_worker(self, address: str, endpoint: Any) -> None:
        worker = WorkerSide(Port(address, endpoint, INCARNATIONS[engine_of(address)]), self.begin, lambda: self.now)
        worker.does(CARRIED)
        worker.core.observe = self.observe
        self.workers[address] = worker

    def start(self, name: str, side: Any, how: dict[str, Any]) -> VllmEngine:
        workers = [worker for address, worker in self.workers.items() if engine_of(address) == name]
        engine = VllmEngine(side, workers, **how)
        self.trace(name, side)
        mint = side.mint

        def mint_with_tickets(blocks: list[int]) -> Allocation:
            allocation: Allocation = mint(blocks)
            self.tickets[name, allocation.generation] = tuple(engine.pool.given[b] for b in allocation.blocks)
            return allocation

        side.mint = mint_with_tickets
        return engine

    def trace(self, name: str, side: Any) -> None:
        """Keeps what EngineCore calls, and what the core is fed of it: "hook: event event"."""
        calls = self.calls[name] = []

        def traced(hook: str) -> Any:
            call = getattr(side, hook)

            def called(*args: Any) -> Any:
                calls.append([hook])
                return call(*args)

            return called

        for hook in HOOKS:
            setattr(side, hook, traced(hook))
        feed = side.feed

        def fed(event: Any) -> None:
            calls[-1].append(type(event).__name__)
            feed(event)

        side.feed = fed

    def core_events(self, name: str) -> list[str]:
        """Hooks of this engine by which its core was fed something, and what."""
        return [f"{hook}: {' '.join(events)}" for hook, *events in self.calls[name] if events]

    # The network.

    def observe(self, port: Port, event: Any, effects: tuple[Any, ...], now: int) -> None:
        self.oracle.observe(port.address, event, effects, now)

    def feed(self, node: str, event: Any) -> list[Any]:
        """Something has arrived at a worker."""
        self.workers[node].feed(event)
        return []

    def carry_out(self, item: Item, ok: bool = True) -> None:
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
        elif ok and item.kind == "READ":
            self.assert_owned("D", item.what.registration.target)
        super().carry_out(item, ok)

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
        request = Request(f"p-{xid}", num_tokens, 1, RemoteDecode(xid, DIGEST))
        self.p.add_request(request)
        return request

    def submit_decode(
        self, request_id: str = "r", xid: str = "x", num_tokens: int = 40, max_tokens: int = 3, cached_tokens: int = 0
    ) -> Request:
        """With P's answer to this prompt."""
        status, params = self.p.answers[f"p-{xid}"]
        assert status is Status.FINISHED_LENGTH_CAPPED
        for rank, lease_word in enumerate(params.rank_words):
            # Where READs find it, unless it has been bumped since.
            self.word_values.setdefault((rank_address("P", rank), lease_word.index), lease_word.value)
        request = Request(request_id, num_tokens, max_tokens, RemotePrefill(params, DIGEST), cached_tokens)
        self.d.add_request(request)
        return request

    # What must hold in the end.

    def assert_at_rest(self) -> None:
        """No request, no block and no reference is left, nobody is kept, and the oracle agrees."""
        self.holding = set()
        for _ in range(2_000):
            if self.p.parked() and self.d.parked() and not self.pending:
                break
            self.step()
            self.now += 99 * MS
        for engine in (self.p, self.d):
            assert engine.parked()
            assert not any(engine.pool.references), engine.pool.references
            assert len(engine.pool.free) == len(engine.pool.references)
        self.prefill_side.core.assert_empty("P")
        self.decode_side.core.assert_empty("D")
        side = self.decode_side
        assert not any((side.requests, side.queued, side.loading, side.allocations, side.references))
        assert not self.prefill_side.names
        self.oracle.finish(self.now)
