"""What the nodes of prefill and decode engines share: their ranks, their streams, and the engine's door.

An engine is one process with one scheduler endpoint and, for each of its ranks, an endpoint and a memory. Everything
here runs in trio's thread; the engine computes its steps in another, and tells of them here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import attrs
import trio

from pdflow.engine.sequence import Sequence as Seq
from pdflow.layout.shapes import KvShape
from pdflow.memory.caching import CachingPool
from pdflow.memory.paged import PagedPool
from pdflow.protocol.effects import Fence, Flush, Handshake, Send
from pdflow.protocol.ids import EngineInfo, rank_address
from pdflow.protocol.values import Address, Allocation, Instant, RequestId
from runtime.clock import now_ns
from runtime.engines.loop import LiveEngine, Told
from runtime.links import Links
from runtime.meter import EngineCollector, Meter, TransferMeter
from runtime.node import Endpoint, Node, Port
from runtime.ranks import Beside, LayoutBook, Rank
from runtime.transports.base import Tell, Transport

MakeTransport: TypeAlias = Callable[[Address, Tell], Transport]
"""That of one rank: its address, and who is told its events."""


@attrs.frozen(kw_only=True)
class Place:
    """What a life of an engine is made from."""

    info: EngineInfo
    incarnation: int
    shape: KvShape
    num_blocks: int
    layouts: LayoutBook
    weights: int
    """Names what the model computes with: engines of different weights exchange nothing (S4)."""
    beside: Beside | None = None
    """What a rank keeps beside its blocks."""


class Known(NamedTuple):
    """A request that an engine knows of."""

    request_id: RequestId
    name: str
    """Under which its scheduler's endpoint knows it."""
    seq: Seq
    begun_ns: Instant


class EngineNode(Node):
    """Subclasses say in `came` what the engine's outcomes mean."""

    def __init__(
        self,
        place: Place,
        scheduler: Endpoint,
        rank_endpoints: Sequence[Endpoint],
        transport: MakeTransport,
    ) -> None:
        super().__init__(place.info.engine)
        self.place: Final = place
        self.engine: LiveEngine
        self.meter: Meter | None = None
        self.port = 0
        """Where its ranks hear."""
        self.scheduler: Final = self.add(self.name, scheduler, place.incarnation)
        self.ranks: dict[Address, Rank] = {}
        self.links: Final = Links(self, self.ranks)
        for number, endpoint in enumerate(rank_endpoints):
            self._add_rank(number, endpoint, transport)
        self.do.update({Send: self.links.send, Handshake: self.links.handshake, Fence: self.fence, Flush: self.flush})

    def _add_rank(self, number: int, endpoint: Endpoint, transport: MakeTransport) -> None:
        place = self.place
        address = rank_address(place.info.engine, number)
        port = self.add(address, endpoint, place.incarnation)
        rank = Rank(
            place.info,
            number,
            place.shape,
            place.num_blocks,
            place.layouts,
            transport,
            partial(self.put, port),
            partial(self.links.incarnation_of, address),
            place.beside,
        )
        rank.orders.diary = self.diary
        self.ranks[address] = rank

    def measured_by(self, meter: Meter) -> None:
        """From now on, what happens here is counted there."""
        self.meter = meter
        meter.registry.register(EngineCollector(self))
        transfers = TransferMeter(meter.registry)
        for rank in self.ranks.values():
            rank.measured_by(transfers)

    def stage(self, name: str, begun_ns: Instant, ended_ns: Instant | None = None) -> None:
        """A request has been in this stage from then until now, or until then."""
        if self.meter is not None:
            self.meter.stage(name, (now_ns() if ended_ns is None else ended_ns) - begun_ns)

    def known(self) -> list[Known]:
        """Requests that are not over."""
        raise NotImplementedError

    async def serve(
        self, listener: trio.SocketListener, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Own everything until cancelled. `listener`: where peers' streams come in."""
        self.port = listener.socket.getsockname()[1]
        async with trio.open_nursery() as nursery:
            for rank in self.ranks.values():
                await nursery.start(rank.transport.run)
            await nursery.start(self.links.run, listener)
            nursery.start_soon(self.engine.run)
            task_status.started()
            await self.run()

    def memories(self) -> list[memoryview]:
        """Each rank's KV, for the engine to compute in."""
        return [rank.view[: rank.kv_bytes] for rank in self.ranks.values()]

    def fence(self, port: Port, effect: Fence) -> None:
        """Whatever was granted so far to this peer, it writes no more."""
        self.links.fence(port, effect)
        self.ranks[port.address].fence(effect.peer, self.newest_generation())

    def newest_generation(self) -> int:
        """Of what has been granted to peers so far."""
        return self.pool.newest_generation

    def flush(self, port: Port, effect: Flush) -> None:
        self.ranks[port.address].transport.flush(effect.peer)

    def came(self, outcome: Told) -> None:
        """The engine has something to tell."""
        raise NotImplementedError

    @property
    def pool(self) -> PagedPool:
        return self.engine.pool

    def table(self, own: Allocation) -> Allocation:
        """All blocks of a prompt, the shared ones first, under the generation of its own."""
        pool = self.pool
        return Allocation(own.generation, pool.table(own)) if isinstance(pool, CachingPool) else own
