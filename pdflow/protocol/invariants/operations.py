"""Checks of one-sided operations, and the record of which still read and which may still land: WRITEs, READs, flushes,
fences, and notifications.

Decides what a posted operation must satisfy (S1 to S4, S9), and when it has ended. An operation reads its source
until its handle is final and good, or its endpoint is fenced: an error proves nothing (R17, R19). It may land until its
notification has been received, its handle is final and good (after a flush where DONE is local), or either end has
fenced the other or proved its death.

A D rank's fence, or the proof that a P rank is dead, also bars what had been granted to that rank: a WRITE posted later
over such a grant is no breach by itself, for P may not know of the fence, but it must never land (S1). The transport
sees to that: it refuses an old grant, or connects that pair no more.
"""

from __future__ import annotations

from typing import TypeAlias

from pdflow.protocol.effects import Effects, Flush, PostRead, PostWrite
from pdflow.protocol.events import (
    DecodeQueued,
    Event,
    FenceEnded,
    FlushEnded,
    PeerExited,
    ReadEnded,
    Received,
    WriteEnded,
    WriteStopped,
)
from pdflow.protocol.geometry import Geometry
from pdflow.protocol.ids import EngineInfo, KvParams, Op, Reg, engine_of, rank_address, rank_of
from pdflow.protocol.invariants.blocks import BlockOracle
from pdflow.protocol.invariants.shadow_state import WatchedOperation, WatchedPrompt, WatchedRequest, mismatch
from pdflow.protocol.values import Address, RequestId

Link: TypeAlias = tuple[Address, Address]


class OperationOracle(BlockOracle):
    """The shadow state of every WRITE and READ between the allocations, with their checks."""

    __slots__ = ("_barred", "_bygone", "_done_is_remote", "_links", "_read_notifications", "_reads")

    def __init__(self, geometry: Geometry, done_is_remote: bool) -> None:
        super().__init__(geometry)
        self._done_is_remote = done_is_remote
        self._links: dict[Link, dict[Op, WatchedOperation]] = {}
        """WRITEs by (P rank, D rank)."""
        self._bygone: dict[tuple[Link, Op], WatchedOperation] = {}
        """WRITEs that P's fence has ended: their good end may be polled, and their notification received, after it."""
        self._barred: dict[Link, int] = {}
        """The newest generation that D had allocated when it fenced a link, by link."""
        self._reads: dict[tuple[Address, Op], WatchedOperation] = {}
        self._read_notifications: dict[tuple[Address, Address, RequestId], WatchedOperation] = {}
        """READs whose notification has not reached P, by (P rank, D rank, P's request id)."""

    # WRITEs.

    def _write_posted(self, node: Address, effect: PostWrite, event: Event) -> None:
        op, registration = effect.op, effect.registration
        reg = op.reg
        product = self._sources.get((engine_of(node), effect.source.generation))
        if product is None:
            self._fail("S2", f"{node} posted a WRITE from blocks that it has released", reg.request_id)
        if self._barred and registration.target.generation <= self._barred.get((node, effect.to), -1):
            self._post_barred(node, effect, product)
            return
        request = self._targets.get((reg.engine, registration.target.generation))
        if request is None or request.allocation != registration.target:
            self._fail("S1", f"{node} posted a WRITE into blocks that its request does not hold", reg.request_id)
        if request.reg != reg or request.queued.request_id != reg.request_id:
            self._fail("S1", f"{node} posted a WRITE into the blocks of another registration", reg.request_id)
        bit = request.pairs.get((op.p_rank, op.d_rank), 0)
        link = self._links.get((node, effect.to))
        if link is None:
            link = self._links[node, effect.to] = {}
        if not bit or op in link or request.landed & bit:
            self._fail("S3", f"{node} posted a WRITE that is not expected, or was posted before", reg.request_id)
        if type(event) is Received and engine_of(event.sender) != reg.engine:
            self._fail("S9", f"a frame of {event.sender} made {node} write to {reg.engine}", reg.request_id)
        self._same_content(product, request, op, effect.nbytes, node)
        link[op] = WatchedOperation(product, request, bit)
        product.reading += 1
        request.landing += 1

    def _post_barred(self, node: Address, effect: PostWrite, product: WatchedPrompt) -> None:
        params = KvParams(EngineInfo(engine_of(node), effect.registration.shards), product.xid, "", 0)
        nobody = WatchedRequest(DecodeQueued(effect.op.reg.request_id, params, 0, 0))
        nobody.barred = True
        nobody.landing = 1
        self._links.setdefault((node, effect.to), {})[effect.op] = WatchedOperation(product, nobody, 0)
        product.reading += 1

    def _same_content(
        self, product: WatchedPrompt, request: WatchedRequest, op: Op, nbytes: int, node: Address
    ) -> None:
        wrong = mismatch(product, request)
        if wrong is not None:
            self._fail("S4", f"{node} writes {wrong}", request.queued.request_id)
        p, d = request.shards
        expected = self._geometry.nbytes(op.p_rank, op.d_rank, p, d, request.num_tokens)
        if nbytes != expected:
            self._fail("S4", f"{node} writes {nbytes} bytes where {expected} belong", request.queued.request_id)

    def _write_ended(self, node: Address, event: WriteEnded, effects: Effects) -> None:
        op = event.op
        link = (node, rank_address(op.reg.engine, op.d_rank))
        operation = self._links.get(link, {}).get(op)
        if operation is None:
            self._landed_before_the_fence(link, op, event.ok and self._done_is_remote)
            return
        product = operation.product
        assert product is not None
        operation.handle_final = True
        if not event.ok:
            product.failed |= 1 << op.p_rank
            return
        if operation.request.barred:
            self._fail("S1", f"a WRITE of {node} landed through a fence", op.reg.request_id)
        product.sent |= 1 << op.p_rank
        if self._done_is_remote:
            operation.request.landed |= operation.bit
        self._settle(link, op, operation, reading=False, landing=operation.landing and not self._done_is_remote)

    def _write_stopped(self, node: Address, event: WriteStopped, effects: Effects) -> None:
        """Settle a stopped WRITE: it reads nothing more, and the pieces that were posted have landed, not all of
        them."""
        op = event.op
        link = (node, rank_address(op.reg.engine, op.d_rank))
        operation = self._links.get(link, {}).get(op)
        if operation is None:
            # A fence has settled it.
            return
        assert operation.product is not None
        operation.product.failed |= 1 << op.p_rank
        operation.handle_final = True
        self._settle(link, op, operation, reading=False, landing=not self._done_is_remote)

    def _flush_posted(self, node: Address, effect: Flush, event: Event) -> None:
        for operation in self._links.get((node, effect.peer), {}).values():
            operation.flushing = operation.flushing or operation.handle_final

    def _flushed(self, node: Address, event: FlushEnded, effects: Effects) -> None:
        link = (node, event.peer)
        for op, operation in list(self._links.get(link, {}).items()) if event.ok else ():
            if operation.flushing and not operation.reading:
                operation.request.landed |= operation.bit
                self._settle(link, op, operation, reading=False, landing=False)

    def _fenced(self, node: Address, event: FenceEnded | PeerExited, effects: Effects) -> None:
        """Settle the operations of a fenced link: nothing lands any more, whichever end fenced it. Only P's own fence
        stops the reading."""
        for op, operation in list(self._links.get((node, event.peer), {}).items()):
            ours = type(event) is FenceEnded
            if ours and operation.landing and not operation.request.barred:
                self._bygone[(node, event.peer), op] = operation
            self._settle((node, event.peer), op, operation, reading=operation.reading and not ours, landing=False)
        for op, operation in list(self._links.get((event.peer, node), {}).items()):
            self._settle((event.peer, node), op, operation, reading=operation.reading, landing=False)
        engine = engine_of(node)
        if engine not in self._newest:
            return
        self._barred[event.peer, node] = self._newest[engine]
        p_engine, p_rank = engine_of(event.peer), rank_of(event.peer)
        for reader, op in [key for key in self._reads if key[0] == node and key[1].p_rank == p_rank]:
            request = self._reads[reader, op].request
            if request.prefill == p_engine:
                request.landing -= 1
                del self._reads[reader, op]

    def _landed_before_the_fence(self, link: Link, op: Op, well: bool) -> None:
        """Count data that had landed before P's fence, though P or D polled it only after."""
        operation = self._bygone.get((link, op))
        if operation is not None and well:
            operation.request.landed |= operation.bit
            if operation.product is not None:
                operation.product.sent |= 1 << op.p_rank

    def _notification_arrived(self, node: Address, sender: Address, reg: Reg, generation: int | None) -> None:
        """Settle the WRITE whose notification arrived behind its data. One of no WRITE of this sender proves
        nothing."""
        link = (sender, node)
        operations = self._links.get(link)
        if operations is None:
            return
        op = Op(reg, rank_of(sender), rank_of(node))
        operation = operations.get(op)
        if operation is None:
            if self._bygone:
                self._landed_before_the_fence(link, op, True)
            return
        if operation.request.barred:
            self._fail("S1", f"a WRITE of {sender} landed through a fence", reg.request_id)
        allocation = operation.request.allocation
        if generation is None or (allocation is not None and allocation.generation == generation):
            operation.request.landed |= operation.bit
            self._settle(link, op, operation, reading=operation.reading, landing=False)

    def _settle(self, link: Link, op: Op, operation: WatchedOperation, reading: bool, landing: bool) -> None:
        if operation.reading and not reading:
            operation.reading = False
            if operation.product is not None:
                operation.product.reading -= 1
        if operation.landing and not landing:
            operation.landing = False
            operation.request.landing -= 1
        if not operation.reading and not operation.landing:
            del self._links[link][op]

    # READs.

    def _read_posted(self, node: Address, effect: PostRead, event: Event) -> None:
        op = effect.op
        request = self._targets.get((op.reg.engine, effect.registration.target.generation))
        if request is None or request.reg != op.reg or engine_of(node) != op.reg.engine:
            self._fail("S1", f"{node} posted a READ into blocks that its request does not hold", op.reg.request_id)
        bit = request.pairs.get((op.p_rank, op.d_rank), 0)
        if not bit or (node, op) in self._reads or request.landed & bit:
            self._fail("S3", f"{node} posted a READ that is not expected, or was posted before", op.reg.request_id)
        product = self._products.get((engine_of(effect.source), effect.registration.xid))
        if product is not None:
            wrong = mismatch(product, request)
            if wrong is not None:
                request.wrong = ("S4", f"it read {wrong}")
        operation = self._reads[node, op] = WatchedOperation(product, request, bit)
        if effect.notification is not None:
            self._read_notifications[effect.source, node, effect.notification.request_id] = operation
        request.landing += 1

    def _read_ended(self, node: Address, event: ReadEnded, effects: Effects) -> None:
        operation = self._reads.pop((node, event.op), None)
        if operation is None:
            return
        request = operation.request
        request.landing -= 1
        if event.ok:
            request.landed |= operation.bit
            if operation.product is None or (operation.product.released and operation.reading):
                request.wrong = ("S2", "its source was released before the READ had ended")
