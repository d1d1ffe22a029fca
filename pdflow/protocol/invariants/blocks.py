"""Checks of block ownership at P and at D, and of how every request ends.

Decides S6, and what the other invariants ask of an allocation: that it is made of free blocks, not freed or released
under an operation (S1, S2), and committed only when every pair has landed well (S3, S4, S5). What lands is seen in
`invariants.operations`.
"""

from __future__ import annotations

from typing import NoReturn

from pdflow.protocol.effects import (
    Commit,
    Effects,
    Enqueue,
    FreeBlocks,
    Outcome,
    Quarantine,
    ReleaseBlocks,
    Resolve,
    SendLocal,
)
from pdflow.protocol.events import (
    DecodeAborted,
    DecodeAdmitted,
    DecodeHit,
    DecodeQueued,
    Event,
    FrameOrdered,
    PrefillBegun,
    PrefillFinished,
    ReadOrdered,
    SourceReady,
)
from pdflow.protocol.geometry import Geometry
from pdflow.protocol.ids import Shards
from pdflow.protocol.invariants.shadow_state import WatchedPrompt, WatchedRequest
from pdflow.protocol.messages import Code, Register
from pdflow.protocol.values import Address, EngineId, RequestId, Xid


def is_cancelled_by(event: object) -> bool:
    """True if the client of a decode leg has cancelled it. That its prefill leg was cancelled is a failure like any
    other, which the router may retry."""
    return isinstance(event, DecodeAborted) and event.code is Code.CANCELLED


class BlockOracle:
    """The shadow state of prompts at P and requests at D, with the checks of their allocations."""

    __slots__ = ("_geometry", "_newest", "_owned", "_products", "_requests", "_sources", "_tables", "_targets")

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._requests: dict[tuple[EngineId, RequestId], WatchedRequest] = {}
        self._targets: dict[tuple[EngineId, int], WatchedRequest] = {}
        """Every D allocation that is neither freed nor committed, by generation."""
        self._owned: dict[EngineId, set[int]] = {}
        """The blocks of the allocations in `_targets`."""
        self._newest: dict[EngineId, int] = {}
        self._products: dict[tuple[EngineId, Xid], WatchedPrompt] = {}
        self._sources: dict[tuple[EngineId, int], WatchedPrompt] = {}
        self._tables: dict[tuple[Shards, Shards], dict[tuple[int, int], int]] = {}
        """The bit of each pair of ranks, for two shardings."""

    def _fail(self, name: str, what: str, subject: str) -> NoReturn:
        """Report that invariant `name` is broken for the request or prompt `subject`. The subclass has the trace."""
        raise NotImplementedError

    # D: requests and their blocks.

    def _queued(self, node: Address, event: DecodeQueued, effects: Effects) -> None:
        self._requests[node, event.request_id] = WatchedRequest(event)

    def _admitted(self, node: Address, event: DecodeAdmitted, effects: Effects) -> None:
        request = self._requests[node, event.request_id]
        allocation = event.allocation
        owned = self._owned.get(node)
        if owned is None:
            owned = self._owned[node] = set()
        if (node, allocation.generation) in self._targets or not owned.isdisjoint(allocation.blocks):
            self._fail("S1", f"{node} allocated blocks that a registration still holds", event.request_id)
        owned.update(allocation.blocks)
        if allocation.generation > self._newest.get(node, -1):
            self._newest[node] = allocation.generation
        request.admitted = event
        request.allocation = allocation
        self._targets[node, allocation.generation] = request
        registration = _registration_in(effects)
        if registration is None:
            return
        request.reg = registration.reg
        request.num_tokens = event.num_tokens
        request.shards = key = (request.queued.params.prefill.shards, registration.shards)
        pairs = self._tables.get(key)
        if pairs is None:
            pairs = {pair: 1 << i for i, pair in enumerate(self._geometry.pairs(*key))}
            self._tables[key] = pairs
        request.pairs = pairs
        request.expected = (1 << len(pairs)) - 1

    def _enqueued(self, node: Address, effect: Enqueue, event: Event) -> None:
        request = self._requests.get((node, effect.request_id))
        if request is None or request.enqueued or request.over:
            self._fail("S6", f"{node} enqueued a request that is not waiting for it", effect.request_id)
        request.enqueued = True

    def _resolved(self, node: Address, effect: Resolve, event: Event) -> None:
        request = self._requests.get((node, effect.request_id))
        if request is None or request.over:
            self._fail("S6", f"{node} resolved a request that is over already", effect.request_id)
        if (effect.outcome is Outcome.CANCELLED) != is_cancelled_by(event):
            self._fail("S6", f"{node} resolved a request as {effect.outcome.name}, for {event}", effect.request_id)
        request.over = True
        if request.allocation is None:
            del self._requests[node, effect.request_id]

    def _committed(self, node: Address, effect: Commit, event: Event) -> None:
        request = self._requests.pop((node, effect.request_id), None)
        if request is None or request.over:
            self._fail("S6", f"{node} committed a request that is over already", effect.request_id)
        if type(event) is DecodeHit and request.allocation is None:
            return
        if request.landed != request.expected or not request.expected or request.allocation is None:
            missing = [pair for pair, bit in request.pairs.items() if not request.landed & bit]
            self._fail("S3", f"{node} committed, but of the pairs {missing} nothing has landed", effect.request_id)
        if request.landing:
            self._fail("S3", f"{node} committed under {request.landing} operations in flight", effect.request_id)
        if request.wrong is not None:
            self._fail(request.wrong[0], f"{node} committed: {request.wrong[1]}", effect.request_id)
        del self._targets[node, request.allocation.generation]
        self._owned[node].difference_update(request.allocation.blocks)

    def _quarantined(self, node: Address, effect: Quarantine, event: Event) -> None:
        request = self._targets.get((node, effect.allocation.generation))
        if request is None or not request.over:
            self._fail("S6", f"{node} quarantined blocks of no resolved request", str(effect.allocation.generation))

    def _freed(self, node: Address, effect: FreeBlocks, event: Event) -> None:
        allocation = effect.allocation
        request = self._targets.pop((node, allocation.generation), None)
        if request is None:
            self._fail("S6", f"{node} freed generation {allocation.generation}, which nothing holds", "FreeBlocks")
        request_id = request.queued.request_id
        if request.landing:
            self._fail("S1", f"{node} freed blocks into which {request.landing} operations may still land", request_id)
        if not request.over:
            self._fail("S6", f"{node} freed the blocks of a request that is not over", request_id)
        self._owned[node].difference_update(allocation.blocks)
        del self._requests[node, request_id]

    # P: products.

    def _begun(self, node: Address, event: PrefillBegun, effects: Effects) -> None:
        self._produced(node, event)

    def _prefilled(self, node: Address, event: PrefillFinished, effects: Effects) -> None:
        if effects and type(effects[0]) is SendLocal and type(effects[0].event) is SourceReady:
            self._produced(node, event)

    def _produced(self, node: Address, event: PrefillBegun | PrefillFinished) -> None:
        """Record a prompt that may be sent from here on: at `PrefillBegun`, if it is sent while it is computed."""
        key = (node, event.allocation.generation)
        if key in self._sources:
            self._fail("S2", f"{node} filled blocks of generation {key[1]}, which it still holds", event.xid)
        self._sources[key] = self._products[node, event.xid] = WatchedPrompt(event)

    def _released(self, node: Address, effect: ReleaseBlocks, event: Event) -> None:
        product = self._sources.pop((node, effect.allocation.generation), None)
        if product is None or product.xid != effect.xid:
            self._fail("S6", f"{node} released {effect.xid!r}, which it does not hold", effect.xid)
        if product.reading:
            self._fail("S2", f"{node} released {effect.xid!r} under {product.reading} WRITEs", effect.xid)
        product.released = True
        del self._products[node, effect.xid]


def _registration_in(effects: Effects) -> Register | None:
    """Return the registration that D's scheduler gives its ranks in these effects, or None."""
    for effect in effects:
        if type(effect) is SendLocal:
            report = effect.event
            if type(report) is ReadOrdered:
                return report.registration
            if type(report) is FrameOrdered and type(report.message) is Register:
                return report.message
    return None
