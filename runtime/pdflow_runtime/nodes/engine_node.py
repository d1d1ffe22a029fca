"""The base of prefill and decode engines' nodes: their ranks, their streams, and the interface to the engine.

An engine is one process with one scheduler endpoint and, for each of its ranks, an endpoint and a memory. Everything
here runs in trio's thread; the engine computes its steps in another, and reports them here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final, NamedTuple

import trio

from pdflow.memory.caching import CachingPool
from pdflow.memory.paged import PagedPool
from pdflow.methods.staging import Staging
from pdflow.protocol.values import Allocation, Instant, RequestId
from pdflow.serving.core import Core, Endpoint
from pdflow_runtime.engines.loop import EngineOutput, LiveEngine
from pdflow_runtime.nodes.ranked_node import NodeConfig, RankedNode
from pdflow_runtime.nodes.ranks import Rank
from pdflow_runtime.observe.metrics import EngineCollector, Meter
from pdflow_runtime.transports.base import MakeTransport


class Known(NamedTuple):
    """A request that an engine has at present."""

    request_id: RequestId
    state: str
    begun_ns: Instant


class LiveEngineNode(RankedNode):
    """The node of an engine, with its engine and its KV blocks. Subclasses implement in `on_engine_output` what the
    engine's outcomes mean."""

    pool_role: ClassVar[str]
    """The `role` of its pool; for an aggregated engine, decode."""

    def __init__(
        self,
        config: NodeConfig,
        scheduler: Endpoint,
        rank_endpoints: Sequence[Endpoint],
        transport: MakeTransport,
        core: Core | None = None,
    ) -> None:
        super().__init__(config.info.engine, config, transport, core)
        self.engine: LiveEngine
        self.staging: Staging | None = None
        """The memory beside the blocks of each rank, where a method keeps any."""
        self.scheduler: Final = self.add_end(config.info, scheduler, rank_endpoints)

    def measured_by(self, meter: Meter) -> None:
        super().measured_by(meter)
        cache = {
            "block_size": self.engine.limits.block_size,
            "cache_dtype": self.config.dtype or "auto",
            "enable_prefix_caching": self.engine.caches_prefixes,
            "num_gpu_blocks": self.pool.num_blocks,
        }
        meter.registry.register(EngineCollector(self.engine, self.links.links, self.notes, meter.model, cache))

    def known(self) -> list[Known]:
        """Return the requests that are not over."""
        raise NotImplementedError

    def begin_all(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(self.engine.run)

    def computed_in(self) -> list[Rank]:
        """Return the ranks in whose memories the engine computes."""
        return self.ends[self.name]

    def memories(self) -> list[Any]:
        """Return the KV memory of each rank: bytes of this process, or a tensor on a GPU."""
        return [rank.held.kv for rank in self.computed_in()]

    def newest_generation(self) -> int:
        return self.pool.newest_generation

    def is_drained(self) -> bool:
        return self.pool.free == self.pool.num_blocks

    def on_engine_output(self, outcome: EngineOutput) -> None:
        """Handle one outcome of the engine."""
        raise NotImplementedError

    @property
    def pool(self) -> PagedPool:
        return self.engine.pool

    def table(self, own: Allocation) -> Allocation:
        """Return all blocks of a prompt, the shared ones first, under the generation of its own."""
        pool = self.pool
        return Allocation(own.generation, pool.table(own)) if isinstance(pool, CachingPool) else own
