"""The memory of one rank and the ways by which bytes get there and from there: between the endpoints' effects and a
transport.

It turns "write this source's tokens into that grant" into descriptors, numbers operations, and puts what has become of
them back as events. Which bytes may go is the protocol's; how they go is the transport's.

A rank's region holds its KV and behind it the lease words: 8 bytes a slot, slots used in turn. Two leases that are open
at once share none, as each holds at least one KV block and there are more slots than blocks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from pdflow.layout.descriptors import Descriptor, RankMemory, descriptors, rank_memory
from pdflow.layout.pairing import runs
from pdflow.layout.ranks import Initiator, Pair, Rule, writers
from pdflow.layout.shapes import KvShape, LayoutError
from pdflow.protocol.effects import PostRead, PostWrite, ReadWord
from pdflow.protocol.events import FenceEnded, FlushEnded, ReadEnded, Received, WordRead, WriteEnded, WriteStopped
from pdflow.protocol.ids import EngineInfo, LeaseWord, Op, Shards, rank_address
from pdflow.protocol.messages import Done, Register
from pdflow.protocol.values import Address, Instant
from pdflow.protocol.wire.malformed import Malformed
from pdflow.protocol.wire.strict import decode_done, encode_frame
from runtime.clock import now_ns
from runtime.transports.base import (
    Ended,
    Fenced,
    Flushed,
    Noticed,
    PeerGone,
    Stopped,
    Tell,
    Transport,
    TransportEvent,
    WordArrived,
)

if TYPE_CHECKING:
    from runtime.diary import Diary
    from runtime.meter import TransferMeter

log = logging.getLogger(__name__)

WORD_BYTES: Final = 8


class About(msgspec.Struct, frozen=True, array_like=True):
    """What a peer must know of a rank's memory: its layout, and how the transport reaches it."""

    memory: RankMemory
    shards: Shards
    words_at: int
    transport: str
    reach: bytes


_about: Final = msgspec.msgpack.Decoder(About)


class LayoutBook:
    """Pairs of ranks by the two parallelisms, each worked out once."""

    def __init__(self, shape: KvShape, initiator: Initiator, rule: Rule) -> None:
        self._shape, self._initiator, self._rule = shape, initiator, rule
        self._pairs: dict[tuple[int, int, int], dict[tuple[int, int], Pair]] = {}

    def pair(self, p: Shards, d: Shards, p_rank: int, d_rank: int) -> Pair:
        """The slice that goes between two ranks. LayoutError if nothing does."""
        key = (p.tp, p.pp, d.tp)
        pairs = self._pairs.get(key)
        if pairs is None:
            found = writers(self._shape, p.tp, p.pp, d.tp, initiator=self._initiator, rule=self._rule)
            pairs = self._pairs[key] = {(pair.p_rank, pair.d_rank): pair for pair in found}
        pair = pairs.get((p_rank, d_rank))
        if pair is None:
            raise LayoutError(f"prefill rank {p_rank} and decode rank {d_rank} exchange nothing")
        return pair


class Posted(NamedTuple):
    """An operation under way."""

    op: Op
    over: Callable[[Any], Any]
    """Makes the event that its end is."""
    begun_ns: Instant
    writes: bool
    posted_ns: Instant = 0
    nbytes: int = 0
    descriptors: int = 0


class Rank:
    """Args: shape of the KV at this engine's block size; `transport` makes one that tells its events to what it is
    given; `put` hands an event to this rank's endpoint; `incarnation_of` says in which life a peer speaks now."""

    def __init__(
        self,
        engine: EngineInfo,
        rank: int,
        shape: KvShape,
        num_blocks: int,
        layouts: LayoutBook,
        transport: Callable[[Address, Tell], Transport],
        put: Callable[[Any], None],
        incarnation_of: Callable[[Address], int | None],
    ) -> None:
        shards = engine.shards
        self.address: Final = rank_address(engine.engine, rank)
        self.shards: Final = shards
        self.memory: Final = rank_memory(shape, num_blocks, shards.tp, shards.pp, rank // shards.tp)
        planes = self.memory.num_layers * self.memory.tensors_per_layer
        self.kv_bytes: Final = planes * num_blocks * self.memory.plane_bytes
        self.words_at: Final = -(-self.kv_bytes // WORD_BYTES) * WORD_BYTES
        self.slots: Final = num_blocks + 1
        self.transport: Final = transport(self.address, self.heard)
        self.view: Final = self.transport.allocate(self.words_at + self.slots * WORD_BYTES)
        self.peers: dict[Address, About] = {}
        self._layouts = layouts
        self._put = put
        self._incarnation_of = incarnation_of
        self._open: dict[int, Posted] = {}
        """What is under way, by the number that the transport knows."""
        self._last = 0
        self.bytes_posted = 0
        self.lanes: int | None = None
        """How many WRITEs may be under way at once; None for any number. Who comes later waits in turn."""
        self.meter: TransferMeter | None = None
        self.diary: Diary | None = None
        self._writing = 0
        self._held: deque[PostWrite] = deque()

    def about(self) -> bytes:
        """For a peer's `meet`."""
        about = About(self.memory, self.shards, self.words_at, self.transport.name, self.transport.describe())
        return msgspec.msgpack.encode(about)

    async def meet(self, peer: Address, about: bytes) -> None:
        """Reach a peer's memory. Raises ValueError if that is not described, or not to be reached by what is here."""
        try:
            known = _about.decode(about)
        except msgspec.MsgspecError as cause:
            raise ValueError(f"{peer} does not say how its memory is reached: {cause}") from None
        if known.transport != self.transport.name:
            raise ValueError(f"{peer} moves KV over {known.transport}, {self.address} over {self.transport.name}")
        await self.transport.connect(peer, known.reach)
        self.peers[peer] = known

    # The endpoint's effects. None waits.

    def write(self, effect: PostWrite) -> None:
        if self.lanes is not None and self._writing >= self.lanes:
            self._held.append(effect)
        else:
            self._write(effect)

    def _write(self, effect: PostWrite) -> None:
        grant = effect.grant
        over = partial(WriteEnded, effect.op)
        try:
            pieces = self._pieces(effect.op, self.address, effect.to, effect.source.blocks, grant)
        except (KeyError, LayoutError) as error:
            log.warning("%s: a WRITE to %s cannot be posted: %s", self.address, effect.to, error)
            self._put(over(False))
            return
        assert isinstance(effect.notice, Done), "only strict is spoken here"
        self._writing += 1
        number = self._number(effect.op, over, True)
        self.transport.write(number, effect.to, pieces, grant.target.generation, encode_frame(effect.notice))
        self._posted(number, effect.nbytes, len(pieces))

    def read(self, effect: PostRead) -> None:
        over = partial(ReadEnded, effect.op)
        try:
            pieces = self._pieces(effect.op, effect.source, self.address, effect.blocks, effect.grant)
        except (KeyError, LayoutError) as error:
            log.warning("%s: a READ of %s cannot be posted: %s", self.address, effect.source, error)
            self._put(over(False))
            return
        number = self._number(effect.op, over)
        self.transport.read(number, effect.source, pieces)
        self._posted(number, effect.nbytes, len(pieces))

    def read_word(self, effect: ReadWord) -> None:
        about = self.peers.get(effect.source)
        if about is None:
            self._put(WordRead(effect.op, None))
            return
        at = about.words_at + effect.index % (about.memory.num_blocks + 1) * WORD_BYTES
        self.transport.read_word(self._number(effect.op, partial(WordRead, effect.op)), effect.source, at)

    def stop(self, op: Op) -> None:
        for number, posted in self._open.items():
            if posted.op == op:
                self.transport.stop(number)
        for effect in [held for held in self._held if held.op == op]:
            self._held.remove(effect)
            self._put(WriteStopped(op))

    def fence(self, peer: Address, newest_generation: int) -> None:
        """Nothing that was to be written there is written any more, nor anything from there into what was granted."""
        for effect in [held for held in self._held if held.to == peer]:
            self._held.remove(effect)
            self._put(WriteEnded(effect.op, False))
        self.transport.fence(peer, newest_generation)

    def expose(self, word: LeaseWord) -> None:
        """Readers find this word from now on."""
        at = self._slot(word)
        self.view[at : at + WORD_BYTES] = word.word.to_bytes(WORD_BYTES, "little")

    def bump(self, word: LeaseWord) -> None:
        """Whoever reads it from now on learns that it is over; unless another lease has the slot by now."""
        at = self._slot(word)
        if self.view[at : at + WORD_BYTES] == word.word.to_bytes(WORD_BYTES, "little"):
            self.view[at : at + WORD_BYTES] = bytes(WORD_BYTES)

    # What the transport tells.

    def heard(self, event: TransportEvent) -> None:
        match event:
            case Ended(number, ok):
                if number in self._open:
                    self._ended(self._open[number], ok)
                self._over(number, ok)
            case WordArrived(number, word):
                self._over(number, word)
            case Stopped(number):
                posted = self._open.pop(number)
                self._put(WriteStopped(posted.op))
                self._next(posted)
            case Noticed(peer, notice):
                self._noticed(peer, notice)
            case Fenced(peer):
                self.peers.pop(peer, None)
                self._put(FenceEnded(peer))
            case Flushed(peer, ok):
                self._put(FlushEnded(peer, ok))
            case PeerGone(peer):
                self.peers.pop(peer, None)

    def _noticed(self, peer: Address, notice: bytes) -> None:
        """DONE, behind its data."""
        done = decode_done(notice)
        incarnation = self._incarnation_of(peer)
        if isinstance(done, Malformed) or incarnation is None:
            why = done.reason if isinstance(done, Malformed) else "its stream is gone"
            log.warning("%s: a notification of %s is dropped: %s", self.address, peer, why)
            if self.meter is not None:
                self.meter.unread()
            return
        self._put(Received(peer, incarnation, done))

    def _over(self, number: int, result: Any) -> None:
        """It has ended; what nobody waits for was ended by a fence before."""
        known = self._open.pop(number, None)
        if known is not None:
            self._put(known.over(result))
            self._next(known)

    def _next(self, ended: Posted) -> None:
        """A WRITE's turn may have come."""
        if ended.writes:
            self._writing -= 1
            while self._held and (self.lanes is None or self._writing < self.lanes):
                self._write(self._held.popleft())

    def _posted(self, number: int, nbytes: int, descriptors: int) -> None:
        self.bytes_posted += nbytes
        posted = self._open.get(number)
        if posted is None:
            return
        now = now_ns()
        self._open[number] = posted._replace(posted_ns=now, nbytes=nbytes, descriptors=descriptors)
        if self.meter is not None:
            self.meter.posted(nbytes, descriptors, now - posted.begun_ns)
        if self.diary is not None:
            self.diary.passed(posted.op.reg.request_id, "xfer_post", now)

    def _ended(self, posted: Posted, ok: bool) -> None:
        if self.meter is not None:
            self.meter.ended(posted.begun_ns, ok)
        if self.diary is not None and ok:
            size = (posted.nbytes, posted.descriptors)
            self.diary.moved(posted.begun_ns, posted.posted_ns, posted.op.reg.request_id, *size)

    def _number(self, op: Op, over: Callable[[Any], Any], writes: bool = False) -> int:
        self._last += 1
        self._open[self._last] = Posted(op, over, now_ns(), writes)
        return self._last

    def _slot(self, word: LeaseWord) -> int:
        return self.words_at + word.index % self.slots * WORD_BYTES

    def _pieces(self, op: Op, p: Address, d: Address, source: Sequence[int], grant: Register) -> list[Descriptor]:
        """What to copy from where to where. KeyError if the other side has not said how it is reached."""
        ours = (self.memory, self.shards)
        p_memory, p_shards = ours if p == self.address else (self.peers[p].memory, self.peers[p].shards)
        d_memory, d_shards = ours if d == self.address else (self.peers[d].memory, self.peers[d].shards)
        pair = self._layouts.pair(p_shards, d_shards, op.p_rank, op.d_rank)
        of_tokens = runs(
            source, p_memory.block_size, grant.target.blocks, d_memory.block_size, grant.token_start, grant.num_tokens
        )
        return descriptors(pair, p_memory, d_memory, of_tokens, coalesce=True)
