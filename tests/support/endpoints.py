"""Endpoints of hand-made engines: what the engines of a test agree on, and the endpoints of one of them."""

from __future__ import annotations

from typing import Any

import attrs

from pdflow.layout.geometry import TransferGeometry
from pdflow.layout.shapes import KvShape
from pdflow.protocol.consumer.rank import ConsumerRank
from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.dialect import STRICT, Dialect
from pdflow.protocol.geometry import Geometry
from pdflow.protocol.ids import EngineInfo, Shards, rank_address
from pdflow.protocol.producer.cell import ProducerContext
from pdflow.protocol.producer.rank import ProducerRank
from pdflow.protocol.producer.scheduler import ProducerScheduler
from pdflow.protocol.timers import Timers
from pdflow.protocol.values import Address

BLOCK = 16
SHAPE = KvShape(num_layers=4, num_kv_heads=2, head_dim=8, bytes_per_value=2, block_size=BLOCK)


def engine_info(engine: str, tp: int = 1, pp: int = 1, block_size: int = BLOCK) -> EngineInfo:
    return EngineInfo(engine, Shards(tp, pp, block_size))


@attrs.frozen(kw_only=True)
class Agreed:
    """What all engines of a hand-made cluster are configured by."""

    dialect: Dialect = STRICT
    pulls: bool = False
    done_is_remote: bool = True
    timers: Timers = attrs.field(factory=Timers)
    geometry: Geometry = attrs.field()
    pool_blocks: int = 1000
    peer_fraction: float = 0.25

    @geometry.default
    def _of_the_test_shape(self) -> Geometry:
        return TransferGeometry(SHAPE, initiator="pull" if self.pulls else "push")

    def prefill(self, info: EngineInfo, incarnation: int) -> dict[Address, Any]:
        """The endpoints of one incarnation of a prefill engine, by address: the scheduler's, then the ranks'."""
        endpoints: dict[Address, Any] = {info.engine: ProducerScheduler(info, incarnation, self.dialect, self.pulls)}
        for rank in range(info.shards.ranks):
            context = ProducerContext(
                rank=rank,
                shards=info.shards,
                dialect=self.dialect,
                timers=self.timers,
                geometry=self.geometry,
                done_is_remote=self.done_is_remote,
            )
            endpoints[rank_address(info.engine, rank)] = ProducerRank(info.engine, incarnation, context)
        return endpoints

    def decode(self, info: EngineInfo, incarnation: int) -> dict[Address, Any]:
        """The endpoints of one incarnation of a decode engine, in the same order."""
        endpoints: dict[Address, Any] = {
            info.engine: ConsumerScheduler(
                info,
                incarnation,
                dialect=self.dialect,
                timers=self.timers,
                geometry=self.geometry,
                pulls=self.pulls,
                pool_blocks=self.pool_blocks,
                peer_fraction=self.peer_fraction,
            )
        }
        for rank in range(info.shards.ranks):
            endpoints[rank_address(info.engine, rank)] = ConsumerRank(
                info, rank, incarnation, dialect=self.dialect, timers=self.timers, geometry=self.geometry
            )
        return endpoints
