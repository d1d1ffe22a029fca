"""The endpoint of P's scheduler: which prompts are being prefilled, which ranks still hold one, and when it is free.

Ranks own leases and WRITEs; the scheduler owns the blocks. It frees them when every rank has released its shard,
counted by rank, never by report (R49), and exactly once. Source: spec 1.1.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import assert_never

import msgspec
from msgspec import UNSET

from pdflow.protocol.dialect import Dialect
from pdflow.protocol.effects import NOTHING, AnswerPrefill, Effects, Note, ReleaseBlocks, SendLocal
from pdflow.protocol.errors import LocalProtocolError
from pdflow.protocol.events import (
    PrefillAborted,
    PrefillBegun,
    PrefillEnded,
    PrefillFinished,
    PrefillMissing,
    PrefillQueued,
    ProducerSchedulerEvent,
    ShardReleased,
    Source,
    SourceCompleted,
    SourceReady,
    SourceWithdrawn,
)
from pdflow.protocol.ids import EngineInfo, KvParams, LeaseWord, rank_address
from pdflow.protocol.messages import Code
from pdflow.protocol.timers import Timer
from pdflow.protocol.values import Allocation, Instant, RequestId, Value, Xid


class PromptRecord(Value, frozen=True, gc=False):
    """A prompt at the scheduler: queued while `allocation` is None, else held by the ranks in `holders`.

    A prompt whose KV is sent while it is computed stays until it is complete or aborted, though all ranks may have
    released it before.
    """

    request_id: RequestId
    allocation: Allocation | None = None
    complete: bool = False
    """False while the prompt is still being computed."""
    holders: int = 0
    code: Code = Code.NONE
    """The worst code that a rank reported: NONE, for sent, only if every rank sent (S7)."""


class ProducerScheduler:
    timed = False
    """Whether this kind of endpoint has deadlines at all: a driver need not ask the others for `wake_at`."""

    __slots__ = ("begun_words", "dialect", "engine", "incarnation", "leases_words", "minted_words", "products", "ranks")

    def __init__(self, engine: EngineInfo, incarnation: int, dialect: Dialect, pulls: bool = True) -> None:
        self.engine = engine
        self.leases_words = pulls and dialect.lease_words
        """Whether prompts get lease words: only a P that is read from must prove that it had not released the
        prompt."""
        self.incarnation = incarnation
        self.dialect = dialect
        self.ranks = tuple(rank_address(engine.engine, rank) for rank in range(engine.shards.ranks))
        self.products: dict[Xid, PromptRecord] = {}
        self.minted_words = 0
        self.begun_words: dict[Xid, tuple[LeaseWord, ...]] = {}
        """The lease words of prompts that have begun and not finished: ranks expose them before P's answer names them
        to a D."""

    def handle(self, event: ProducerSchedulerEvent, now: Instant) -> Effects:
        """Handle one event and return its effects. The kinds that every prompt brings are tested first; `isinstance`
        would cost four times as much."""
        if type(event) is PrefillQueued:
            return self._queued(event, now)
        if type(event) is PrefillFinished:
            return self._finished(event, now)
        if type(event) is ShardReleased:
            return self._shard_released(event, now)
        if type(event) is PrefillBegun:
            return self._begun(event, now)
        if type(event) is PrefillMissing:
            return self._missing(event, now)
        if type(event) is PrefillAborted:
            return self._aborted(event, now)
        if type(event) is SourceWithdrawn:
            return self._withdrawn(event, now)
        assert_never(event)

    def wake_at(self) -> Instant | None:
        return None

    def armed(self) -> tuple[Timer, ...]:
        return ()

    def unfinished(self) -> Mapping[Xid, PromptRecord]:
        """Every prompt that a rank may still send. To be read only."""
        return self.products

    def fork(self) -> ProducerScheduler:
        other = ProducerScheduler(self.engine, self.incarnation, self.dialect, self.leases_words)
        other.minted_words = self.minted_words
        other.products = self.products.copy()
        other.begun_words = self.begun_words.copy()
        return other

    def fingerprint(self) -> Hashable:
        begun = (tuple(sorted(self.begun_words.items())),) if self.begun_words else ()
        return (self.minted_words, tuple(sorted(self.products.items())), *begun)

    def _queued(self, event: PrefillQueued, now: Instant) -> Effects:
        if event.xid in self.products:
            raise LocalProtocolError(
                f"prefill of {event.xid!r} is queued already; every attempt needs an xid of its own"
            )
        self.products[event.xid] = PromptRecord(event.request_id)
        return NOTHING

    def _begun(self, event: PrefillBegun, now: Instant) -> Effects:
        product = self.products.get(event.xid)
        if product is None or product.allocation is not None:
            raise LocalProtocolError(f"prefill of {event.xid!r} has begun, but it is not queued")
        self.products[event.xid] = msgspec.structs.replace(
            product, allocation=event.allocation, holders=(1 << len(self.ranks)) - 1
        )
        rank_words = self._mint_words()
        if rank_words:
            self.begun_words[event.xid] = rank_words
        local_events = []
        for number, rank in enumerate(self.ranks):
            lease_word = rank_words[number] if rank_words else None
            source = Source(event.allocation, event.num_tokens, event.digest, event.weights, lease_word, False)
            local_events.append(SendLocal(rank, SourceReady(event.xid, product.request_id, source)))
        return tuple(local_events)

    def _finished(self, event: PrefillFinished, now: Instant) -> Effects:
        xid, allocation, num_tokens = event.xid, event.allocation, event.num_tokens
        digest, weights = event.digest, event.weights
        product = self.products.get(xid)
        if product is None or product.complete:
            raise LocalProtocolError(f"prefill of {xid!r} finished, but it is not being prefilled")
        request_id = product.request_id
        rank_words = self.begun_words.pop(xid, ())
        local_events = []
        if product.allocation is None:
            rank_words = self._mint_words()
            self.products[xid] = msgspec.structs.replace(
                product, allocation=allocation, complete=True, holders=(1 << len(self.ranks)) - 1
            )
            for number, rank in enumerate(self.ranks):
                lease_word = rank_words[number] if rank_words else None
                source = Source(allocation, num_tokens, digest, weights, lease_word)
                local_events.append(SendLocal(rank, SourceReady(xid, request_id, source)))
        elif product.holders:
            self.products[xid] = msgspec.structs.replace(product, complete=True)
            local_events = [SendLocal(rank, SourceCompleted(xid)) for rank in self.ranks]
        else:
            del self.products[xid]
        blocks, groups = allocation.blocks, allocation.groups or UNSET
        incarnation = self.incarnation if self.dialect.control_frames else UNSET
        params = KvParams(
            self.engine, xid, request_id, num_tokens, blocks, rank_words, digest, weights, groups, incarnation
        )
        return (*local_events, AnswerPrefill(request_id, params))

    def _mint_words(self) -> tuple[LeaseWord, ...]:
        """Return a fresh lease word for each rank; none where prompts get none."""
        return tuple([self._mint_word() for _ in self.ranks]) if self.leases_words else ()

    def _mint_word(self) -> LeaseWord:
        """Return a fresh 64-bit lease word: a restarted P at the same address must not repeat one (spec 2.3)."""
        self.minted_words += 1
        mixed = (self.incarnation + self.minted_words * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        return LeaseWord(self.minted_words, mixed ^ mixed >> 31)

    def _aborted(self, event: PrefillAborted, now: Instant) -> Effects:
        product = self.products.get(event.xid)
        if product is None or product.complete:
            # The prompt was finished before its client went away: the lease decides, as in vLLM.
            return (Note("producer scheduler: abort of a finished prefill"),)
        self.begun_words.pop(event.xid, None)
        if product.holders:
            # What was sent of it may still be under way: the blocks come back when every rank has let go.
            self.products[event.xid] = msgspec.structs.replace(product, complete=True)
        else:
            del self.products[event.xid]
        return tuple(SendLocal(rank, PrefillEnded(event.xid, event.code)) for rank in self.ranks)

    def _withdrawn(self, event: SourceWithdrawn, now: Instant) -> Effects:
        product = self.products.get(event.xid)
        if product is None or not product.holders:
            return (Note("producer scheduler: nothing to withdraw"),)
        return tuple(SendLocal(rank, event) for rank in self.ranks)

    def _shard_released(self, event: ShardReleased, now: Instant) -> Effects:
        product = self.products.get(event.xid)
        bit = 1 << event.rank
        if product is None or product.allocation is None or not product.holders & bit:
            return (Note("producer scheduler: shard released twice"),)
        code = product.code if event.code is Code.NONE else event.code
        if product.holders != bit:
            self.products[event.xid] = msgspec.structs.replace(product, holders=product.holders ^ bit, code=code)
            return NOTHING
        if product.complete:
            del self.products[event.xid]
        else:
            self.products[event.xid] = msgspec.structs.replace(product, holders=0, code=code)
        return (ReleaseBlocks(event.xid, product.allocation, code),)

    def _missing(self, event: PrefillMissing, now: Instant) -> Effects:
        """Tell a rank whose registration waits for a prompt that the prompt will not come, unless it is queued or the
        rank holds it. A rank that has released its shard will not get it again, though other ranks may hold theirs."""
        product = self.products.get(event.xid)
        if product is not None and (product.allocation is None or product.holders >> event.rank & 1):
            return NOTHING
        return (SendLocal(self.ranks[event.rank], PrefillEnded(event.xid, Code.NO_REQUEST)),)
