"""The base of nodes with ranks, engines' and a store's: endpoints under one name or two, a memory at each rank,
streams.

A name is a scheduler's endpoint with those of its ranks. Ranks of a second name have an agent each over the memory of
the first one's: a peer that is fenced under one name is not under the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Final

import attrs
import trio

from pdflow.layout.shapes import KvShape
from pdflow.protocol.effects import Fence, Flush, Handshake, Send
from pdflow.protocol.ids import EngineInfo, rank_address
from pdflow.protocol.producer.rank import ProducerRank
from pdflow.protocol.values import Address, EngineId, Instant, RequestId
from pdflow.serving.core import Core, Endpoint, Port
from pdflow_runtime.nodes.links import RankLinks
from pdflow_runtime.nodes.node import LiveNode
from pdflow_runtime.nodes.rank_memory import AdoptedMemory, KvLocation, StagingFactory
from pdflow_runtime.nodes.ranks import LayoutBook, Rank
from pdflow_runtime.observe.engine_traces import EngineTraces
from pdflow_runtime.observe.metrics import Meter, TransferMeter
from pdflow_runtime.security.secret import Secret
from pdflow_runtime.security.tls import Tls
from pdflow_runtime.tls_socket import share_interpreter
from pdflow_runtime.transports.base import MakeTransport


@attrs.frozen(kw_only=True)
class NodeConfig:
    """The configuration of one incarnation of a node with ranks."""

    info: EngineInfo
    incarnation: int
    shape: KvShape
    num_blocks: int
    layouts: LayoutBook
    weights: int
    """The number of the model's weights: engines of different weights exchange nothing (S4)."""
    dtype: str = ""
    """The dtype that KV is computed and kept in; "" if it is not known: KV of synthetic engines, or in a store whose
    scenario does not say it."""
    staging_factory: StagingFactory | None = None
    """Makes the memory that a rank keeps beside its blocks."""
    leases: int | None = None
    """The number of leases that may be open at once, unless blocks say so."""
    adopted: AdoptedMemory | None = None
    """The memory that a rank's KV lies in, unless it is to be allocated: of a node with one rank in this process."""
    location: KvLocation = "region"
    """Where the memory of the ranks is allocated."""


class RankedNode(LiveNode):
    """A node with ranks. Subclasses add the endpoints of their names, and start in `begin_all` what else runs."""

    stages: ClassVar[tuple[str, ...]] = ()
    """The stages of requests that run here."""

    def __init__(self, name: str, config: NodeConfig, transport: MakeTransport, core: Core | None = None) -> None:
        super().__init__(name, core)
        self.config: Final = config
        self.transport: Final = transport
        self.meter: Meter | None = None
        self.traces: EngineTraces | None = None
        self.port = 0
        """The TCP port at which its ranks listen."""
        self.ranks: dict[Address, Rank] = {}
        self.ends: dict[EngineId, list[Rank]] = {}
        """The same ranks by the name that they are under."""
        self.nursery: trio.Nursery
        self.links: Final = RankLinks(self, self.ranks)
        self.do.update({Send: self.links.send, Handshake: self.links.handshake, Fence: self.fence, Flush: self.flush})

    def add_end(
        self, info: EngineInfo, scheduler: Endpoint, endpoints: Sequence[Endpoint], over: Sequence[Rank] | None = None
    ) -> Port:
        """Add the endpoints of one name: a scheduler's and its ranks'. `over`: the ranks whose memory theirs is."""
        port = self.add(info.engine, scheduler, self.config.incarnation)
        owners: Sequence[Rank | None] = [None] * len(endpoints) if over is None else over
        self.ends[info.engine] = [
            self.add_rank(info, number, endpoint, owner)
            for number, (endpoint, owner) in enumerate(zip(endpoints, owners, strict=True))
        ]
        return port

    def add_rank(self, info: EngineInfo, number: int, endpoint: Endpoint, owner: Rank | None = None) -> Rank:
        """Add the endpoint and the memory of one rank, which may be the only one of its engine in this process.
        `owner`: the rank whose memory its is."""
        config = self.config
        address = rank_address(info.engine, number)
        port = self.add(address, endpoint, config.incarnation)
        rank = self.ranks[address] = Rank(
            info,
            number,
            config.shape,
            config.num_blocks,
            config.layouts,
            self.transport,
            partial(self.put, port),
            config.incarnation,
            config.staging_factory,
            config.leases,
            owner,
            config.dtype,
            config.adopted,
            config.location,
        )
        if isinstance(endpoint, ProducerRank):
            declared = rank.transport.done_means
            assert endpoint.store.context.done_is_remote == (declared == "remote"), (
                f"{address}: the transport declares done_means = {declared}, its endpoint another one"
            )
        rank.transfers.event_log = self.event_log
        rank.lost = partial(self.links.lose, address)
        return rank

    def secured_by(self, secret: Secret | None, tls: Tls | None) -> None:
        """Set the secret that streams prove and the TLS that they go by, if any. To be called before any stream is
        opened. With TLS, threads of this process that compute give way to those that move KV."""
        self.links.secret, self.links.tls = secret, tls
        if tls is not None:
            share_interpreter()

    def measured_by(self, meter: Meter) -> None:
        """Count from now on in this meter what happens here."""
        self.meter = meter
        meter.export_stages(self.stages)
        transfers = TransferMeter(meter.registry, meter.model)
        for rank in self.ranks.values():
            rank.measured_by(transfers)

    def stage(self, request_id: RequestId, name: str, begun_ns: Instant, ended_ns: Instant) -> None:
        """Record that a request was in this stage from `begun_ns` until `ended_ns`."""
        if self.meter is not None:
            self.meter.stage(name, ended_ns - begun_ns)
        if self.traces is not None:
            self.traces.stage(request_id, name, begun_ns, ended_ns)

    async def serve(
        self, listener: trio.SocketListener, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run everything until cancelled. `listener`: where peers' streams come in."""
        self.port = listener.socket.getsockname()[1]
        async with trio.open_nursery() as nursery:
            self.nursery = nursery
            for rank in self.ranks.values():
                await nursery.start(rank.transport.run)
            await nursery.start(self.links.run, listener)
            self.begin_all(nursery)
            task_status.started()
            await self.run()

    def begin_all(self, nursery: trio.Nursery) -> None:
        """Start the tasks that run beside the endpoints."""

    async def aclose(self) -> None:
        """Close all transports; the ranks that own memory close last."""
        for rank in reversed(self.ranks.values()):
            await rank.transport.aclose()

    def fence(self, port: Port, effect: Fence) -> None:
        """Fence a peer: it writes no more into anything that was granted to it so far."""
        self.links.fence(port, effect)
        self.ranks[port.address].fence(effect.peer, self.newest_generation())

    def newest_generation(self) -> int:
        """Return the newest generation of what has been granted to peers so far."""
        raise NotImplementedError

    def flush(self, port: Port, effect: Flush) -> None:
        self.ranks[port.address].flush(effect.peer)

    def is_drained(self) -> bool:
        """True if none of its blocks is held any more, in whatever way."""
        raise NotImplementedError
