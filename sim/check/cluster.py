"""What does not change while a scope is explored: engines, ranks, links, ids, and how endpoints are made."""

from __future__ import annotations

from typing import Any

from pdflow.layout.geometry import TransferGeometry
from pdflow.layout.shapes import KvShape
from pdflow.protocol.consumer_rank import ConsumerRank
from pdflow.protocol.consumer_scheduler import ConsumerScheduler
from pdflow.protocol.ids import EngineInfo, Shards, rank_address
from pdflow.protocol.producer_rank import ProducerRank
from pdflow.protocol.producer_scheduler import ProducerScheduler
from pdflow.protocol.timers import Timers
from pdflow.protocol.values import Allocation
from sim.check.scope import BLOCK_TOKENS, TOKENS, Scope

BLOCKS = TOKENS // BLOCK_TOKENS
SHAPE = KvShape(num_layers=4, num_kv_heads=2, head_dim=8, bytes_per_value=2, block_size=BLOCK_TOKENS)
POOL_BLOCKS = 1000
FIRST_LIFE = {"P": 101, "D": 201}
"""Incarnations of the engines' first processes; each restart adds one."""
SOURCE, TARGET = 10, 20
"""Generations of the first product's blocks and of the first request's."""
DIGEST, WEIGHTS = 70, 1


TRANSPORT_TICKS = 2
"""How long the transport tries, on the clock of who posted."""
TICKS = Timers(
    lease_ns=4,
    lease_extension_ns=3,
    heartbeat_ns=1,
    release_lease_ns=1,
    registration_ttl_ns=5,
    no_request_ns=2,
    join_ns=1,
    sync_ns=1,
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


class Cluster:
    """One P engine and one D engine, as a scope wants them."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        # Without clocks time stands still at 0, where a peer that could not be reached would be left alone for ever.
        self.timers = TICKS if scope.horizon else Timers(backoff_first_ns=0, backoff_last_ns=0)
        self.geometry = TransferGeometry(SHAPE, initiator="pull" if scope.pulls else "push")
        self.p = EngineInfo("P", Shards(scope.p_tp, 1, SHAPE.block_size))
        self.d = EngineInfo("D", Shards(scope.d_tp, 1, SHAPE.block_size))
        self.p_ranks = [rank_address("P", r) for r in range(scope.p_tp)]
        self.d_ranks = [rank_address("D", r) for r in range(scope.d_tp)]
        self.nodes = ["P", *self.p_ranks, "D", *self.d_ranks]
        self.at = {name: i for i, name in enumerate(self.nodes)}
        pairs = [(p, d) for p in self.p_ranks for d in self.d_ranks]
        self.links = [link for p, d in pairs for link in ((p, d), (d, p))]
        self.between_engines = len(self.links)
        if scope.lagging:
            for engine, ranks in (("P", self.p_ranks), ("D", self.d_ranks)):
                self.links += [link for rank in ranks for link in ((engine, rank), (rank, engine))]
        self.link_of = {link: i for i, link in enumerate(self.links)}
        self.pairs = self.geometry.pairs(self.p.shards, self.d.shards)
        self.bit = {pair: 1 << i for i, pair in enumerate(self.pairs)}
        self.everything = (1 << len(self.pairs)) - 1
        self._name(scope)
        self.sources = [Allocation(SOURCE + i, (100 + 2 * i, 101 + 2 * i)) for i in range(len(self.xids))]
        wanted = BLOCKS - scope.hit_tokens // BLOCK_TOKENS
        self.targets = [Allocation(TARGET + i, self._blocks(i)[:wanted]) for i in range(len(self.requests))]

    def _name(self, scope: Scope) -> None:
        """Ids as vLLM makes them: what a client sent, and eight hexadecimal digits of the engine's own."""
        products = [0 if scope.same_product else i for i in range(scope.requests)]
        bases = [0 if scope.same_base else product for product in products]
        self.requests = [f"u{base}-d000000{i}" for i, base in enumerate(bases)]
        self.product_of = products
        """Which product each request asks for."""
        self.xids = [f"x{product}" for product in dict.fromkeys(products)]
        self.prefill_ids = [f"u{bases[product]}-e000000{product}" for product in dict.fromkeys(products)]

    def _blocks(self, i: int) -> tuple[int, ...]:
        """D's blocks of a request; those of one before it, if the pool is small."""
        first = 200 + BLOCKS * (i % self.scope.pool if self.scope.pool else i)
        return tuple(range(first, first + BLOCKS))

    def endpoints(self) -> list[Any]:
        """Of everybody's first life, in the order of `nodes`."""
        return [*self.prefill_engine(FIRST_LIFE["P"]), *self.decode_engine(FIRST_LIFE["D"])]

    def prefill_engine(self, life: int) -> list[Any]:
        """Its endpoints, in the order of `nodes`."""
        scope = self.scope
        fixed = (scope.dialect, self.timers, self.geometry)
        ranks = [ProducerRank(self.p, r, life, *fixed, scope.done_is_remote) for r in range(scope.p_tp)]
        return [ProducerScheduler(self.p, life, scope.dialect, scope.pulls), *ranks]

    def decode_engine(self, life: int) -> list[Any]:
        """Its endpoints, in the order of `nodes`."""
        scope = self.scope
        fixed = (scope.dialect, self.timers, self.geometry)
        ranks = [ConsumerRank(self.d, r, life, *fixed) for r in range(scope.d_tp)]
        return [ConsumerScheduler(self.d, life, *fixed, scope.pulls, POOL_BLOCKS), *ranks]
