"""The fixed part of an explored scope: engines, ranks, links, ids, and how endpoints are made."""

from __future__ import annotations

from typing import Any

import msgspec

from pdflow.layout.geometry import TransferGeometry
from pdflow.layout.shapes import KvShape
from pdflow.methods.catalogue import METHODS
from pdflow.methods.method import Grain, MemoryKind, Method
from pdflow.protocol.consumer.rank import ConsumerRank
from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.dialect import STRICT
from pdflow.protocol.ids import EngineInfo, Shards, rank_address
from pdflow.protocol.producer.cell import ProducerContext
from pdflow.protocol.producer.rank import ProducerRank
from pdflow.protocol.producer.scheduler import ProducerScheduler
from pdflow.protocol.producer.tombstones import WINDOW
from pdflow.protocol.timers import Timer, Timers
from pdflow.protocol.values import NO_BLOCK, Address, Allocation, EngineId, Instant, RequestId, Xid, allocation_of
from pdflow.serving.events import PrefillRequested
from pdflow_sim.check.engines.layered_role import LayeredPrefillRole
from pdflow_sim.check.engines.plan import EnginePlan
from pdflow_sim.check.engines.roles import DecodeRole, PrefillRole, Role, address_of
from pdflow_sim.check.engines.staged_role import StagedDecodeRole
from pdflow_sim.check.scopes.scope import BLOCK_TOKENS, TOKENS, Scope
from pdflow_sim.check.state.shadow_state import PromptStage, RequestStage, ShadowState

SHAPE = KvShape(num_layers=4, num_kv_heads=2, head_dim=8, bytes_per_value=2, block_size=BLOCK_TOKENS)
FIRST_INCARNATION = {"P": 101, "P0": 101, "P1": 151, "P2": 301, "D": 201, "D0": 201, "D1": 251, "D2": 351}
"""Incarnations of the engines' first processes; each restart adds one. An engine that is alone has no number."""
SOURCE, TARGET = 10, 20
"""Generations of the first product's blocks and of the first request's."""
DIGEST = 70
BOUNDED = (MemoryKind.RING, MemoryKind.STORE, MemoryKind.LOOKUP)
"""Kinds of P's memories that may be full."""


TRANSPORT_TICKS = 2
"""Ticks for which the transport tries an operation, on the clock of the engine that posted it."""
TICKS = Timers(
    lease_ns=4,
    lease_extension_ns=3,
    heartbeat_ns=1,
    release_lease_ns=1,
    registration_ttl_ns=5,
    no_request_ns=2,
    join_ns=1,
    sync_ns=1,
    reconnect_ns=0,
    suspect_ns=2,
    dead_ns=4,
    stall_ns=3,
    deadline_ns=6,
    watchdog_ns=6,
    cancel_first_ns=1,
    cancel_last_ns=2,
    backoff_first_ns=1,
    backoff_last_ns=2,
    handshake_queue_ns=1,
    transport_ns=TRANSPORT_TICKS + 3,
)
"""Every duration in ticks: as short as keeps their order. The transport's has its margin: two clocks that may each be a
tick ahead of the other differ by two over a time, and one more is the tick in which something falls."""

ORPHAN = "orphan "
"""Prefix of the address of a rank process that outlives its engine."""

SECOND = "second "
"""Prefix of the addresses of the processes of a second engine that has P's id."""


class Nobody:
    """A placeholder in the slot of a process that does not exist yet, or not any more. What reaches it is lost."""

    incarnation = 0

    def __init__(self) -> None:
        self.cells: dict[Any, Any] = {}

    def fork(self) -> Nobody:
        return self

    def armed(self) -> tuple[Timer, ...]:
        return ()

    def fingerprint(self) -> tuple[Any, ...]:
        return ()

    def handle(self, event: Any, now: Instant) -> tuple[Any, ...]:
        return ()


class ScopeCluster:
    """The engines, ranks and links of a scope.

    Of several P engines, prompt i is at the one after prompt i - 1's, and request i + 1 goes to the D engine of
    request i until every P engine has had its turn: two P engines feed one D engine before a second one comes in.
    """

    def __init__(self, scope: Scope) -> None:
        _check(scope)
        self.method = METHODS[scope.method].adapted(scope.progressive, False) if scope.method else None
        if self.method is not None:
            _fits(self.method, scope)
        self.scope = scope
        # Without clocks time stands still at 0, where a peer that could not be reached would be left alone for ever. A
        # SYNC may be sent at any time there, so that bringing one forward would only tell equal states apart.
        untimed = Timers(backoff_first_ns=0, backoff_last_ns=0, reconnect_ns=Timers().sync_ns)
        self.timers = TICKS if scope.horizon else untimed
        self.geometry = TransferGeometry(SHAPE, initiator="pull" if scope.pulls else "push")
        self.ps = [EngineInfo(name, Shards(scope.p_tp, 1, SHAPE.block_size)) for name in _names("P", scope.p_engines)]
        self.ds = [EngineInfo(name, Shards(scope.d_tp, 1, scope.d_block)) for name in _names("D", scope.d_engines)]
        self.p, self.d = self.ps[0], self.ds[0]
        self.engines = [info.engine for info in (*self.ps, *self.ds)]
        self.number = {engine: i for i, engine in enumerate(self.engines)}
        """By engine, its index in `engines`."""
        self.ranks = {e.engine: [rank_address(e.engine, r) for r in range(e.shards.tp)] for e in (*self.ps, *self.ds)}
        self.p_ranks = [rank for info in self.ps for rank in self.ranks[info.engine]]
        self.d_ranks = [rank for info in self.ds for rank in self.ranks[info.engine]]
        self.roles = {engine: address_of(engine) for engine in self.engines}
        """By engine, the address of its core."""
        self.nodes = [node for engine in self.engines for node in (engine, *self.ranks[engine], self.roles[engine])]
        self.orphans = {ORPHAN + rank: rank for rank in self.p_ranks} if scope.orphan else {}
        """By the address at which an orphan (a rank process of P's first incarnation) goes on, the address that it had
        before."""
        self.nodes += self.orphans
        self.seconds = {SECOND + node: node for node in ("P", *self.p_ranks)} if scope.twin else {}
        """By the address of a process of the second engine of one id, the address by which its peers know it."""
        self.nodes += self.seconds
        self.at = {name: i for i, name in enumerate(self.nodes)}
        self._name(scope)
        self.p_of = [self.ps[i % scope.p_engines] for i in range(len(self.xids))]
        """By prompt, the engine that computes it."""
        self.d_of = [self.ds[i // scope.p_engines % scope.d_engines] for i in range(len(self.requests))]
        """By request, the engine that decodes it."""
        self.links = self._links(scope)
        for second, rank in self.seconds.items():
            ends = [to for sender, to in self.links if sender == rank]
            self.links += [link for to in ends for link in ((second, to), (to, second))]
        self.between_engines = len(self.links)
        if scope.lagging:
            for engine, ranks in self.ranks.items():
                self.links += [link for rank in ranks for link in ((engine, rank), (rank, engine))]
        self.first_http = len(self.links)
        """Index of the first HTTP link; all behind it are HTTP too. Only a router's cluster has any."""
        self.link_of = {link: i for i, link in enumerate(self.links)}
        self.pairs = self.geometry.pairs(self.p.shards, self.d.shards)
        self.bit = {pair: 1 << i for i, pair in enumerate(self.pairs)}
        self.everything = (1 << len(self.pairs)) - 1
        self.sources = [
            self._allocation(SOURCE + i, (100 + 2 * i, 101 + 2 * i), 150 + i) for i in range(len(self.xids))
        ]
        self.d_blocks = TOKENS // scope.d_block
        """How many of its own blocks D needs for a prompt, in a KV cache group that keeps all of it."""
        self.request_blocks = self.d_blocks + scope.groups - 1
        """How many it needs in all groups."""
        needed_blocks = self.d_blocks - scope.hit_tokens // scope.d_block
        self.targets = [
            self._allocation(TARGET + i, self._blocks(i)[:needed_blocks], 500 + self._slot(i))
            for i in range(len(self.requests))
        ]
        self.plan = None if self.method is None else self._plan(self.method)
        self.decodes = scope.decodes or (self.method is not None and self.method.staged_at_d)
        """Whether D's engine still has something to do after a request's KV has landed, before the request is over."""
        self.over: tuple[RequestStage, ...] = (
            RequestStage.DECODED if self.decodes else RequestStage.COMMITTED,
            RequestStage.FREED,
            RequestStage.LEFT,
        )
        """Stages of requests that need nothing more; the first is that of a request that has been served."""

    def _plan(self, method: Method) -> EnginePlan:
        """Return the plan of the engines. A method that moves KV layer by layer gets two layers, any other one."""
        staged = dict(zip((*self.xids, *self.requests), (*self.sources, *self.targets), strict=True))
        layers = 2 if method.grain is Grain.LAYER else 1
        pipeline_policy = method.pipeline_policy(self.scope.dialect.name)
        return EnginePlan(
            scope=self.scope,
            method=method,
            pipeline_policy=pipeline_policy,
            layers=layers,
            ranks=self.scope.p_tp,
            staged=staged,
        )

    def _name(self, scope: Scope) -> None:
        """Make the ids as vLLM does: the id that a client sent, and eight hexadecimal digits that an engine appends."""
        products = [0 if scope.same_product else i for i in range(scope.requests)]
        bases = [0 if scope.same_base else product for product in products]
        self.requests = [f"u{base}-d000000{i}" for i, base in enumerate(bases)]
        self.product_of = products
        """By request, the index of the prompt that it asks for."""
        self.xids = [f"x{product}" for product in dict.fromkeys(products)]
        self.prefill_ids = [f"u{bases[product]}-e000000{product}" for product in dict.fromkeys(products)]

    def _links(self, scope: Scope) -> list[tuple[Address, Address]]:
        """Return the links between ranks of engines that serve a request together."""
        joined = {(self.p_of[product], d) for product, d in zip(self.product_of, self.d_of, strict=True)}
        return [
            link
            for p in self.ps
            for d in self.ds
            if (p, d) in joined
            for p_rank in self.ranks[p.engine]
            for d_rank in self.ranks[d.engine]
            for link in ((p_rank, d_rank), (d_rank, p_rank))
        ]

    def _slot(self, i: int) -> int:
        """Return where in D's pool a request has its blocks; in a small pool, that of an earlier request."""
        return i % self.scope.pool if self.scope.pool else i

    def _blocks(self, i: int) -> tuple[int, ...]:
        """Return D's blocks of a request."""
        first = 200 + self.d_blocks * self._slot(i)
        return tuple(range(first, first + self.d_blocks))

    def _allocation(self, generation: int, blocks: tuple[int, ...], last: int) -> Allocation:
        """Return these blocks; with two KV cache groups, and the second one's block of the last tokens."""
        if self.scope.groups == 1 or not blocks:
            return Allocation(generation, blocks)
        return allocation_of(generation, (blocks, (*[NO_BLOCK] * (len(blocks) - 1), last)))

    def ends_of(self, i: int) -> tuple[EngineId, EngineId]:
        """Return the P engine and the D engine of a request."""
        return self.p_of[self.product_of[i]].engine, self.d_of[i].engine

    def first_shadow(self) -> ShadowState:
        """Return the shadow state before the first move."""
        none = (0,) * len(self.requests)
        queued, unregistered = (PromptStage.QUEUED,) * len(self.xids), (RequestStage.UNREGISTERED,) * len(self.requests)
        alive = (0,) * len(self.engines)
        return ShadowState(queued, unregistered, none, none, alive, none, alive if self.scope.may_be_down else ())

    def first_events(self) -> list[tuple[Address, Any]]:
        """Return (address, event) of every event before the first move: each prompt is queued at P."""
        ids = zip(self.xids, self.prefill_ids, strict=True)
        return [self.requested(i, xid, prefill_id) for i, (xid, prefill_id) in enumerate(ids)]

    def requested(self, i: int, xid: Xid, request_id: RequestId) -> tuple[Address, PrefillRequested]:
        """Return the address and the event of a prefill leg that reaches P."""
        return self.roles[self.p_of[i].engine], PrefillRequested(xid, request_id, TOKENS, DIGEST + i)

    def endpoints(self) -> list[Any]:
        """Return the endpoints and cores of every engine's first incarnation, in the order of `nodes`."""
        bodies = [body for engine in self.engines for body in self.born(engine, 0)]
        seconds = self.engine("P", 1) if self.seconds else []
        return [*bodies, *(Nobody() for _ in self.orphans), *seconds]

    def born(self, name: EngineId, restarts: int) -> list[Any]:
        """Return the endpoints of an engine after this many restarts, and its core."""
        return [*self.engine(name, restarts), self.role(name)]

    def role(self, name: EngineId) -> Role:
        """Return the core of a new engine."""
        scope, plan, prefills = self.scope, self.plan, role_of(name) == "P"
        if plan is not None:
            method = plan.method
            if prefills and plan.layered:
                room = plan.memory(method.p_memory, scope.p_pool or scope.requests) if method.staged_at_p else None
                return LayeredPrefillRole(name, plan, room)
            if not prefills and method.staged_at_d:
                return StagedDecodeRole(name, plan, plan.memory(method.d_memory, scope.pool or scope.requests))
        return PrefillRole(name, scope) if prefills else DecodeRole(name, scope)

    def engine(self, name: EngineId, restarts: int) -> list[Any]:
        """Return the endpoints of an engine after this many restarts, in the order of `nodes`."""
        info = (*self.ps, *self.ds)[self.number[name]]
        incarnation = FIRST_INCARNATION[name] + restarts
        return self._prefill_engine(info, incarnation) if info in self.ps else self._decode_engine(info, incarnation)

    def _prefill_engine(self, info: EngineInfo, incarnation: int) -> list[Any]:
        scope = self.scope
        first = ProducerContext(
            rank=0,
            shards=info.shards,
            dialect=scope.dialect,
            timers=self.timers,
            geometry=self.geometry,
            done_is_remote=scope.done_is_remote,
            in_pieces=self.method is not None and self.method.in_pieces,
            into_staging=self.method is not None and self.method.staged_at_d,
            window=scope.window or WINDOW,
        )
        ranks = [
            ProducerRank(info.engine, incarnation, msgspec.structs.replace(first, rank=r)) for r in range(scope.p_tp)
        ]
        return [ProducerScheduler(info, incarnation, scope.dialect, scope.pulls), *ranks]

    def _decode_engine(self, info: EngineInfo, incarnation: int) -> list[Any]:
        scope = self.scope
        dialect, timers, geometry = scope.dialect, self.timers, self.geometry
        ranks = [ConsumerRank(info, r, incarnation, dialect, timers, geometry) for r in range(scope.d_tp)]
        scheduler = ConsumerScheduler(info, incarnation, dialect, timers, geometry, scope.pulls, scope.pool_blocks)
        return [scheduler, *ranks]


def _check(scope: Scope) -> None:
    """Check that the fields of a scope go together, whatever its method. Raises ValueError."""
    if scope.streams and not scope.attempts:
        raise ValueError("streams=true needs attempts: without the router's endpoint nothing forwards tokens")
    if (scope.drift or scope.idle) and not scope.horizon:
        raise ValueError("drift and idle need horizon: without it engines have no clocks")
    if scope.orphan and (scope.horizon or scope.attempts):
        raise ValueError("orphan=true excludes horizon and attempts")
    if scope.down and (scope.orphan or scope.attempts or scope.method):
        raise ValueError("down=true excludes orphan, attempts and method")
    if scope.rank_dies and (scope.orphan or scope.attempts or scope.method or scope.horizon or scope.p_tp == 1):
        raise ValueError("rank_dies=true needs p_tp=2, and excludes orphan, attempts, method and horizon")
    if scope.twin and (scope.p_engines > 1 or scope.p_restart or scope.lagging or scope.horizon):
        raise ValueError("twin=true excludes p_engines=2, p_restart, lagging and horizon")
    if scope.corrupt and (scope.twin or not scope.dialect.control_frames):
        raise ValueError("corrupt excludes twin=true, and needs dialect=strict: vLLM drops what it cannot decode")
    if scope.router_restart and (not scope.attempts or scope.p_engines > 1 or scope.d_engines > 1):
        raise ValueError("router_restart needs attempts, and excludes p_engines=2 and d_engines=2")
    if scope.router_restart and not scope.dialect.control_frames:
        raise ValueError(
            "router_restart needs dialect=strict: without the router a vLLM D does not learn that a prefill ended"
        )
    if scope.twin and (scope.attempts or scope.method or scope.pulls or not scope.dialect.control_frames):
        raise ValueError("twin=true excludes attempts, method and pulls, and needs dialect=strict")
    if scope.groups > 1 and (scope.method or scope.dialect != STRICT):
        raise ValueError("groups=2 excludes method, and needs dialect=strict")
    if scope.groups > 1 and scope.d_block > SHAPE.block_size:
        raise ValueError(f"groups=2 needs d_block={SHAPE.block_size} or less: windows end inside a larger one")
    if scope.window and not scope.dialect.floor:
        raise ValueError("window needs dialect=strict")
    if scope.hit_tokens % scope.d_block:
        raise ValueError(f"hit_tokens={scope.hit_tokens} is no multiple of d_block={scope.d_block}")


def _fits(method: Method, scope: Scope) -> None:
    """Check that a scope makes sense with this method. Raises ValueError."""
    if scope.dialect.name not in method.dialects:
        raise ValueError(f"method={method.name} has no dialect {scope.dialect.name}, only {', '.join(method.dialects)}")
    if scope.progressive and not method.pipeline_policy(scope.dialect.name).early:
        raise ValueError(f"progressive=true excludes method={method.name}, which does not write blocks one by one")
    if scope.pulls != method.pulls and not method.stores:
        raise ValueError(f"method={method.name} needs pulls={str(method.pulls).lower()}")
    if scope.horizon or scope.attempts or scope.chunks > 1:
        raise ValueError(f"method={method.name} excludes horizon, attempts and chunks")
    if scope.hit_tokens and method.staged_at_d:
        raise ValueError(f"hit_tokens excludes method={method.name}, which moves whole prompts through staging memory")
    if scope.p_pool and method.p_memory not in BOUNDED:
        raise ValueError(f"p_pool excludes method={method.name}, which has space for all prompts at P")


def role_of(name: str) -> str:
    """Return "P" for an engine that prefills, or an endpoint of one, and "D" for one that decodes."""
    return name[0]


def _names(kind: str, count: int) -> list[EngineId]:
    return [kind] if count == 1 else [f"{kind}{i}" for i in range(count)]
