"""Breadth-first exploration of a small cluster of real endpoints: every order of everything that can happen.

One relation, `enabled` and `apply`, over immutable states. `now` stays 0, so every deadline is a constant and the space
is finite; an armed timer may fire at any moment, which over-approximates every clock. Faults and repetitions have
budgets. Endpoints are interned and their steps remembered, so that almost no transition runs the core.

Ghosts: a product's and a request's stage, which pairs have landed, which operations may still read or land. An
operation's bytes are judged where a block changes hands: it is enough to forbid that anything is freed, released or
committed while an operation may still touch it, and that one is posted on what is not held.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from pdflow.layout.geometry import TransferGeometry
from pdflow.protocol.consumer_rank import ConsumerRank
from pdflow.protocol.consumer_scheduler import ConsumerScheduler
from pdflow.protocol.dialect import STRICT, Dialect
from pdflow.protocol.effects import (
    AnswerPrefill,
    Commit,
    Enqueue,
    Fence,
    FreeBlocks,
    Handshake,
    PostRead,
    PostWrite,
    ReadWord,
    ReleaseBlocks,
    Resolve,
    Send,
    Tell,
)
from pdflow.protocol.events import (
    DecodeAborted,
    DecodeAdmitted,
    DecodeQueued,
    FenceEnded,
    HandshakeEnded,
    PeerLost,
    PrefillAborted,
    PrefillFinished,
    PrefillLegEnded,
    PrefillQueued,
    ReadEnded,
    Received,
    TimerFired,
    WordRead,
    WriteEnded,
)
from pdflow.protocol.ids import KvParams, engine_of, rank_address
from pdflow.protocol.messages import CancelAck, Code, Disposition, Progress, Register, RegisterAck, SyncReply
from pdflow.protocol.producer_rank import ProducerRank
from pdflow.protocol.producer_scheduler import ProducerScheduler
from pdflow.protocol.timers import Timer, TimerKind, Timers
from pdflow.protocol.values import Allocation
from tests.protocol.support.cluster import SHAPE, engine_info

TOKENS = 32
LIFE = {"P": 101, "D": 201}


class Broken(AssertionError):  # noqa: N818 (what happened, not which kind of error)
    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name}: {what}")
        self.name = name


class Scope(NamedTuple):
    """What may happen, and how often. A kind of fault or timer that is not named has no limit but its own nature."""

    dialect: Dialect = STRICT
    pulls: bool = False
    p_tp: int = 1
    d_tp: int = 1
    requests: int = 1
    same_product: bool = False
    """All requests ask for one prompt (a retry beside its first attempt)."""
    lagging: bool = False
    """What endpoints of one engine tell each other takes its time, each pair of them first in, first out."""
    concurrent: bool = True
    """The decode leg may arrive before the prefill has finished."""
    drop: int = 0
    dup: int = 0
    err: int = 0
    unreachable: int = 0
    lose: int = 0
    abort: int = 1
    prefill_abort: int = 0
    sync: int = 0
    cancel: int = 0
    restart: int = 0
    """P's processes die, and others start with the same engine id; what its NIC has begun may land all the same."""
    deadline: int = 1
    stall: int = 1


FAULTS = ("drop", "dup", "err", "unreachable", "lose", "abort", "prefill_abort", "restart")
FAULTS += ("sync", "cancel", "deadline", "stall")
TIMED = {
    TimerKind.SYNC: FAULTS.index("sync"),
    TimerKind.CANCEL: FAULTS.index("cancel"),
    TimerKind.DEADLINE: FAULTS.index("deadline"),
    TimerKind.STALL: FAULTS.index("stall"),
}
DROP, DUP, ERR, UNREACHABLE, LOSE, ABORT, PREFILL_ABORT, RESTART = range(8)

ABSENT, QUEUED, HELD, RELEASED, DEAD = range(5)
"""A product at P."""
UNBORN, KNOWN, ENQUEUED, ADMITTED, COMMITTED, RESOLVED, FREED = range(7)
"""A request at D; RESOLVED still holds blocks, FREED none."""


class State(NamedTuple):
    ends: tuple[int, ...]
    """The interned endpoint of every node."""
    chans: tuple[tuple[int, ...], ...]
    """Frames under way, by link, first in, first out."""
    bag: tuple[tuple[int, int], ...]
    """Duplicates, which arrive whenever they like: (link, frame)."""
    tasks: tuple[tuple[str, int, int], ...]
    """Handshakes, fences and lease words asked for: (kind, node, peer or operation)."""
    ops: tuple[tuple[int, int], ...]
    """(operation, flags)."""
    products: tuple[int, ...]
    stages: tuple[int, ...]
    landed: tuple[int, ...]
    stale: tuple[bool, ...]
    """A READ of this request ended after its source had been released."""
    budget: tuple[int, ...]
    lives: int
    """How often P has started again."""


FLYING, NOTICE, ENDED_OK, ENDED_ERR, READING, TOLD, ORPHAN = 1, 2, 4, 8, 16, 32, 64
"""Flags of an operation: may still land; its notice is under way; its handle's end is to be told; it may still read;
its handle's bad end has been told; the process that began it is dead."""


class Space:
    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.timers = Timers()
        self.geometry = TransferGeometry(SHAPE, initiator="pull" if scope.pulls else "push")
        self.p, self.d = engine_info("P", scope.p_tp), engine_info("D", scope.d_tp)
        self.p_ranks = [rank_address("P", r) for r in range(scope.p_tp)]
        self.d_ranks = [rank_address("D", r) for r in range(scope.d_tp)]
        self.nodes = ["P", *self.p_ranks, "D", *self.d_ranks]
        self.at = {name: i for i, name in enumerate(self.nodes)}
        links = [(p, d) for p in self.p_ranks for d in self.d_ranks]
        self.links = [link for p, d in links for link in ((p, d), (d, p))]
        self.between_engines = len(self.links)
        if scope.lagging:
            for engine, ranks in (("P", self.p_ranks), ("D", self.d_ranks)):
                self.links += [link for rank in ranks for link in ((engine, rank), (rank, engine))]
        self.link_of = {link: i for i, link in enumerate(self.links)}
        self.pairs = self.geometry.pairs(self.p.shards, self.d.shards)
        self.bit = {pair: 1 << i for i, pair in enumerate(self.pairs)}
        self.everything = (1 << len(self.pairs)) - 1
        n = scope.requests
        # Ids as vLLM makes them: what a client sent, and eight hexadecimal digits of the engine's own.
        self.requests = [f"u{0 if scope.same_product else i}-d000000{i}" for i in range(n)]
        self.xids = [f"x{0 if scope.same_product else i}" for i in range(n)]
        self.endpoints: list[Any] = []
        self.known: dict[Any, int] = {}
        self.frames: list[Any] = []
        self.frame_ids: dict[Any, int] = {}
        self.operations: list[Any] = []
        self.operation_ids: dict[Any, int] = {}
        self.armed: dict[int, tuple[Timer, ...]] = {}
        self.memo: dict[tuple[int, Any], tuple[int, tuple[Any, ...]]] = {}
        self.params: dict[str, KvParams] = {}
        self.words: dict[tuple[str, int], int] = {}
        self.seen: dict[str, int] = {}
        """How often each goal was met."""

    # Interning.

    def intern(self, endpoint: Any) -> int:
        name = getattr(endpoint, "me", "")
        key = (type(endpoint).__name__, name, endpoint.incarnation, endpoint.fingerprint())
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = len(self.endpoints)
            self.endpoints.append(endpoint)
            self.armed[found] = endpoint.armed()
        return found

    def frame(self, message: Any) -> int:
        found = self.frame_ids.get(message)
        if found is None:
            found = self.frame_ids[message] = len(self.frames)
            self.frames.append(message)
        return found

    def operation(self, node: str, effect: Any) -> int:
        key = (node, effect)
        found = self.operation_ids.get(key)
        if found is None:
            found = self.operation_ids[key] = len(self.operations)
            self.operations.append(key)
        return found

    def step(self, end: int, event: Any) -> tuple[int, tuple[Any, ...]]:
        hit = self.memo.get((end, event))
        if hit is None:
            endpoint = self.endpoints[end].fork()
            effects = endpoint.handle(event, 0)
            hit = self.memo[end, event] = (self.intern(endpoint), effects)
        return hit

    def start(self) -> State:
        scope = self.scope
        fixed = (scope.dialect, self.timers, self.geometry)
        ends = self.prefill_engine(LIFE["P"])
        ends += [ConsumerScheduler(self.d, LIFE["D"], *fixed, scope.pulls, 1000)]
        ends += [ConsumerRank(self.d, r, LIFE["D"], *fixed) for r in range(scope.d_tp)]
        n = len(self.requests)
        budget = tuple(getattr(scope, name) for name in FAULTS)
        state = State(
            tuple(self.intern(e) for e in ends),
            ((),) * len(self.links),
            (),
            (),
            (),
            (ABSENT,) * n,
            (UNBORN,) * n,
            (0,) * n,
            (False,) * n,
            budget,
            0,
        )
        for i, xid in enumerate(dict.fromkeys(self.xids)):
            state = self.feed(state, "P", PrefillQueued(xid, self.prefill_id(xid)), products=(i, QUEUED))
        return state

    def prefill_engine(self, life: int) -> list[Any]:
        scope = self.scope
        fixed = (scope.dialect, self.timers, self.geometry)
        ranks = [ProducerRank(self.p, r, life, *fixed) for r in range(scope.p_tp)]
        return [ProducerScheduler(self.p, life, scope.dialect), *ranks]

    def life(self, s: State, node: str) -> int:
        engine = engine_of(node)
        return LIFE[engine] + (s.lives if engine == "P" else 0)

    def prefill_id(self, xid: str) -> str:
        return f"u{xid[1:]}-e000000{xid[1:]}"

    # The relation.

    def enabled(self, s: State) -> Iterator[tuple[Any, ...]]:
        """In one fixed order. A choice is a name and small numbers, so that a path can be read and replayed."""
        budget = s.budget
        for i, stage in enumerate(s.products):
            if stage == QUEUED:
                yield ("finish", i)
                if budget[PREFILL_ABORT]:
                    yield ("abort prefill", i)
        for i, stage in enumerate(s.stages):
            product = s.products[0 if self.scope.same_product else i]
            if stage == UNBORN and (product >= HELD or (self.scope.concurrent and not self.scope.pulls)):
                yield ("decode", i)
            elif stage == ENQUEUED:
                yield ("admit", i)
            if budget[ABORT] and KNOWN <= stage <= ADMITTED:
                yield ("abort", i)
        for link, frames in enumerate(s.chans):
            if frames:
                yield ("deliver", link)
                if budget[DROP] and link < self.between_engines:
                    yield ("drop", link)
                if budget[DUP] and link < self.between_engines:
                    yield ("dup", link)
        for i in range(len(s.bag)):
            yield ("late", i)
        for i, (kind, _, _) in enumerate(s.tasks):
            yield ("task", i)
            if kind == "shake" and budget[UNREACHABLE]:
                yield ("unreachable", i)
        for i, (_, flags) in enumerate(s.ops):
            if flags & FLYING and not flags & (ENDED_ERR | TOLD):
                yield ("land", i)
                if budget[ERR] and not flags & ORPHAN:
                    yield ("err", i)
            if flags & NOTICE:
                yield ("notice", i)
                if budget[DROP]:
                    yield ("lose notice", i)
            if flags & (ENDED_OK | ENDED_ERR):
                yield ("ended", i)
        if budget[LOSE]:
            for link in range(self.between_engines):
                yield ("lose", link)
        if budget[RESTART]:
            yield ("restart",)
        for node, end in enumerate(s.ends):
            for j, timer in enumerate(self.armed[end]):
                at = TIMED.get(timer.kind)
                if (at is None or budget[at]) and self.fair(s, timer):
                    yield ("timer", node, j)

    def fair(self, s: State, timer: Timer) -> bool:
        """What vllm-compat rests on clocks for (PROTOCOL 7.2): that they agree is assumed here, and nowhere in strict.

        D frees a quarantine once a correctly running P cannot write any more; a D that is not silent keeps P's lease.
        """
        if self.scope.dialect.control_frames:
            return True
        if timer.kind is TimerKind.RECLAIM:
            return not s.ops and not s.bag and not any(s.chans) and all(p not in (QUEUED, HELD) for p in s.products)
        wanted = any(stage not in (COMMITTED, FREED) for stage in s.stages)
        return timer.kind is not TimerKind.LEASE or not self.scope.pulls or not (s.ops or wanted)

    def apply(self, s: State, choice: tuple[Any, ...]) -> State:
        name = choice[0]
        return _APPLY[name](self, s, *choice[1:])

    def spend(self, s: State, fault: int) -> State:
        return s._replace(budget=(*s.budget[:fault], s.budget[fault] - 1, *s.budget[fault + 1 :]))

    def finish(self, s: State, i: int) -> State:
        xid = self.xids[i]
        blocks = Allocation(10 + i, (100 + 2 * i, 101 + 2 * i))
        s = self.feed(s, "P", PrefillFinished(xid, blocks, TOKENS, 70 + i, 1), products=(i, HELD))
        if not self.scope.dialect.control_frames:
            for j, request_id in enumerate(self.requests):
                if self.xids[j] == xid and s.stages[j] != UNBORN:
                    s = self.feed(s, "D", PrefillLegEnded(request_id, True))
        return s

    def abort_prefill(self, s: State, i: int) -> State:
        s = self.spend(s, PREFILL_ABORT)
        return self.feed(s, "P", PrefillAborted(self.xids[i], Code.PREFILL_ABORTED), products=(i, DEAD))

    def decode(self, s: State, i: int) -> State:
        xid = self.xids[i]
        params = self.params.get(xid) if self.scope.pulls else None
        if params is None:
            params = KvParams(self.p, xid, self.prefill_id(xid), TOKENS)
        request_id = self.requests[i]
        s = self.feed(s, "D", DecodeQueued(request_id, params, 2, 0), stages=(i, KNOWN))
        product = s.products[0 if self.scope.same_product else i]
        if not self.scope.dialect.control_frames and product != QUEUED:
            s = self.feed(s, "D", PrefillLegEnded(request_id, product != DEAD))
        return s

    def admit(self, s: State, i: int) -> State:
        blocks = Allocation(20 + i, (200 + 2 * i, 201 + 2 * i))
        digest = 70 if self.scope.same_product else 70 + i
        return self.feed(s, "D", DecodeAdmitted(self.requests[i], blocks, 0, TOKENS, digest, 1), stages=(i, ADMITTED))

    def abort(self, s: State, i: int) -> State:
        return self.feed(self.spend(s, ABORT), "D", DecodeAborted(self.requests[i], Code.CANCELLED))

    def deliver(self, s: State, link: int) -> State:
        frame = s.chans[link][0]
        return self.arrive(self.pop(s, link), link, frame)

    def pop(self, s: State, link: int) -> State:
        chans = s.chans
        return s._replace(chans=(*chans[:link], chans[link][1:], *chans[link + 1 :]))

    def arrive(self, s: State, link: int, frame: int) -> State:
        sender, to = self.links[link]
        if link >= self.between_engines:
            return self.feed(s, to, self.frames[frame])
        return self.feed(s, to, Received(sender, self.life(s, sender), self.frames[frame]))

    def drop(self, s: State, link: int) -> State:
        return self.pop(self.spend(s, DROP), link)

    def dup(self, s: State, link: int) -> State:
        s = self.spend(s, DUP)
        return s._replace(bag=tuple(sorted((*s.bag, (link, s.chans[link][0])))))

    def late(self, s: State, i: int) -> State:
        link, frame = s.bag[i]
        return self.arrive(s._replace(bag=s.bag[:i] + s.bag[i + 1 :]), link, frame)

    def task(self, s: State, i: int) -> State:
        kind, node, about = s.tasks[i]
        s = s._replace(tasks=s.tasks[:i] + s.tasks[i + 1 :])
        name = self.nodes[node]
        if kind == "shake":
            peer = self.nodes[about]
            return self.feed(s, name, HandshakeEnded(peer, True, self.life(s, peer)))
        if kind == "fence":
            return self.fence(s, name, self.nodes[about])
        effect = self.operations[about][1]
        return self.feed(s, name, WordRead(effect.op, self.word(s, effect)))

    def word(self, s: State, effect: ReadWord) -> int:
        """P bumps its word when it lets go; which it has done by the time its product is released, at the latest."""
        product = self.products_of(effect.op.reg.request_id)
        rank = self.endpoints[s.ends[self.at[effect.source]]]
        held = any(c.source is not None and c.xid == self.xids[product] for c in rank.cells.values())
        return self.words[effect.source, effect.index] + (0 if held else 1)

    def products_of(self, request_id: str) -> int:
        i = self.requests.index(request_id)
        return 0 if self.scope.same_product else i

    def fence(self, s: State, name: str, peer: str) -> State:
        """Either end's fence: nothing of that link lands any more; its handles end badly."""
        ops = []
        for op, flags in s.ops:
            node, effect = self.operations[op]
            other = effect.to if type(effect) is PostWrite else effect.source
            if {node, other} == {name, peer} and flags & FLYING:
                told = flags & (ENDED_ERR | TOLD | ORPHAN)
                flags = flags & ~FLYING if told else flags & ~FLYING | ENDED_ERR
                if flags & TOLD and node == name:
                    flags = 0
            ops.append((op, flags))
        s = s._replace(ops=_alive(ops))
        return self.feed(s, name, FenceEnded(peer))

    def unreachable(self, s: State, i: int) -> State:
        _, node, about = s.tasks[i]
        s = self.spend(s, UNREACHABLE)._replace(tasks=s.tasks[:i] + s.tasks[i + 1 :])
        return self.feed(s, self.nodes[node], HandshakeEnded(self.nodes[about], False, 0))

    def lose(self, s: State, link: int) -> State:
        """A connection breaks at one end: what it had under way towards the other is gone."""
        name, peer = self.links[link]
        chans = s.chans
        s = self.spend(s, LOSE)._replace(chans=(*chans[:link], (), *chans[link + 1 :]))
        return self.feed(s, name, PeerLost(peer))

    def restart(self, s: State) -> State:
        """Nobody is left to be told of the old life's operations, and nobody reads its memory."""
        ops = []
        for op, flags in s.ops:
            if engine_of(self.operations[op][0]) == "P":
                flags = flags & (FLYING | NOTICE) | ORPHAN if flags & (FLYING | NOTICE) else 0
            ops.append((op, flags))
        ends = [self.intern(e) for e in self.prefill_engine(LIFE["P"] + s.lives + 1)]
        s = self.leg_fails(s)
        return self.spend(s, RESTART)._replace(
            ends=(*ends, *s.ends[len(ends) :]),
            chans=tuple(
                () if "P" in (engine_of(a), engine_of(b)) else s.chans[i] for i, (a, b) in enumerate(self.links)
            ),
            bag=(),
            tasks=tuple(t for t in s.tasks if engine_of(self.nodes[t[1]]) != "P"),
            ops=_alive(ops),
            products=tuple(RELEASED if p == HELD else DEAD if p == QUEUED else p for p in s.products),
            lives=s.lives + 1,
        )

    def leg_fails(self, s: State) -> State:
        """The router tells D of prefill legs that ended with their engine, which vllm-compat rests on."""
        for i, request_id in enumerate(self.requests):
            product = s.products[0 if self.scope.same_product else i]
            if product == QUEUED and s.stages[i] != UNBORN and not self.scope.dialect.control_frames:
                s = self.feed(s, "D", PrefillLegEnded(request_id, False))
        return s

    def flag(self, s: State, i: int, flags: int) -> State:
        ops = list(s.ops)
        ops[i] = (ops[i][0], flags)
        return s._replace(ops=_alive(ops))

    def land(self, s: State, i: int) -> State:
        op, flags = s.ops[i]
        effect = self.operations[op][1]
        request = self.requests.index(effect.op.reg.request_id)
        bit = self.bit[effect.op.p_rank, effect.op.d_rank]
        landed = list(s.landed)
        landed[request] |= bit
        notice = 0 if effect.notice is None else NOTICE
        ended = 0 if flags & ORPHAN else ENDED_OK
        s = self.flag(s, i, (flags & ~FLYING) | notice | ended)
        if type(effect) is PostRead and s.products[self.products_of(effect.op.reg.request_id)] != HELD:
            stale = list(s.stale)
            stale[request] = True
            s = s._replace(stale=tuple(stale))
        return s._replace(landed=tuple(landed))

    def err(self, s: State, i: int) -> State:
        return self.flag(self.spend(s, ERR), i, s.ops[i][1] | ENDED_ERR)

    def notice(self, s: State, i: int) -> State:
        op, flags = s.ops[i]
        node, effect = self.operations[op]
        to = effect.to if type(effect) is PostWrite else effect.source
        life = LIFE["P"] if flags & ORPHAN else self.life(s, node)
        return self.feed(self.flag(s, i, flags & ~NOTICE), to, Received(node, life, effect.notice))

    def lose_notice(self, s: State, i: int) -> State:
        return self.flag(self.spend(s, DROP), i, s.ops[i][1] & ~NOTICE)

    def ended(self, s: State, i: int) -> State:
        op, flags = s.ops[i]
        node, effect = self.operations[op]
        ok = bool(flags & ENDED_OK)
        left = flags & ~(ENDED_OK | ENDED_ERR)
        if type(effect) is PostRead:
            left &= ~(FLYING | READING)
        left = left | TOLD if left & FLYING else left & ~READING
        event: Any = (WriteEnded if type(effect) is PostWrite else ReadEnded)(effect.op, ok)
        return self.feed(self.flag(s, i, left), node, event)

    def timer(self, s: State, node: int, j: int) -> State:
        timer = self.armed[s.ends[node]][j]
        at = TIMED.get(timer.kind)
        return self.feed(s if at is None else self.spend(s, at), self.nodes[node], TimerFired(timer))

    # Effects.

    def feed(self, s: State, name: str, event: Any, **ghost: tuple[int, int]) -> State:
        """One event, all that endpoints tell each other because of it, and every effect, judged."""
        new = _Draft(s)
        for field, (i, value) in ghost.items():
            getattr(new, field)[i] = value
        queue = deque([(name, event)])
        while queue:
            node, told = queue.popleft()
            index = self.at[node]
            new.ends[index], effects = self.step(new.ends[index], told)
            for effect in effects:
                if type(effect) is Tell:
                    if self.scope.lagging:
                        new.chans[self.link_of[node, effect.to]] += (self.frame(effect.event),)
                    else:
                        queue.append((effect.to, effect.event))
                else:
                    act = _ON_EFFECT.get(type(effect))
                    if act is not None:
                        act(self, new, node, effect, told)
        return new.state()

    def sent(self, new: _Draft, node: str, effect: Send, event: Any) -> None:
        message = effect.message
        if isinstance(message, Register) and not self.scope.dialect.matches_by_xid:
            message = msgspec.structs.replace(message, xid="")
        new.chans[self.link_of[node, effect.to]] += (self.frame(message),)
        claims: list[Any] = []
        if isinstance(message, CancelAck):
            self.goal("cancelled " + ("before" if message.disposition is Disposition.NOT_STARTED else "in flight"))
            if message.disposition is Disposition.SENT:
                claims.append(message.reg)
            if type(event) is Received and type(event.message) is Register:
                self.goal("late REG refused")
        elif isinstance(message, RegisterAck) and message.progress is Progress.SENT:
            claims.append(message.reg)
        elif isinstance(message, SyncReply):
            claims += [item.reg for item in message.items if item.progress is Progress.SENT]
        for reg in claims:
            i = self.requests.index(reg.request_id)
            pair = (self.p_ranks.index(node), self.d_ranks.index(effect.to))
            if not new.landed[i] & self.bit[pair]:
                raise Broken("S7", f"{node} claims to have sent {reg.request_id}")

    def shook(self, new: _Draft, node: str, effect: Handshake, event: Any) -> None:
        new.tasks.append(("shake", self.at[node], self.at[effect.peer]))

    def fenced(self, new: _Draft, node: str, effect: Fence, event: Any) -> None:
        new.tasks.append(("fence", self.at[node], self.at[effect.peer]))

    def word_wanted(self, new: _Draft, node: str, effect: ReadWord, event: Any) -> None:
        new.tasks.append(("word", self.at[node], self.operation(node, effect)))

    def wrote(self, new: _Draft, node: str, effect: PostWrite, event: Any) -> None:
        i = self.requests.index(effect.op.reg.request_id)
        if new.products[self.products_of(effect.op.reg.request_id)] != HELD or effect.source.generation < 10:
            raise Broken("S2", f"{node} writes from a released product")
        if new.stages[i] not in (ADMITTED, RESOLVED) or effect.grant.target.generation != 20 + i:
            raise Broken("S1", f"{node} writes into blocks that {self.requests[i]} does not hold")
        self.post(new, node, effect, i)

    def read(self, new: _Draft, node: str, effect: PostRead, event: Any) -> None:
        i = self.requests.index(effect.op.reg.request_id)
        if new.stages[i] not in (ADMITTED, RESOLVED):
            raise Broken("S1", f"{node} reads into blocks that {self.requests[i]} does not hold")
        if new.products[self.products_of(effect.op.reg.request_id)] != HELD:
            new.stale[i] = True
        self.post(new, node, effect, i)

    def post(self, new: _Draft, node: str, effect: Any, i: int) -> None:
        op = self.operation(node, effect)
        bit = self.bit[effect.op.p_rank, effect.op.d_rank]
        if new.landed[i] & bit or any(known == op and flags & FLYING for known, flags in new.ops):
            raise Broken("S3", f"{node} posts {self.requests[i]} twice")
        new.ops.append((op, FLYING | READING))

    def reading(self, new: _Draft, i: int, kind: type) -> bool:
        for op, flags in new.ops:
            effect = self.operations[op][1]
            if flags & READING and type(effect) is kind and self.products_of(effect.op.reg.request_id) == i:
                return True
        return False

    def flying(self, new: _Draft, i: int) -> bool:
        """Whether bytes may still land in this request's blocks."""
        for op, flags in new.ops:
            if flags & FLYING and self.operations[op][1].op.reg.request_id == self.requests[i]:
                return True
        return False

    def released(self, new: _Draft, node: str, effect: ReleaseBlocks, event: Any) -> None:
        i = self.xids.index(effect.xid)
        if new.products[i] != HELD:
            raise Broken("S6", f"{effect.xid} is released twice")
        if self.reading(new, i, PostWrite):
            raise Broken("S2", f"{effect.xid} is released under a WRITE")
        new.products[i] = RELEASED
        self.goal("expired" if effect.code is Code.EXPIRED else "released after use")

    def enqueued(self, new: _Draft, node: str, effect: Enqueue, event: Any) -> None:
        new.stages[self.requests.index(effect.request_id)] = ENQUEUED

    def committed(self, new: _Draft, node: str, effect: Commit, event: Any) -> None:
        i = self.requests.index(effect.request_id)
        if new.stages[i] != ADMITTED:
            raise Broken("S6", f"{effect.request_id} is committed in stage {new.stages[i]}")
        if new.landed[i] != self.everything or self.flying(new, i):
            raise Broken("S3", f"{effect.request_id} is committed with {new.landed[i]:b} landed")
        if new.stale[i]:
            raise Broken("S2", f"{effect.request_id} is committed, but its source was released under its READ")
        new.stages[i] = COMMITTED
        self.goal("delivered")

    def resolved(self, new: _Draft, node: str, effect: Resolve, event: Any) -> None:
        i = self.requests.index(effect.request_id)
        if new.stages[i] not in (KNOWN, ENQUEUED, ADMITTED):
            raise Broken("S6", f"{effect.request_id} is resolved in stage {new.stages[i]}")
        new.stages[i] = RESOLVED if new.stages[i] == ADMITTED else FREED
        self.goal(f"resolved {effect.code.name}")

    def freed(self, new: _Draft, node: str, effect: FreeBlocks, event: Any) -> None:
        i = effect.allocation.generation - 20
        if new.stages[i] != RESOLVED:
            raise Broken("S6", f"{self.requests[i]} is freed in stage {new.stages[i]}")
        if self.flying(new, i):
            raise Broken("S1", f"{self.requests[i]} is freed while something may land in it")
        new.stages[i] = FREED

    def answered(self, new: _Draft, node: str, effect: Any, event: Any) -> None:
        self.params[effect.params.xid] = effect.params
        for rank, word in enumerate(effect.params.words):
            self.words[rank_address("P", rank), word.index] = word.word

    def goal(self, name: str) -> None:
        self.seen[name] = self.seen.get(name, 0) + 1

    # Exploration.

    def settled(self, s: State) -> bool:
        """Everything has an outcome, nothing is held or under way."""
        return (
            all(p in (ABSENT, RELEASED, DEAD) for p in s.products)
            and all(stage in (COMMITTED, FREED) for stage in s.stages)
            and not s.ops
            and not any(self.endpoints[end].cells for end in s.ends if hasattr(self.endpoints[end], "cells"))
        )

    def calm(self, s: State) -> Iterator[State]:
        """No more faults, and a fair scheduler: everything under way arrives; then timers, the gentle ones first.

        What was lost must be repaired by SYNC and CANCEL alone where they exist: request deadlines are the last resort.
        """
        repairs = {TimerKind.SYNC, TimerKind.CANCEL}
        ends = {TimerKind.LEASE, TimerKind.GRANT, TimerKind.JOIN, TimerKind.EXPECT, TimerKind.RECLAIM}
        if not self.scope.dialect.control_frames:
            ends |= {TimerKind.DEADLINE}
        s = s._replace(budget=(0,) * len(FAULTS))
        for kinds in (repairs, repairs, repairs, ends, repairs, ends, repairs, ends | repairs, ends | repairs):
            for _ in range(500):
                choice = next(self.enabled_calmly(s), None)
                if choice is None:
                    break
                s = self.apply(s, choice)
                yield s
            if self.settled(s):
                return
            for node in range(len(self.nodes)):
                for timer in self.armed[s.ends[node]]:
                    armed = timer in self.armed[s.ends[node]] and self.fair(s, timer)
                    if timer.kind in kinds and armed and not self.renewed(s, timer):
                        s = self.feed(s, self.nodes[node], TimerFired(timer))
                        yield s

    def renewed(self, s: State, timer: Timer) -> bool:
        """Whether SYNC would move this deadline for ever: then nothing may rest on its end."""
        if not self.scope.dialect.control_frames:
            return False
        cells = self.endpoints[s.ends[self.at["D"]]].cells.values()
        if timer.kind is TimerKind.GRANT:
            return any(cell.grant is not None and cell.grant.reg == timer.key for cell in cells)
        queued = any(cell.grant is None and cell.params.xid == timer.key for cell in cells)
        return timer.kind is TimerKind.LEASE and queued

    def enabled_calmly(self, s: State) -> Iterator[tuple[Any, ...]]:
        return (c for c in self.enabled(s) if c[0] != "timer")

    def explore(self, limit: int = 10_000_000, live: bool = True) -> tuple[int, int]:
        """(states, transitions). Raises Broken with the shortest path that breaks an invariant."""
        start = self.start()
        parents: dict[State, tuple[State, Any] | None] = {start: None}
        frontier = deque([start])
        transitions = 0
        gc.disable()
        try:
            while frontier and len(parents) < limit:
                s = frontier.popleft()
                for choice in self.enabled(s):
                    try:
                        after = self.apply(s, choice)
                    except Exception as error:
                        error.add_note(self.story(parents, s, choice))
                        raise
                    transitions += 1
                    if after not in parents:
                        parents[after] = (s, choice)
                        frontier.append(after)
            if live:
                self.live(parents)
        finally:
            gc.enable()
        return len(parents), transitions

    def live(self, parents: dict[State, Any]) -> None:
        good: set[State] = set()
        for s in parents:
            chain = [s]
            ends_well = s in good or self.settled(s)
            if not ends_well:
                for after in self.calm(s):
                    if after in good:
                        ends_well = True
                        break
                    chain.append(after)
                ends_well = ends_well or self.settled(chain[-1])
            if not ends_well:
                error = Broken("liveness", f"never settles: {chain[-1]}\n{self.describe(chain[-1])}")
                error.add_note(self.story(parents, s, None))
                raise error
            # Only calm states may be remembered: a state with budgets left is another state.
            good.update(c for c in chain if not any(c.budget))

    def describe(self, s: State) -> str:
        lines = [f"{n}: {getattr(self.endpoints[e], 'cells', None)}" for n, e in zip(self.nodes, s.ends, strict=True)]
        return "\n".join(lines)

    def story(self, parents: dict[State, Any], s: State, choice: Any) -> str:
        path = [] if choice is None else [(s, choice)]
        while (link := parents[s]) is not None:
            path.append(link)
            s = link[0]
        return "\n".join(self.tell(s, c) for s, c in reversed(path))

    def tell(self, s: State, choice: Any) -> str:
        name = choice[0]
        if name in ("deliver", "drop", "dup"):
            sender, to = self.links[choice[1]]
            return f"{name} {sender} -> {to}: {self.frames[s.chans[choice[1]][0]]}"
        if name == "late":
            link, frame = s.bag[choice[1]]
            return f"late {self.links[link]}: {self.frames[frame]}"
        if name == "timer":
            return f"timer {self.nodes[choice[1]]}: {self.armed[s.ends[choice[1]]][choice[2]]}"
        if name in ("task", "unreachable"):
            kind, node, about = s.tasks[choice[1]]
            return f"{name} {kind} {self.nodes[node]} {about}"
        if name in ("land", "err", "notice", "lose notice", "ended"):
            node, effect = self.operations[s.ops[choice[1]][0]]
            return f"{name} {node} {effect.op} {s.ops[choice[1]][1]:b}"
        return str(choice)


class _Draft:
    """A state while effects change it."""

    __slots__ = ("base", "chans", "ends", "landed", "ops", "products", "stages", "stale", "tasks")

    def __init__(self, s: State) -> None:
        self.base = s
        self.ends = list(s.ends)
        self.chans = list(s.chans)
        self.tasks = list(s.tasks)
        self.ops = list(s.ops)
        self.products = list(s.products)
        self.stages = list(s.stages)
        self.landed = list(s.landed)
        self.stale = list(s.stale)

    def state(self) -> State:
        return State(
            tuple(self.ends),
            tuple(self.chans),
            self.base.bag,
            tuple(sorted(self.tasks)),
            tuple(sorted(self.ops)),
            tuple(self.products),
            tuple(self.stages),
            tuple(self.landed),
            tuple(self.stale),
            self.base.budget,
            self.base.lives,
        )


def _alive(ops: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    return tuple((op, flags) for op, flags in ops if flags & ~ORPHAN)


_APPLY: dict[str, Callable[..., State]] = {
    "finish": Space.finish,
    "abort prefill": Space.abort_prefill,
    "decode": Space.decode,
    "admit": Space.admit,
    "abort": Space.abort,
    "deliver": Space.deliver,
    "drop": Space.drop,
    "dup": Space.dup,
    "late": Space.late,
    "task": Space.task,
    "unreachable": Space.unreachable,
    "lose": Space.lose,
    "restart": Space.restart,
    "land": Space.land,
    "err": Space.err,
    "notice": Space.notice,
    "lose notice": Space.lose_notice,
    "ended": Space.ended,
    "timer": Space.timer,
}
_ON_EFFECT: dict[type, Callable[..., None]] = {
    Send: Space.sent,
    Handshake: Space.shook,
    Fence: Space.fenced,
    ReadWord: Space.word_wanted,
    PostWrite: Space.wrote,
    PostRead: Space.read,
    ReleaseBlocks: Space.released,
    Enqueue: Space.enqueued,
    Commit: Space.committed,
    Resolve: Space.resolved,
    FreeBlocks: Space.freed,
    AnswerPrefill: Space.answered,
}
