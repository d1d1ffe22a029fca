"""The memory of one rank and the transfers to and from it: the layer between the endpoints' effects and a transport.

It turns "write this source's tokens into that grant" into descriptors, and reports how operations have ended. Which
bytes may go is decided by the protocol; in what pieces, by `transfers.py`; how they go, by the transport.

Where the rank's memory lies is decided in `rank_memory.py`.

A lease word takes 8 bytes a slot, slots are used in turn. Two leases that are open at once share none, as each holds at
least one KV block, or a page of as much, and there are more slots than blocks. In a store leases share blocks: there it
is said how many slots there are, and a lease whose slot another one takes is over.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pdflow.layout.descriptors import Descriptor, RankMemory, descriptors, rank_memory
from pdflow.layout.groups import table_descriptors
from pdflow.layout.pairing import runs_within
from pdflow.layout.ranks import Initiator, Pair, Rule, of_layer, writers
from pdflow.layout.regions import lying
from pdflow.layout.shapes import KvShape, LayoutError, stage_layers
from pdflow.methods.shipment import Piece
from pdflow.protocol.effects import PostRead, PostWrite, ReadWord
from pdflow.protocol.events import FenceEnded, FlushEnded, Received, WordRead
from pdflow.protocol.ids import EngineInfo, LeaseWord, Op, Shards, rank_address
from pdflow.protocol.messages import Register
from pdflow.protocol.values import Address, Allocation, BlockTables, Xid
from pdflow.protocol.wire.malformed import Malformed
from pdflow_runtime.nodes.notifications import read_notification
from pdflow_runtime.nodes.rank_memory import (
    WORD_BYTES,
    AdoptedMemory,
    HeldMemory,
    KvLocation,
    StagingFactory,
    check_adopted,
    hold,
    hold_adopted,
    hold_jointly,
)
from pdflow_runtime.nodes.rank_metadata import RankMetadata, read_metadata
from pdflow_runtime.nodes.transfers import InFlightTransfers, TransferPlan
from pdflow_runtime.transports.base import (
    Ended,
    EventSink,
    Fenced,
    Flushed,
    NotificationArrived,
    PeerGone,
    Stopped,
    Transport,
    TransportEvent,
    WordArrived,
)

if TYPE_CHECKING:
    from pdflow_runtime.observe.transfer_samples import MeasuresTransfers

log = logging.getLogger(__name__)


class LayoutBook:
    """A cache of the slices that pairs of ranks exchange, by the two parallelisms."""

    def __init__(self, shape: KvShape, initiator: Initiator, rule: Rule) -> None:
        self._shape, self._initiator, self._rule = shape, initiator, rule
        self._pairs: dict[tuple[int, int, int], dict[tuple[int, int], Pair]] = {}

    def pair(self, p: Shards, d: Shards, p_rank: int, d_rank: int) -> Pair:
        """Return the slice that goes between two ranks. LayoutError if nothing does."""
        key = (p.tp, p.pp, d.tp)
        pairs = self._pairs.get(key)
        if pairs is None:
            found = writers(self._shape, p.tp, p.pp, d.tp, initiator=self._initiator, rule=self._rule)
            pairs = self._pairs[key] = {(pair.p_rank, pair.d_rank): pair for pair in found}
        pair = pairs.get((p_rank, d_rank))
        if pair is None:
            raise LayoutError(f"prefill rank {p_rank} and decode rank {d_rank} share no KV")
        return pair


class Rank:
    """A rank's memory with its transport. Args: `shape` of the KV at this engine's block size; `transport` makes one
    that reports its events to the sink it is given; `put` hands an event to this rank's endpoint; `incarnation` is the
    engine's; `staging_factory` makes the memory beside the blocks; `slots`, how many lease words there may be, unless
    blocks say so; `owner`, the rank of this process whose memory this one shares, if it has none of its own; `dtype`,
    of its KV, if that is known; `adopted`, the memory that its KV lies in; `location`, where else it is allocated."""

    def __init__(
        self,
        engine: EngineInfo,
        rank: int,
        shape: KvShape,
        num_blocks: int,
        layouts: LayoutBook,
        transport: Callable[[Address, EventSink], Transport],
        put: Callable[[Any], None],
        incarnation: int,
        staging_factory: StagingFactory | None = None,
        slots: int | None = None,
        owner: Rank | None = None,
        dtype: str = "",
        adopted: AdoptedMemory | None = None,
        location: KvLocation = "region",
    ) -> None:
        shards = engine.shards
        self.address: Final = rank_address(engine.engine, rank)
        memory = rank_memory(shape, num_blocks, shards.tp, shards.pp, rank // shards.tp)
        if adopted is not None:
            check_adopted(adopted.memory, memory, staging_factory)
        self.memory: Final = memory if adopted is None else adopted.memory
        self.layers: Final = stage_layers(shape.num_layers, shards.pp)[rank // shards.tp]
        """The number of the model's layers that it keeps."""
        planes = self.memory.num_layers * self.memory.tensors_per_layer
        self.kv_bytes: Final = planes * num_blocks * self.memory.plane_bytes
        self.slots: Final = num_blocks + 1 if slots is None else slots
        self.transport: Final = transport(self.address, self.on_transport_event)
        self.held: Final = self._hold(owner, adopted, location, staging_factory)
        self.words_at: Final = self.held.words_at
        self.kv_region: Final = self.held.kv_region
        self._words: Final = self.held.words
        self._metadata: Final = RankMetadata(
            self.memory,
            shards,
            self.words_at,
            self.slots,
            self.transport.name,
            b"",
            self.kv_region,
            dtype,
            interior="" if adopted is None else adopted.interior,
            interior_digest=b"" if adopted is None else adopted.interior_digest,
        )
        self.peers: dict[Address, RankMetadata] = {}
        self.staged: dict[Xid, Allocation] = {}
        """Prompts that are sent from beside the blocks, and where they lie."""
        self.meter: MeasuresTransfers | None = None
        self.lost: Callable[[Address], None] = lambda peer: None
        """Called with a peer whose memory cannot be reached any more."""
        self._layouts = layouts
        self._put = put
        self._numbers = count(1)
        self._flushes: dict[Address, deque[Callable[[bool], None]]] = {}
        """Callbacks of the flushes of each peer, in order, called with how each ended."""
        self._void: dict[Address, int] = {}
        """By peer: the `void_generation` of its RankMetadata. Empty where the transport refuses old generations
        itself."""
        self._word_reads: dict[int, Op] = {}
        """Words that are being read, by the number that the transport knows."""
        self.transfers: Final = InFlightTransfers(
            self.transport, self._numbers, self._plan, put, incarnation, self._flush
        )

    def _hold(
        self, owner: Rank | None, adopted: AdoptedMemory | None, location: KvLocation, staging: StagingFactory | None
    ) -> HeldMemory:
        if owner is not None:
            return hold_jointly(owner.held, self.transport, owner.transport)
        if adopted is not None:
            return hold_adopted(adopted, self.transport, self.slots)
        return hold(location, self.transport, self.memory, self.kv_bytes, self.slots, staging)

    @property
    def view(self) -> memoryview:
        """Its region. ValueError where that is adopted: only its owner reads and writes it."""
        if self.held.view is None:
            raise ValueError(f"{self.address} has adopted its memory: only the memory's owner reads and writes it")
        return self.held.view

    def measured_by(self, meter: MeasuresTransfers) -> None:
        self.meter = self.transfers.meter = meter

    def metadata_for(self, peer: Address) -> bytes:
        """Return the metadata for this peer's `connect`."""
        return msgspec.msgpack.encode(
            msgspec.structs.replace(
                self._metadata, reach=self.transport.describe(), void_generation=self._void.get(peer, -1)
            )
        )

    async def connect(self, peer: Address, metadata: bytes) -> None:
        """Connect to a peer's memory. ValueError if the metadata does not describe one that can be used
        from here."""
        known = read_metadata(peer, metadata, self.address, self._metadata)
        await self.transport.connect(peer, known.reach)
        self.peers[peer] = known

    # The endpoint's effects. None waits.

    def write(self, effect: PostWrite) -> None:
        self.transfers.write(effect, self.address)

    def read(self, effect: PostRead) -> None:
        self.transfers.read(effect, self.address)

    def read_word(self, effect: ReadWord) -> None:
        metadata = self.peers.get(effect.source)
        if metadata is None:
            self._put(WordRead(effect.op, None))
            return
        at = metadata.words_at + effect.index % metadata.slots * WORD_BYTES
        number = next(self._numbers)
        self._word_reads[number] = effect.op
        self.transport.read_word(number, effect.source, at)

    def fence(self, peer: Address, newest_generation: int) -> None:
        """Fence a peer: nothing that was to be written there is written any more, nor anything from there into what was
        granted."""
        self.transfers.disconnect(peer)
        if self.transport.fences == "close":
            self._void[peer] = max(newest_generation, self._void.get(peer, -1))
        self.transport.fence(peer, newest_generation)

    def flush(self, peer: Address) -> None:
        """Report FlushEnded once what was posted there has landed or may not have."""
        self._flush(peer, lambda ok: self._put(FlushEnded(peer, ok)))

    def _flush(self, peer: Address, then: Callable[[bool], None]) -> None:
        """Flush a peer. The transport may report the end from within its call."""
        self._flushes.setdefault(peer, deque()).append(then)
        self.transport.flush(peer)

    def expose(self, lease_word: LeaseWord) -> None:
        """Write a lease word where readers find it from now on."""
        at = self._slot(lease_word)
        self._words[at : at + WORD_BYTES] = lease_word.value.to_bytes(WORD_BYTES, "little")

    def bump(self, lease_word: LeaseWord) -> None:
        """Clear a lease word, so that its readers learn that the lease is over; unless another lease has the slot by
        now."""
        at = self._slot(lease_word)
        if self._words[at : at + WORD_BYTES] == lease_word.value.to_bytes(WORD_BYTES, "little"):
            self._words[at : at + WORD_BYTES] = bytes(WORD_BYTES)

    # Between its blocks and what is beside them.

    def copy_out(self, blocks: Sequence[int], staged: Allocation, tokens: int, piece: Piece) -> None:
        """Copy a piece of a prompt of so many tokens from the blocks to its place beside them."""
        there, extents = self._lying(staged, tokens)
        self._copy(self.memory, blocks, there, extents, piece)

    def copy_in(self, staged: Allocation, blocks: Sequence[int], tokens: int, piece: Piece) -> None:
        """Copy a piece of a prompt of so many tokens from its place beside the blocks into blocks."""
        there, extents = self._lying(staged, tokens)
        self._copy(there, extents, self.memory, blocks, piece)

    def _lying(self, staged: Allocation, tokens: int) -> tuple[RankMemory, Sequence[int]]:
        assert self.kv_region is not None
        return lying(self.kv_region, staged.blocks, tokens)

    def _copy(
        self,
        source: RankMemory,
        from_blocks: Sequence[int],
        target: RankMemory,
        to_blocks: Sequence[int],
        piece: Piece,
    ) -> None:
        size = self.memory.block_size
        of_tokens = runs_within(from_blocks, size, to_blocks, size, 0, piece.start, piece.stop)
        pair = Pair(0, 0, piece.layer, piece.layer, 1, 0, 0, self.memory.num_heads, 0)
        self.held.copy(descriptors(pair, source, target, of_tokens, coalesce=True))

    # What the transport tells.

    def on_transport_event(self, event: TransportEvent) -> None:
        match event:
            case Ended(number, ok):
                self.transfers.ended(number, ok)
            case WordArrived(number, value):
                self._put(WordRead(self._word_reads.pop(number), value))
            case Stopped(number):
                self.transfers.recalled(number)
            case NotificationArrived(peer, notification):
                self._notification_arrived(peer, notification)
            case Fenced(peer):
                self.peers.pop(peer, None)
                self._put(FenceEnded(peer))
            case Flushed(peer, ok):
                self._flushes[peer].popleft()(ok)
            case PeerGone(peer):
                self.peers.pop(peer, None)
                # What waits for pieces or lanes must not go on into whatever life of it is met next.
                self.transfers.disconnect(peer)
                self.lost(peer)

    def _notification_arrived(self, peer: Address, notification: bytes) -> None:
        """Pass a DONE on to the endpoint; it arrives behind its data."""
        decoded = read_notification(notification)
        if isinstance(decoded, Malformed):
            log.warning("%s: dropped a malformed notification from %s: %s", self.address, peer, decoded.reason)
            if self.meter is not None:
                self.meter.unread()
            return
        incarnation, done = decoded
        self._put(Received(peer, incarnation, done))

    def _slot(self, lease_word: LeaseWord) -> int:
        return lease_word.index % self.slots * WORD_BYTES

    # From where to where.

    def _plan(self, op: Op, p: Address, d: Address, tables: BlockTables, registration: Register) -> TransferPlan:
        """Plan a transfer; see `transfers.MakePlan`. What is sent from beside the blocks may have its place only when
        it is sent."""
        start, stop = registration.token_start, registration.token_start + registration.num_tokens
        p_metadata, d_metadata = self._known(p), self._known(d)
        if registration.target.generation <= d_metadata.void_generation:
            raise LayoutError(f"{d} has fenced {p} since it granted generation {registration.target.generation}")
        pair = self._layouts.pair(p_metadata.shards, d_metadata.shards, op.p_rank, op.d_rank)
        target, to = within(d_metadata, registration.target.tables, registration.num_tokens)
        placed = p == self.address and self.kv_region is not None

        def pieces(layer: int | None, first: int, last: int) -> list[Descriptor]:
            one = pair if layer is None else of_layer(pair, layer)
            source, at = within(p_metadata, self.staged[registration.xid].tables if placed else tables, stop)
            if source.order == "opaque":
                # Such blocks go whole: the first one again, if an earlier piece has ended in it.
                first -= (first - start) % source.block_size
            return table_descriptors(one, source, target, at, to, start, first, last)

        return TransferPlan(pair.num_layers, pieces)

    def _known(self, rank: Address) -> RankMetadata:
        return self._metadata if rank == self.address else self.peers[rank]


def within(metadata: RankMetadata, tables: BlockTables, tokens: int) -> tuple[RankMemory, BlockTables]:
    """Return where a prompt lies in a rank's memory: in the blocks of its tables, or, if the rank has memory beside its
    blocks, at the extents there, which stand in the only table."""
    if metadata.kv_region is None:
        return metadata.memory, tables
    memory, extents = lying(metadata.kv_region, tables[0], tokens)
    return memory, (extents,)
