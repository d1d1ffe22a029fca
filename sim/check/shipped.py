"""The world of a transfer method: when its prompts may be sent, and the memories beside the blocks.

A method whose pieces go early begins a prompt, and computes the rest of it later; what is begun can be given up. Where
it sends from or lands beside the blocks, prompts and requests have their turn in a real Staging (pdflow/methods), and
D's engine comes after Commit: until the KV is loaded into its blocks, the room is taken. After every move memories and
operations follow what endpoints have said: who queues for room, who gives it back, what an operation can send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pdflow.methods.method import Memory
from pdflow.methods.shipment import Piece
from pdflow.methods.staging import KvSize, Staging, comes_with_the_write, staging_of
from pdflow.protocol.effects import PostRead, Send
from pdflow.protocol.events import (
    DecodeAborted,
    DecodeAdmitted,
    DecodeQueued,
    PrefillAborted,
    PrefillBegun,
    PrefillFinished,
    PrefillLegEnded,
    SourceWithdrawn,
)
from pdflow.protocol.messages import Code, Progress, RegisterAck
from pdflow.protocol.producer import ProducerCell
from pdflow.protocol.producer_rank import ProducerRank
from pdflow.protocol.values import NEVER, Allocation
from pdflow.serving.events import DecodeRequested, PrefillReported
from sim.check.cluster import DIGEST, role_of
from sim.check.ghost import FLYING, PIECE, READING, Broken, Interned, Product, Stage
from sim.check.parcels import Load, Parcels
from sim.check.relation import Move
from sim.check.roles import WEIGHTS, Admits, Computes
from sim.check.scope import TOKENS, Fault, Scope
from sim.check.world import Draft, State

BEGUN, GIVEN_UP = 1, 2
"""A prompt that is being computed while it is sent; one that will never be whole."""
PART = 4096
"""Bytes of one layer of a prompt, as small as a ring has them."""
SIZE = KvSize(2, PART // TOKENS)
GONE = (Product.RELEASED, Product.DEAD)


class Rooms(NamedTuple):
    """What stands in a state beyond its budgets."""

    computing: tuple[int, ...]
    """By prompt: 0, BEGUN or GIVEN_UP."""
    memories: tuple[int, ...]
    """By engine, P's first, the number of its Staging as it is; 0: it has none, or room for all."""


def staging(memory: Memory, prompts: int) -> Staging:
    """An empty one with room for so many."""
    whole = SIZE.layers * PART
    split = memory is Memory.BUFFER  # Each prompt has a layer on the GPU and one in the host's pool.
    return staging_of(memory, SIZE, prompts * whole, prompts * (PART if split else whole), prompts * PART)


class Shipped(Parcels):
    """A Relation by a method: one more slot, for its Rooms."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        method, cluster = self.method, self.cluster
        self.conduct = method.conduct(scope.dialect.name)
        self.evicts = method.p_memory is Memory.STORE
        self.room = self.budget + 1
        self.rooms = Interned()
        self.stagings = Interned()
        self.stagings.of(None)
        self.bodies_of: list[Staging | None] = [None]
        at_p = staging(method.p_memory, scope.p_pool) if scope.p_pool else None
        at_d = staging(method.d_memory, scope.pool or scope.requests) if method.staged_at_d else None
        kinds = [at_p] * scope.p_engines + [at_d] * scope.d_engines
        self.empty = [self._staging(at, memory) for at, memory in enumerate(kinds)]
        self.staged_at_d = at_d is not None
        self.room_with_write = comes_with_the_write(method, self.conduct)
        self._tidied: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.do |= {"want": self.want, "begin": self.begin, "withdraw": self.withdraw, "load": self.load}
        self.do = {verb: self._then_tidy(act) for verb, act in self.do.items()}
        self._finished = [
            PrefillFinished(xid, source, TOKENS, DIGEST + i, WEIGHTS)
            for i, (xid, source) in enumerate(zip(cluster.xids, cluster.sources, strict=True))
        ]
        self._begun = [
            PrefillBegun(xid, source, TOKENS, DIGEST + i, WEIGHTS)
            for i, (xid, source) in enumerate(zip(cluster.xids, cluster.sources, strict=True))
        ]

    # What engines say to endpoints. The cores of methods are not in this world yet.

    def at_p(self, draft: Draft, i: int, event: object) -> None:
        xid = self.cluster.xids[i]
        told = self._finished[i] if isinstance(event, Computes) else PrefillAborted(xid, Code.PREFILL_ABORTED)
        self.event(draft, self.cluster.p_of[i].engine, told)

    def at_d(self, draft: Draft, i: int, event: object) -> None:
        name, product = self.cluster.requests[i], self.cluster.product_of[i]
        told: Any
        if isinstance(event, DecodeRequested):
            told = DecodeQueued(name, event.params, event.num_blocks, 0)
        elif isinstance(event, Admits):
            about = (event.hit_tokens, TOKENS - event.hit_tokens, DIGEST + product, WEIGHTS)
            told = DecodeAdmitted(name, event.allocation, *about)
        elif isinstance(event, PrefillReported):
            told = PrefillLegEnded(name, event.ok)
        else:
            told = DecodeAborted(name, Code.CANCELLED)
        self.event(draft, self.cluster.d_of[i].engine, told)

    def _then_tidy(self, act: Callable[..., None]) -> Callable[..., None]:
        def done(draft: Draft, *about: int) -> None:
            act(draft, *about)
            self.tidy(draft)

        return done

    def feed(self, state: State, node: str, event: Any) -> State:
        draft = list(state)
        self.event(draft, node, event)
        self.tidy(draft)
        return tuple(draft)

    def _step(self, end: int, event: int) -> tuple[int, tuple[Any, ...]]:
        """What P's ranks say of a prompt that is being computed, and how long they keep it."""
        known = (end, event) in self.steps
        after, effects = super()._step(end, event)
        body = self.bodies[after]
        if not known and isinstance(body, ProducerRank):
            for cell in body.cells.values():
                if cell.source is not None and not cell.source.complete:
                    self._take_their_time(cell, effects)
        return after, effects

    def _take_their_time(self, cell: ProducerCell, effects: tuple[Any, ...]) -> None:
        """It is kept for as long as it takes, unless nobody wants it; and D is not told that anything goes on, since it
        gives up what then makes no progress."""
        if self.cluster.timers.release_lease_ns < cell.lease_until < NEVER:
            raise Broken("L1", f"a lease on {cell.xid} runs while it is computed")
        for effect in effects:
            said = effect.message if isinstance(effect, Send) else None
            if isinstance(said, RegisterAck) and said.reg == cell.reg and said.progress >= Progress.READY:
                raise Broken("L1", f"{said.reg.request_id} is said to be {said.progress.name} while it is computed")

    def beginning(self) -> State:
        rooms = Rooms((0,) * len(self.cluster.xids), tuple(self.empty))
        return (*super().beginning(), self.rooms.of(rooms))

    # Memories.

    def rooms_of(self, state: State | Draft) -> Rooms:
        rooms: Rooms = self.rooms.values[state[self.room]]
        return rooms

    def _staging(self, at: int, memory: Staging | None) -> int:
        """The number of an engine's memory as it is now."""
        if memory is None:
            return 0
        where = getattr(memory, "ring", None)
        number = self.stagings.of((at, memory.fingerprint(), None if where is None else where.head))
        if number == len(self.bodies_of):
            self.bodies_of.append(memory)
        return number

    def staging_at(self, state: State | Draft, engine: str) -> Staging | None:
        """Not to be changed."""
        return self.bodies_of[self.rooms_of(state).memories[self.cluster.number[engine]]]

    def put_staging(self, draft: Draft, engine: str, memory: Staging) -> None:
        rooms = self.rooms_of(draft)
        at = self.cluster.number[engine]
        memories = (*rooms.memories[:at], self._staging(at, memory), *rooms.memories[at + 1 :])
        draft[self.room] = self.rooms.of(rooms._replace(memories=memories))

    def put_computing(self, draft: Draft, product: int, now: int) -> None:
        rooms = self.rooms_of(draft)
        computing = (*rooms.computing[:product], now, *rooms.computing[product + 1 :])
        draft[self.room] = self.rooms.of(rooms._replace(computing=computing))

    def next_in(self, state: State | Draft, engine: str) -> str:
        """Who gets room there now; "" if nobody does."""
        memory = self.staging_at(state, engine)
        if memory is None or not memory.waiting:
            return ""
        served = memory.fork().serve()
        return served[0] if served is not None else ""

    def serve(self, draft: Draft, engine: str) -> None:
        """Whose turn it is has room there."""
        memory = self.staging_at(draft, engine)
        if memory is not None:
            memory = memory.fork()
            memory.serve()
            self.put_staging(draft, engine, memory)

    # What may happen.

    def _of_tail(self, state: State) -> Iterator[Move]:
        left, ghost, cluster = self.left(state), self.ghost_of(state), self.cluster
        computing = self.rooms_of(state).computing
        for i, product in enumerate(ghost.products):
            if product == Product.QUEUED:
                yield from self._of_queued(state, i)
            elif computing[i] == BEGUN:
                yield ("finish", i)
                if left[Fault.PREFILL_ABORT]:
                    yield ("abort prefill", i)
            if left[Fault.WITHDRAW] and product == Product.HELD:
                yield ("withdraw", i)
        for i, stage in enumerate(ghost.stages if self.staged_at_d else ()):
            engine, name = cluster.d_of[i].engine, cluster.requests[i]
            if stage == Stage.ENQUEUED and self.next_in(state, engine) == name:
                yield ("admit", i)
            elif stage == Stage.COMMITTED and name in _holders(self.staging_at(state, engine)):
                yield ("load", i)
        for move in super()._of_tail(state):
            if move[0] != "finish" and not (self.staged_at_d and move[0] == "admit"):
                yield move

    def _of_queued(self, state: State, i: int) -> Iterator[Move]:
        engine, xid = self.cluster.p_of[i].engine, self.cluster.xids[i]
        memory = None if self.room_with_write else self.staging_at(state, engine)
        if memory is not None and xid not in memory.waiting:
            yield ("want", i)
        elif memory is None or self.next_in(state, engine) == xid:
            if self.conduct.early:
                yield ("begin", i)
            yield ("finish", i)  # Of an early method, too: nobody has to say that it has begun.

    def want(self, draft: Draft, i: int) -> None:
        """P asks for room to send this prompt from. Whoever has to go for it is told."""
        engine = self.cluster.p_of[i].engine
        memory = self.staging_at(draft, engine)
        assert memory is not None
        memory = memory.fork()
        memory.want(self.cluster.xids[i], TOKENS)
        self.put_staging(draft, engine, memory)
        if not self.next_in(draft, engine):
            self.judge.goal("waits for room at P")
        for xid in memory.victims():
            self.withdrawn(draft, self.cluster.xids.index(xid))

    def begin(self, draft: Draft, i: int) -> None:
        """The first of a prompt can be sent, while the rest of it is computed."""
        engine = self.cluster.p_of[i].engine
        if not self.room_with_write:
            self.serve(draft, engine)
        self.put_ghost(draft, "products", i, Product.HELD)
        self.put_computing(draft, i, BEGUN)
        self.event(draft, engine, self._begun[i])

    def finish(self, draft: Draft, i: int) -> None:
        """A prompt is computed, and where it can be sent from."""
        if self.rooms_of(draft).computing[i] == BEGUN:
            self.put_computing(draft, i, 0)
            self._offer(draft, i, self.there(draft, i)[1:])
            self.event(draft, self.cluster.p_of[i].engine, self._finished[i])
            return
        if not self.room_with_write:
            self.serve(draft, self.cluster.p_of[i].engine)
        super().finish(draft, i)

    def there(self, state: State | Draft, i: int) -> tuple[Piece, ...]:
        """What of a prompt lies where it is sent from."""
        memory = self.staging_at(state, self.cluster.p_of[i].engine)
        if self.room_with_write and memory is not None and self.cluster.xids[i] not in _holders(memory):
            return ()
        return self.pieces[:1] if self.rooms_of(state).computing[i] else self.pieces

    def _offer(self, draft: Draft, product: int, pieces: tuple[Piece, ...]) -> None:
        """More of it can be sent."""
        ops = []
        for op, flags in self.ops_of(draft):
            load = self.load_of(flags)
            if flags >> PIECE and flags & FLYING and self.product_of(self.operations(op)[2]) == product:
                shipment = load.shipment.fork()
                for piece in pieces:
                    shipment.offer(piece)
                flags = self.with_load(flags, Load(shipment, load.air, load.posted))
            ops.append((op, flags))
        self.put_ops(draft, ops)

    def abort_prefill(self, draft: Draft, i: int) -> None:
        """One that has begun is there until P's ranks have let go of it."""
        if self.rooms_of(draft).computing[i] != BEGUN:
            super().abort_prefill(draft, i)
            return
        self.spend(draft, Fault.PREFILL_ABORT)
        self.put_computing(draft, i, GIVEN_UP)
        self.judge.goal("given up while being computed")
        self.event(draft, self.cluster.p_of[i].engine, PrefillAborted(self.cluster.xids[i], Code.PREFILL_ABORTED))

    def withdraw(self, draft: Draft, i: int) -> None:
        """P's memory wants this prompt's room for what is not in this world."""
        self.spend(draft, Fault.WITHDRAW)
        self.withdrawn(draft, i)

    def withdrawn(self, draft: Draft, i: int) -> None:
        for op, flags in self.ops_of(draft):
            effect = self.operations(op)[2]
            if flags & FLYING and flags & READING and self.product_of(effect) == i:
                self.judge.goal(f"withdrawn under a {'READ' if type(effect) is PostRead else 'WRITE'}")
        self.event(draft, self.cluster.p_of[i].engine, SourceWithdrawn(self.cluster.xids[i]))

    def admit(self, draft: Draft, i: int) -> None:
        """It has room to land in."""
        self.serve(draft, self.cluster.d_of[i].engine)
        super().admit(draft, i)

    def load(self, draft: Draft, i: int) -> None:
        """D's engine has blocks for it, and it is copied into them."""
        engine = self.cluster.d_of[i].engine
        memory = self.staging_at(draft, engine)
        assert memory is not None
        self.put_staging(draft, engine, _without(memory, self.cluster.requests[i]))

    def restart(self, draft: Draft, engine: int) -> None:
        super().restart(draft, engine)
        name = self.cluster.engines[engine]
        rooms = self.rooms_of(draft)
        memories = (*rooms.memories[:engine], self.empty[engine], *rooms.memories[engine + 1 :])
        mine = [p.engine == name for p in self.cluster.p_of]
        computing = tuple(0 if own else now for own, now in zip(mine, rooms.computing, strict=True))
        draft[self.room] = self.rooms.of(Rooms(computing, memories))

    # What follows from what endpoints have said.

    def tidy(self, draft: Draft) -> None:
        key = (draft[self.op], draft[self.ghost], draft[self.room])
        found = self._tidied.get(key)
        if found is None:
            self._at_d(draft)
            self._at_p(draft)
            if self.room_with_write:
                self._room_for_new(draft)
            self._load_new(draft)
            found = self._tidied[key] = (draft[self.op], draft[self.room])
        draft[self.op], draft[self.room] = found

    def _room_for_new(self, draft: Draft) -> None:
        """What is posted asks for room, and whoever is next can be sent."""
        for op, flags in self.ops_of(draft):
            if flags & FLYING and not flags >> PIECE:
                i = self.product_of(self.operations(op)[2])
                memory = self.staging_at(draft, self.cluster.p_of[i].engine)
                xid = self.cluster.xids[i]
                if memory is not None and xid not in memory.waiting and xid not in _holders(memory):
                    self.want(draft, i)
        for engine in self.cluster.engines:
            while role_of(engine) == "P" and (xid := self.next_in(draft, engine)):
                self.serve(draft, engine)
                i = self.cluster.xids.index(xid)
                self._offer(draft, i, self.there(draft, i))

    def _load_new(self, draft: Draft) -> None:
        """What an operation that has just been posted can send."""
        ops = []
        for op, flags in self.ops_of(draft):
            if flags & FLYING and not flags >> PIECE:
                effect = self.operations(op)[2]
                i = self.product_of(effect)
                if self.rooms_of(draft).computing[i]:
                    self.judge.goal("posted while being computed")
                flags = self.first_load(flags, effect, self.there(draft, i))
            ops.append((op, flags))
        self.put_ops(draft, ops)

    def _at_d(self, draft: Draft) -> None:
        """Room is asked for when D's scheduler lets a request in, and taken back when its blocks would be."""
        if not self.staged_at_d:
            return
        for i, stage in enumerate(self.ghost_of(draft).stages):
            engine, name = self.cluster.d_of[i].engine, self.cluster.requests[i]
            memory = self.staging_at(draft, engine)
            assert memory is not None
            if stage == Stage.ENQUEUED and name not in memory.waiting and name not in _holders(memory):
                memory = memory.fork()
                memory.want(name, TOKENS)
                self.put_staging(draft, engine, memory)
                if not self.next_in(draft, engine):
                    self.judge.goal("waits for room at D")
            elif stage == Stage.FREED:
                self.put_staging(draft, engine, _without(memory, name))

    def _at_p(self, draft: Draft) -> None:
        ghost, computing = self.ghost_of(draft), self.rooms_of(draft).computing
        for i, product in enumerate(ghost.products):
            if product not in GONE:
                continue
            if computing[i] == BEGUN:
                self.judge.goal("lease ended while being computed")
            engine = self.cluster.p_of[i].engine
            memory = self.staging_at(draft, engine)
            if memory is not None:
                self.put_staging(draft, engine, _without(memory, self.cluster.xids[i]))

    def unanswered(self, state: State) -> list[str]:
        """What memories keep for nobody, and what P has begun and not ended."""
        ghost, cluster = self.ghost_of(state), self.cluster
        over = [cluster.requests[i] for i, stage in enumerate(ghost.stages) if stage in self.over]
        over += [cluster.xids[i] for i, product in enumerate(ghost.products) if product in GONE]
        kept = [
            f"{engine}'s memory keeps {name}"
            for engine in cluster.engines
            for name in _holders(self.staging_at(state, engine))
            if name in over
        ]
        return kept + ["a prompt is being computed" for now in self.rooms_of(state).computing if now == BEGUN]

    def further(self, state: State) -> dict[str, Any]:
        rooms = self.rooms_of(state)
        return {"rooms": [rooms.computing, *(self.stagings.values[number] for number in rooms.memories)]}


def _holders(memory: Staging | None) -> list[str]:
    return [] if memory is None else [name for name, _ in memory.held.values()]


def _without(memory: Staging, name: str) -> Staging:
    """The same without this one, whether it waits or has room."""
    other = memory.fork()
    other.forget(name)
    for generation, (holder, parts) in memory.held.items():
        if holder == name:
            other.release(Allocation(generation, parts))
    return other
