"""The node of one rank in its vLLM worker: its endpoint, its streams and its transport, in a thread of their own.

The scheduler's endpoint is in another process. What the rank reports to it waits in the outbox until a step takes it,
and what it orders comes in `receive`, in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import trio

from pdflow.methods.lanes import LaneRules
from pdflow.methods.shipment import Piece
from pdflow.protocol.effects import BumpWord, PostRead, PostWrite, ReadWord, SendLocal, StopWrite
from pdflow.protocol.events import FrameOrdered, HandshakeEnded, ReadOrdered, SourceReady
from pdflow.protocol.ids import engine_of, rank_address
from pdflow.protocol.messages import Register
from pdflow.protocol.producer.scheduler import ProducerScheduler
from pdflow.protocol.values import Address, EngineId, S
from pdflow.serving.core import Port
from pdflow.wiring.endpoints import consumer_rank, producer_rank, producer_scheduler
from pdflow_runtime.clock import now_ns
from pdflow_runtime.nodes.rank_memory import AdoptedMemory
from pdflow_runtime.nodes.ranked_node import NodeConfig, RankedNode
from pdflow_runtime.nodes.ranks import LayoutBook
from pdflow_runtime.observe.transfer_samples import TransferSamples
from pdflow_runtime.transports.base import MakeTransport
from pdflow_runtime.vllm.instance import Instance
from pdflow_runtime.vllm.step_metadata import DownMessage, Offer, decoded
from pdflow_runtime.vllm.worker.outbox import Outbox

MOST_UNREPORTED: Final = 10_000
"""The most events that wait for a step. Peers' frames wait when there are more."""
PARKED_NS: Final = 1 * S
"""The time without a step after which EngineCore is taken to be parked, if it had nothing open at its last one."""


class RankNode(RankedNode):
    """One rank of an instance. Args: `rank`, its number; `memory`, vLLM's tensors; `transport` makes the rank's."""

    def __init__(
        self, instance: Instance, rank: int, incarnation: int, memory: AdoptedMemory, transport: MakeTransport
    ) -> None:
        info, protocol = instance.info, instance.protocol
        config = NodeConfig(
            info=info,
            incarnation=incarnation,
            shape=protocol.shape,
            num_blocks=memory.memory.num_blocks,
            layouts=LayoutBook(protocol.shape, protocol.initiator, protocol.rule),
            weights=0,
            adopted=memory,
        )
        self.address: Final = rank_address(info.engine, rank)
        super().__init__(self.address, config, transport)
        self.outbox: Final = Outbox()
        self._samples: TransferSamples | None = None
        self._newest = 0
        self._stepped_ns = now_ns()
        self.stepping = False
        """A step of vLLM's is under way in this worker. Written by vLLM's thread."""
        self._open = False
        """The scheduler's endpoint had something open at the last step."""
        self._retrying: Final[dict[EngineId, list[Any]]] = {}
        """Events that concern an engine whose new address is being tried."""
        geometry = protocol.geometry()
        make = producer_rank if instance.role == "prefill" else consumer_rank
        self.rank: Final = self.add_rank(info, rank, make(protocol, geometry, info, incarnation, rank))
        if protocol.in_pieces:
            self.rank.transfers.adopt(LaneRules(in_layers=instance.options.progressive, as_offered=True))
        self._idle: Final[ProducerScheduler | None] = (
            producer_scheduler(protocol, info, incarnation) if instance.role == "prefill" else None
        )
        """A scheduler's endpoint without prompts, which is what a parked EngineCore has."""
        self._port: Final = self.ports[self.address]
        self.do.update(
            {
                SendLocal: self._report,
                PostWrite: lambda _, effect: self.rank.write(effect),
                StopWrite: lambda _, effect: self.rank.transfers.stop(effect.op),
                BumpWord: lambda _, effect: self.rank.bump(effect.lease_word),
                PostRead: lambda _, effect: self.rank.read(effect),
                ReadWord: lambda _, effect: self.rank.read_word(effect),
            }
        )

    def sampled_by(self, samples: TransferSamples) -> None:
        """Measure from now on transfers and failed handshakes."""
        self._samples = samples
        self.rank.measured_by(samples)

    def put(self, port: Port, event: Any) -> None:
        if self._samples is not None and type(event) is HandshakeEnded and not event.ok:
            self._samples.unreached()
        super().put(port, event)

    def newest_generation(self) -> int:
        return self._newest

    def is_drained(self) -> bool:
        return not self._port.endpoint.unfinished() if self._port.endpoint is not None else True

    async def offer(self, port: Port, event: Any) -> None:
        """Queue a peer's frame; wait while the scheduler has not taken what was reported before."""
        while len(self.outbox) >= MOST_UNREPORTED:
            await trio.sleep(0.01)
        await super().offer(port, event)

    def begin_all(self, nursery: trio.Nursery) -> None:
        if self._idle is not None:
            nursery.start_soon(self._answer_while_parked)

    # From the scheduler, with a step.

    def receive(self, message: DownMessage | None) -> None:
        """Take what the scheduler has sent with a step; None if it has nothing to send and nothing open."""
        self._stepped_ns = now_ns()
        self._open = message is not None and message.open
        if message is None:
            return
        self._learn_addresses(message.addresses)
        for xid in message.withdrawn:
            self.rank.transfers.withdraw(xid)
        for event in message.events:
            if event.to == self.address:
                self._order(decoded(event))

    def _learn_addresses(self, addresses: Iterable[tuple[Address, str, int]]) -> None:
        """Note where other ranks listen. One that could not be reached where it was before is tried there first, and
        what is ordered of its engine meanwhile waits for that."""
        retries: dict[EngineId, list[tuple[Address, str, int]]] = {}
        for name, host, port in addresses:
            engine = engine_of(name)
            if engine not in self._retrying and self.links.needs_retry(name, (host, port)):
                retries.setdefault(engine, []).append((name, host, port))
            else:
                self.links.note_address(name, (host, port))
        for engine, ranks in retries.items():
            self._retrying[engine] = []
            self.nursery.start_soon(self._retry, engine, ranks)

    async def _retry(self, engine: EngineId, ranks: Iterable[tuple[Address, str, int]]) -> None:
        async with trio.open_nursery() as nursery:
            for name, host, port in ranks:
                nursery.start_soon(self.links.update_address, name, host, port)
        for event in self._retrying.pop(engine):
            self._order(event)

    def _order(self, event: Any) -> None:
        engine = _engine_concerned(event)
        if engine is not None and engine in self._retrying:
            self._retrying[engine].append(event)
            return
        if type(event) is FrameOrdered and type(event.message) is Register:
            self._newest = max(self._newest, event.message.target.generation)
        elif type(event) is ReadOrdered:
            self._newest = max(self._newest, event.registration.target.generation)
        elif type(event) is SourceReady and event.source.lease_word is not None:
            self.rank.expose(event.source.lease_word)
        self.put(self._port, event)

    def offer_when_computed(self, offers: Sequence[Offer], wait: Callable[[], None] | None) -> None:
        """Offer pieces of prompts to their WRITEs, when `wait` has returned, if it is given."""
        if wait is None:
            self._offer_now(offers)
        else:
            self.nursery.start_soon(self._offer_after, offers, wait)

    async def _offer_after(self, offers: Sequence[Offer], wait: Callable[[], None]) -> None:
        await trio.to_thread.run_sync(wait)
        self._offer_now(offers)

    def _offer_now(self, offers: Sequence[Offer]) -> None:
        for xid, layer, start, stop in offers:
            self.rank.transfers.offer(xid, Piece(layer, start, stop))

    # To the scheduler.

    def _report(self, _: Port, effect: SendLocal) -> None:
        self.outbox.put(effect.to, effect.event)

    async def _answer_while_parked(self) -> None:
        """Answer what this rank asks of its scheduler while EngineCore is parked, which nothing but a request wakes:
        as a scheduler's endpoint does that knows no prompt."""
        assert self._idle is not None
        while True:
            await trio.sleep(PARKED_NS / S / 2)
            if self.stepping:
                self._stepped_ns = now_ns()
            if self._open or now_ns() - self._stepped_ns < PARKED_NS:
                continue
            for event in self.outbox.take_missing():
                for effect in self._idle.handle(event, now_ns()):
                    assert isinstance(effect, SendLocal)
                    self.put(self._port, effect.event)


def _engine_concerned(event: Any) -> EngineId | None:
    """Return the other engine that a scheduler's order is about; None if it is about no single one."""
    peers: tuple[Address, ...] = ()
    if type(event) is FrameOrdered:
        peers = event.to
    elif type(event) is ReadOrdered:
        peers = event.sources
    return engine_of(peers[0]) if peers else None
