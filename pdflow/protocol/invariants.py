"""The safety invariants, judged from outside: an observer of every event into and every effect out of every endpoint.

It knows no rule of the protocol and reads no cell. From events and effects alone it keeps ghost state: who owns each
allocation at P and D, which one-sided operations are reading and which may still land, how every request ended. What it
decides is whether S1 to S9 hold (PROTOCOL 6). One event costs O(1), apart from a fence, which looks at one link.

| invariant | how it is seen here |
| --- | --- |
| S1 | a PostWrite's target is the living allocation of exactly that registration; no FreeBlocks while anything may |
|    | still land in it; no allocation is made of blocks that a registration still holds |
| S2 | a PostWrite's source is held; no ReleaseBlocks while a WRITE reads it; no Commit of a READ whose source was |
|    | released before the READ had ended (P cannot know of a READ, D must find out: PROTOCOL 7.5) |
| S3 | Commit only when the WRITE or READ of every pair has landed, each posted once and none still in flight |
| S4 | digest, weights and number of tokens of the source equal D's own, and the bytes are the layout's: at PostWrite, |
|    | and at Commit for a READ |
| S5 | nothing is hashed before Commit, so S5 is S3 and S4 at Commit |
| S6 | one Resolve or Commit for every request; every allocation is freed once, a product released once |
| S7 | P says SENT, to D or to its scheduler, only of shards whose WRITE ended well |
| S8 | a frame of another life than the last handshake showed causes nothing but a Note and a handshake |
| S9 | a frame moves only what its sender owns: WRITEs and answers go to the sender's engine, and D's request changes |
|    | for its own prefill engine alone. (What stops a loop is an exception, and needs no observer.) |

A D rank's fence, or the proof that a P rank is dead, also bars what had been granted to that rank: a WRITE posted later
over such a grant is no breach by itself, for P may not know of the fence, but it must never land (S1). The transport
sees to that: it refuses an old grant, or connects that pair no more.

An operation reads its source until its handle is final and good, or its endpoint is fenced: an error proves nothing
(R17, R19). It may land until its notice has been received, its handle is final and good (after a flush where DONE is
local), or either end has fenced the other or proved its death.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

from pdflow.protocol.effects import (
    Commit,
    Effects,
    Enqueue,
    Flush,
    FreeBlocks,
    Handshake,
    Note,
    PostRead,
    PostWrite,
    Quarantine,
    ReleaseBlocks,
    Resolve,
    Send,
    Tell,
)
from pdflow.protocol.events import (
    DecodeAdmitted,
    DecodeHit,
    DecodeQueued,
    Event,
    FenceEnded,
    FlushEnded,
    FrameOrdered,
    HandshakeEnded,
    PairFailed,
    PairLanded,
    PairReported,
    PeerExited,
    PrefillFinished,
    ReadEnded,
    ReadOrdered,
    Received,
    ShardReleased,
    WriteEnded,
)
from pdflow.protocol.geometry import Geometry
from pdflow.protocol.ghosts import Operation, Product, Request, mismatch
from pdflow.protocol.ids import EngineInfo, KvParams, Op, Reg, Shards, engine_of, rank_address, rank_of
from pdflow.protocol.messages import (
    CancelAck,
    Code,
    Completion,
    Disposition,
    Done,
    Progress,
    Register,
    RegisterAck,
    SyncReply,
)
from pdflow.protocol.values import Address, EngineId, Instant, RequestId, Xid

STORY_EVENTS = 4096
"""How far back a story looks."""
STORY_LINES = 60


class InvariantViolated(AssertionError):  # noqa: N818 (what happened, not which kind of error)
    """A bug of the machine, or of the driver that carries it. `story` is what led to it, oldest first."""

    def __init__(self, name: str, what: str, story: str) -> None:
        super().__init__(f"{name}: {what}\n{story}")
        self.name = name
        self.what = what
        self.story = story


Link: TypeAlias = tuple[Address, Address]
Judge: TypeAlias = Callable[[Any, Address, Any, Any], None]


class Oracle:
    """Watches one cluster.

    Args:
        geometry: who writes whom; the only thing it shares with the machine.
        done_is_remote: as the P ranks were told: a good handle means that the bytes have landed.
    """

    __slots__ = (
        "_barred",
        "_bygone",
        "_done_is_remote",
        "_geometry",
        "_links",
        "_lives",
        "_newest",
        "_now",
        "_owned",
        "_products",
        "_read_notices",
        "_reads",
        "_recent",
        "_requests",
        "_sources",
        "_tables",
        "_targets",
    )

    def __init__(self, geometry: Geometry, done_is_remote: bool = True) -> None:
        self._geometry = geometry
        self._done_is_remote = done_is_remote
        self._requests: dict[tuple[EngineId, RequestId], Request] = {}
        self._targets: dict[tuple[EngineId, int], Request] = {}
        """By generation: every D allocation that is neither freed nor committed."""
        self._owned: dict[EngineId, set[int]] = {}
        """The blocks of those."""
        self._products: dict[tuple[EngineId, Xid], Product] = {}
        self._sources: dict[tuple[EngineId, int], Product] = {}
        self._links: dict[Link, dict[Op, Operation]] = {}
        self._bygone: dict[tuple[Link, Op], Operation] = {}
        """WRITEs that P's fence has ended: what was done by then may be polled after it."""
        """WRITEs by (P rank, D rank)."""
        self._barred: dict[Link, int] = {}
        """Of links that D has fenced, the newest generation that it had allocated by then."""
        self._newest: dict[EngineId, int] = {}
        self._reads: dict[tuple[Address, Op], Operation] = {}
        self._read_notices: dict[tuple[Address, Address, RequestId], Operation] = {}
        """READs whose notice has not reached P, by (P rank, D rank, P's request id)."""
        self._lives: dict[tuple[Address, EngineId], int] = {}
        """What each node learnt by handshake."""
        self._tables: dict[tuple[Shards, Shards], dict[tuple[int, int], int]] = {}
        """For two parallelisms, the bit of each pair."""
        self._recent: deque[tuple[Instant, Address, Event, Effects]] = deque(maxlen=STORY_EVENTS)
        self._now: Instant = 0

    def observe(self, node: Address, event: Event, effects: Effects, now: Instant) -> None:
        """`node` was handed `event` at `now` and answered with `effects`. Call it before they are carried out.

        Raises InvariantViolated.
        """
        self._now = now
        self._recent.append((now, node, event, effects))
        seen = _ON_EVENT.get(type(event))
        if seen is not None:
            seen(self, node, event, effects)
        for effect in effects:
            judge = _ON_EFFECT.get(type(effect))
            if judge is not None:
                judge(self, node, effect, event)

    def finish(self, now: Instant) -> None:
        """Nothing is going on any more: nothing may be held. Raises InvariantViolated("quiescence")."""
        self._now = now
        for (engine, request_id), request in self._requests.items():
            how = "resolved, but its blocks are" if request.over else "neither committed nor resolved, its blocks are"
            self._fail("quiescence", f"{engine} still holds request {request_id!r}: {how} held", request_id)
        for (engine, xid), product in self._products.items():
            held = len(product.allocation.blocks)
            self._fail("quiescence", f"{engine} still holds the {held} blocks of {xid!r}", xid)
        for (p_rank, d_rank), operations in self._links.items():
            for op in operations:
                self._fail("quiescence", f"a WRITE from {p_rank} to {d_rank} has no end", op.reg.request_id)
        for node, op in self._reads:
            self._fail("quiescence", f"a READ at {node} has no end", op.reg.request_id)

    def lost(self, engine: EngineId) -> None:
        """Every process of this engine is dead, with its memory. What its NICs still write may land elsewhere."""
        for key in [key for key in self._products if key[0] == engine]:
            product = self._products.pop(key)
            product.released = True
            del self._sources[engine, product.allocation.generation]
        for rkey in [key for key in self._requests if key[0] == engine]:
            request = self._requests.pop(rkey)
            if request.allocation is not None:
                self._targets.pop((engine, request.allocation.generation), None)
        self._owned.pop(engine, None)
        for link in list(self._links):
            if engine in (engine_of(link[0]), engine_of(link[1])):
                gone = engine_of(link[0]) == engine
                for op, operation in list(self._links[link].items()):
                    self._settle(link, op, operation, reading=not gone, landing=gone)
        for node, op in [key for key in self._reads if engine_of(key[0]) == engine]:
            del self._reads[node, op]
        for node, peer in [key for key in self._lives if engine_of(key[0]) == engine]:
            del self._lives[node, peer]

    # D: requests and their blocks.

    def _queued(self, node: Address, event: DecodeQueued, effects: Effects) -> None:
        self._requests[node, event.request_id] = Request(event)

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
        grant = _grant_in(effects)
        if grant is None:
            return
        request.reg = grant.reg
        request.num_tokens = event.num_tokens
        request.shards = key = (request.queued.params.prefill.shards, grant.shards)
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

    def _prefilled(self, node: Address, event: PrefillFinished, effects: Effects) -> None:
        key = (node, event.allocation.generation)
        if key in self._sources:
            self._fail("S2", f"{node} filled blocks of generation {key[1]}, which it still holds", event.xid)
        self._sources[key] = self._products[node, event.xid] = Product(event)

    def _released(self, node: Address, effect: ReleaseBlocks, event: Event) -> None:
        product = self._sources.pop((node, effect.allocation.generation), None)
        if product is None or product.xid != effect.xid:
            self._fail("S6", f"{node} released {effect.xid!r}, which it does not hold", effect.xid)
        if product.reading:
            self._fail("S2", f"{node} released {effect.xid!r} under {product.reading} WRITEs", effect.xid)
        product.released = True
        del self._products[node, effect.xid]

    def _told(self, node: Address, effect: Tell, event: Event) -> None:
        told = effect.event
        if type(told) is not ShardReleased or told.code is not Code.NONE:
            return
        product = self._products.get((engine_of(node), told.xid))
        if product is not None and product.failed >> told.rank & 1 and not product.sent >> told.rank & 1:
            self._fail("S7", f"{node} reports {told.xid!r} as sent, but its WRITE failed", told.xid)

    # WRITEs.

    def _write_posted(self, node: Address, effect: PostWrite, event: Event) -> None:
        op, grant = effect.op, effect.grant
        reg = op.reg
        product = self._sources.get((engine_of(node), effect.source.generation))
        if product is None:
            self._fail("S2", f"{node} posted a WRITE from blocks that it has released", reg.request_id)
        if self._barred and grant.target.generation <= self._barred.get((node, effect.to), -1):
            self._post_barred(node, effect, product)
            return
        request = self._targets.get((reg.engine, grant.target.generation))
        if request is None or request.allocation != grant.target:
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
        link[op] = Operation(product, request, bit)
        product.reading += 1
        request.landing += 1

    def _post_barred(self, node: Address, effect: PostWrite, product: Product) -> None:
        params = KvParams(EngineInfo(engine_of(node), effect.grant.shards), product.xid, "", 0)
        nobody = Request(DecodeQueued(effect.op.reg.request_id, params, 0, 0))
        nobody.barred = True
        nobody.landing = 1
        self._links.setdefault((node, effect.to), {})[effect.op] = Operation(product, nobody, 0)
        product.reading += 1

    def _same_content(self, product: Product, request: Request, op: Op, nbytes: int, node: Address) -> None:
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
        """Either end may fence: nothing of that link lands any more. Only P's own fence stops the reading."""
        for op, operation in list(self._links.get((node, event.peer), {}).items()):
            ours = type(event) is FenceEnded
            if ours and not operation.handle_final and not operation.request.barred:
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
        """P had fenced before it, or D, looked at what had already come: the data are there all the same."""
        operation = self._bygone.get((link, op))
        if operation is not None and well:
            operation.request.landed |= operation.bit
            if operation.product is not None:
                operation.product.sent |= 1 << op.p_rank

    def _settle(self, link: Link, op: Op, operation: Operation, reading: bool, landing: bool) -> None:
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
        request = self._targets.get((op.reg.engine, effect.grant.target.generation))
        if request is None or request.reg != op.reg or engine_of(node) != op.reg.engine:
            self._fail("S1", f"{node} posted a READ into blocks that its request does not hold", op.reg.request_id)
        bit = request.pairs.get((op.p_rank, op.d_rank), 0)
        if not bit or (node, op) in self._reads or request.landed & bit:
            self._fail("S3", f"{node} posted a READ that is not expected, or was posted before", op.reg.request_id)
        product = self._products.get((engine_of(effect.source), effect.grant.xid))
        if product is not None:
            wrong = mismatch(product, request)
            if wrong is not None:
                request.wrong = ("S4", f"it read {wrong}")
        operation = self._reads[node, op] = Operation(product, request, bit)
        if effect.notice is not None:
            self._read_notices[effect.source, node, effect.notice.request_id] = operation
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

    # Frames.

    def _received(self, node: Address, event: Received, effects: Effects) -> None:
        sender, message = event.sender, event.message
        life = self._lives.get((node, engine_of(sender)))
        if life is not None and life != event.incarnation:
            for effect in effects:
                if type(effect) is not Note and type(effect) is not Handshake:
                    self._fail("S8", f"a frame of {sender} of life {event.incarnation} made {node} act", sender)
            return
        if isinstance(message, Done):
            self._noticed(node, sender, message.reg, message.generation)
        elif isinstance(message, Completion):
            read = self._read_notices.pop((node, sender, message.request_id), None)
            if read is not None:
                # A READ's notice is behind its data: P may free before D has polled its own handle.
                read.reading = False
            self._noticed(node, sender, Reg(engine_of(node), 0, 0, message.request_id), None)

    def _noticed(self, node: Address, sender: Address, reg: Reg, generation: int | None) -> None:
        """A notice travels behind its data. One that belongs to no WRITE of this sender's proves nothing."""
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

    def _met(self, node: Address, event: HandshakeEnded, effects: Effects) -> None:
        if event.ok:
            self._lives[node, engine_of(event.peer)] = event.incarnation

    def _sent(self, node: Address, effect: Send, event: Event) -> None:
        if type(event) is Received and engine_of(effect.to) != engine_of(event.sender):
            self._fail("S9", f"a frame of {event.sender} made {node} speak to {effect.to}", effect.to)
        message = effect.message
        if isinstance(message, RegisterAck):
            if message.progress is Progress.SENT:
                self._claimed_sent(node, effect.to, message.reg)
        elif isinstance(message, CancelAck):
            if message.disposition is Disposition.SENT:
                self._claimed_sent(node, effect.to, message.reg)
        elif isinstance(message, SyncReply):
            for item in message.items:
                if item.progress is Progress.SENT:
                    self._claimed_sent(node, effect.to, item.reg)

    def _claimed_sent(self, node: Address, to: Address, reg: Reg) -> None:
        request = self._requests.get((reg.engine, reg.request_id))
        if request is None or request.reg != reg:
            return
        if not request.landed & request.pairs.get((rank_of(node), rank_of(to)), 0):
            self._fail("S7", f"{node} told {to} SENT of a WRITE that has not ended well", reg.request_id)

    def _about_pair(self, node: Address, event: PairLanded | PairFailed | PairReported, effects: Effects) -> None:
        if not effects or type(effects[0]) is Note:
            return
        request = self._requests.get((node, event.op.reg.request_id))
        if request is not None and engine_of(event.sender) != request.prefill:
            self._fail("S9", f"{event.sender} changed a request of {request.prefill}", event.op.reg.request_id)

    # Stories.

    def _fail(self, name: str, what: str, about: str) -> NoReturn:
        """Everything lately seen that names what this is about."""
        lines = []
        for at, node, event, effects in self._recent:
            text = repr(event)
            answers = [repr(effect) for effect in effects]
            if about in text or any(about in answer for answer in answers):
                lines.append(f"{at:>14} {node:<16} {text}")
                lines += [f"{'':>14} {'':<16}   -> {answer}" for answer in answers]
        raise InvariantViolated(name, f"{what} (at {self._now} ns)", "\n".join(lines[-STORY_LINES:]))


def _grant_in(effects: Effects) -> Register | None:
    """What D asks for, as its scheduler tells its ranks."""
    for effect in effects:
        if type(effect) is Tell:
            told = effect.event
            if type(told) is ReadOrdered:
                return told.grant
            if type(told) is FrameOrdered and type(told.message) is Register:
                return told.message
    return None


_ON_EVENT: dict[type, Judge] = {
    DecodeQueued: Oracle._queued,
    DecodeAdmitted: Oracle._admitted,
    PrefillFinished: Oracle._prefilled,
    WriteEnded: Oracle._write_ended,
    ReadEnded: Oracle._read_ended,
    FlushEnded: Oracle._flushed,
    FenceEnded: Oracle._fenced,
    PeerExited: Oracle._fenced,
    Received: Oracle._received,
    HandshakeEnded: Oracle._met,
    PairLanded: Oracle._about_pair,
    PairFailed: Oracle._about_pair,
    PairReported: Oracle._about_pair,
}
_ON_EFFECT: dict[type, Judge] = {
    Enqueue: Oracle._enqueued,
    Resolve: Oracle._resolved,
    Commit: Oracle._committed,
    Quarantine: Oracle._quarantined,
    FreeBlocks: Oracle._freed,
    ReleaseBlocks: Oracle._released,
    Tell: Oracle._told,
    PostWrite: Oracle._write_posted,
    PostRead: Oracle._read_posted,
    Flush: Oracle._flush_posted,
    Send: Oracle._sent,
}
