"""Builds the endpoints of one incarnation of an engine from what its protocol is configured by.

Scenarios (`engines.py`), vLLM instances and recorded traces come here, so an endpoint is configured alike whoever
drives it.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pdflow.layout.geometry import TransferGeometry
from pdflow.layout.ranks import Initiator, Rule
from pdflow.layout.shapes import KvShape
from pdflow.protocol.consumer.rank import ConsumerRank
from pdflow.protocol.consumer.scheduler import ConsumerScheduler
from pdflow.protocol.dialect import STRICT, Dialect
from pdflow.protocol.geometry import Geometry
from pdflow.protocol.ids import EngineInfo, rank_address
from pdflow.protocol.producer.cell import ProducerContext
from pdflow.protocol.producer.rank import ProducerRank
from pdflow.protocol.producer.scheduler import ProducerScheduler
from pdflow.protocol.timers import Timers
from pdflow.protocol.values import Address, Value


class ProtocolConfig(Value, frozen=True, kw_only=True):
    """What the endpoints of all engines of a cluster are configured by."""

    shape: KvShape
    """The model's KV; its `block_size` may be another one than an engine's."""
    pulls: bool
    """D reads. Otherwise P writes."""
    dialect: Dialect = STRICT
    timers: Timers = Timers()
    done_is_remote: bool = True
    """A WRITE that the transport reports as done has landed. If it has not, P flushes before it says SENT."""
    in_pieces: bool = False
    """A WRITE is posted in pieces, so it can be stopped between two of them."""
    into_staging: bool = False
    """D grants staging memory beside its blocks, in parts of its own."""
    reads_p: bool | None = None
    """P's blocks are read from, so its prompts get lease words. None: as `pulls`."""
    peer_fraction: float = 0.25
    """The part of D's blocks that one of several prefill engines may bind."""
    suspect_fraction: float = 0.10
    """With more of D's blocks than that in quarantine, a suspect peer gets nothing new."""

    @property
    def initiator(self) -> Initiator:
        return "pull" if self.pulls else "push"

    @property
    def rule(self) -> Rule:
        """Which ranks exchange what: each piece goes once, unless D counts completions as vLLM does."""
        return "exactly-once" if self.dialect.control_frames else "vllm"

    def geometry(self) -> TransferGeometry:
        return TransferGeometry(self.shape, initiator=self.initiator, rule=self.rule)


class EngineRecord(Value, frozen=True, kw_only=True):
    """What the endpoints of one incarnation of an engine were made from: so that others can be made which answer
    alike."""

    role: Literal["prefill", "decode"]
    info: EngineInfo
    incarnation: int
    num_blocks: int
    protocol: ProtocolConfig

    def endpoints(self) -> dict[Address, Any]:
        """Return fresh endpoints by address: the scheduler's, then those of the ranks."""
        geometry, info = self.protocol.geometry(), self.info
        made: Producer | Consumer
        if self.role == "prefill":
            made = producer(self.protocol, geometry, info, self.incarnation)
        else:
            made = consumer(self.protocol, geometry, info, self.incarnation, self.num_blocks)
        return {
            info.engine: made.scheduler,
            **{rank_address(info.engine, n): each for n, each in enumerate(made.ranks)},
        }


class Producer(NamedTuple):
    """The endpoints of one incarnation of an engine that KV is read from."""

    scheduler: ProducerScheduler
    ranks: list[ProducerRank]


class Consumer(NamedTuple):
    """The endpoints of one incarnation of an engine that receives KV."""

    scheduler: ConsumerScheduler
    ranks: list[ConsumerRank]


def producer(config: ProtocolConfig, geometry: Geometry, info: EngineInfo, incarnation: int) -> Producer:
    """Create the endpoints of one incarnation of a prefill engine."""
    ranks = [producer_rank(config, geometry, info, incarnation, rank) for rank in range(info.shards.ranks)]
    return Producer(producer_scheduler(config, info, incarnation), ranks)


def producer_scheduler(config: ProtocolConfig, info: EngineInfo, incarnation: int) -> ProducerScheduler:
    reads_p = config.pulls if config.reads_p is None else config.reads_p
    return ProducerScheduler(info, incarnation, config.dialect, reads_p)


def producer_rank(
    config: ProtocolConfig, geometry: Geometry, info: EngineInfo, incarnation: int, rank: int
) -> ProducerRank:
    context = ProducerContext(
        rank=rank,
        shards=info.shards,
        dialect=config.dialect,
        timers=config.timers,
        geometry=geometry,
        done_is_remote=config.done_is_remote,
        in_pieces=config.in_pieces,
        into_staging=config.into_staging,
    )
    return ProducerRank(info.engine, incarnation, context)


def consumer(
    config: ProtocolConfig, geometry: Geometry, info: EngineInfo, incarnation: int, num_blocks: int
) -> Consumer:
    """Create the endpoints of one incarnation of a decode engine, or of another receiver of KV."""
    ranks = [consumer_rank(config, geometry, info, incarnation, rank) for rank in range(info.shards.ranks)]
    return Consumer(consumer_scheduler(config, geometry, info, incarnation, num_blocks), ranks)


def consumer_scheduler(
    config: ProtocolConfig, geometry: Geometry, info: EngineInfo, incarnation: int, num_blocks: int
) -> ConsumerScheduler:
    return ConsumerScheduler(
        info,
        incarnation,
        dialect=config.dialect,
        timers=config.timers,
        geometry=geometry,
        pulls=config.pulls,
        pool_blocks=num_blocks,
        peer_fraction=config.peer_fraction,
        suspect_fraction=config.suspect_fraction,
    )


def consumer_rank(
    config: ProtocolConfig, geometry: Geometry, info: EngineInfo, incarnation: int, rank: int
) -> ConsumerRank:
    return ConsumerRank(info, rank, incarnation, dialect=config.dialect, timers=config.timers, geometry=geometry)
