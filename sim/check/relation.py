"""The one relation: what may happen in a state, and what it leads to.

`moves(state)` and `apply(state, move)` serve the exhaustive search, random walks, Hypothesis, replay and shrinking. A
move is a word and small numbers, in one fixed order; `names.py` says it in words that survive a change of the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from pdflow.protocol.effects import PostRead, PostWrite, ReadWord
from pdflow.protocol.events import (
    DecodeAborted,
    DecodeAdmitted,
    DecodeHit,
    DecodeQueued,
    FenceEnded,
    FlushEnded,
    HandshakeEnded,
    PeerLost,
    PrefillAborted,
    PrefillFinished,
    PrefillLegEnded,
    ReadEnded,
    Received,
    TimerFired,
    WordRead,
    WriteEnded,
)
from pdflow.protocol.ids import KvParams, engine_of
from pdflow.protocol.messages import Code
from pdflow.protocol.timers import Timer, TimerKind
from pdflow.protocol.values import Address
from sim.check.cluster import BLOCKS, DIGEST, FIRST_LIFE, SOURCE, WEIGHTS
from sim.check.ghost import (
    ENDED_ERR,
    ENDED_OK,
    FLYING,
    NOTICE,
    ORPHAN,
    PIECE,
    READING,
    TOLD,
    Content,
    Ghost,
    Product,
    Stage,
)
from sim.check.scope import BUDGETED_TIMERS, TOKENS, Fault, Scope
from sim.check.world import State, World

Move: TypeAlias = tuple[Any, ...]
READ_PIECE, LANDED_PIECE = 1 << PIECE, 1 << (PIECE + 3)
FLAGS = READ_PIECE - 1


class Relation(World):
    """`moves` and `apply` over a World."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.split = scope.chunks > 1 or not scope.done_is_remote
        """Whether operations read and land piece by piece."""
        self.fair = self._fair_by_clocks if not scope.dialect.control_frames else None
        self._tail_moves: dict[State, tuple[Move, ...]] = {}
        self._chan_moves: dict[State, tuple[Move, ...]] = {}
        self._timer_moves: dict[tuple[int, int, int], tuple[Move, ...]] = {}
        self.do: dict[str, Callable[..., State]] = {
            "finish": self.finish,
            "abort prefill": self.abort_prefill,
            "decode": self.decode,
            "admit": self.admit,
            "hit": self.hit,
            "abort": self.abort,
            "deliver": self.deliver,
            "drop": self.drop,
            "delay": self.delay,
            "duplicate": self.duplicate,
            "late": self.late,
            "task": self.task_done,
            "unreachable": self.unreachable,
            "flush fails": self.flush_fails,
            "lose": self.lose,
            "restart": self.restart,
            "read": self.read,
            "land": self.land,
            "error": self.error,
            "notice": self.notice,
            "lose notice": self.lose_notice,
            "ended": self.ended,
            "timer": self.timer,
        }

    # What may happen.

    def moves(self, state: State) -> list[Move]:
        """In one fixed order."""
        tail = state[self.bag :]
        found = self._tail_moves.get(tail)
        if found is None:
            found = self._tail_moves[tail] = tuple(self._of_tail(state))
        moves = list(found)
        chans = (*state[self.first_link : self.bag], state[self.budget])
        found = self._chan_moves.get(chans)
        if found is None:
            found = self._chan_moves[chans] = tuple(self._of_chans(state))
        moves += found
        budget = state[self.budget]
        for node, end in enumerate(state[: self.first_link]):
            if self.armed[end]:
                key = (node, end, budget)
                timers = self._timer_moves.get(key)
                if timers is None:
                    timers = self._timer_moves[key] = tuple(self._of_timers(node, end, budget))
                moves += timers if self.fair is None else (move for move in timers if self.fair(state, node, move[2]))
        return moves

    def apply(self, state: State, move: Move) -> State:
        """Raises Broken if an invariant does not hold."""
        return self.do[move[0]](state, *move[1:])

    def left(self, state: State) -> tuple[int, ...]:
        """What is left of every budget, by Fault."""
        left: tuple[int, ...] = self.budgets.values[state[self.budget]]
        return left

    def _of_tail(self, state: State) -> Iterator[Move]:
        """Everything that endpoints, links and timers do not decide."""
        left, ghost, cluster = self.left(state), self.ghost_of(state), self.cluster
        for i, product in enumerate(ghost.products):
            if product == Product.QUEUED:
                yield ("finish", i)
                if left[Fault.PREFILL_ABORT]:
                    yield ("abort prefill", i)
        early = self.scope.concurrent and not self.scope.pulls
        for i, stage in enumerate(ghost.stages):
            if stage == Stage.UNBORN and (ghost.products[cluster.product_of[i]] >= Product.HELD or early):
                yield ("decode", i)
            elif stage == Stage.ENQUEUED:
                if self.scope.hit_tokens == TOKENS:
                    yield ("hit", i)
                elif not self.scope.pool or not self._taken(ghost, i):
                    yield ("admit", i)
            if left[Fault.ABORT] and Stage.KNOWN <= stage <= Stage.ADMITTED:
                yield ("abort", i)
        for i in range(len(self.bags.values[state[self.bag]])):
            yield ("late", i)
        for i, (kind, node, about) in enumerate(self.tasks_of(state)):
            if kind != "flush" or self._flushed(state, node, about):
                yield ("task", i)
            if kind == "handshake" and left[Fault.UNREACHABLE]:
                yield ("unreachable", i)
            if kind == "flush" and left[Fault.ERR]:
                yield ("flush fails", i)
        for i, (_, flags) in enumerate(self.ops_of(state)):
            yield from self._of_operation(i, flags, left)
        if left[Fault.LOSE]:
            for link in range(cluster.between_engines):
                yield ("lose", link)
        for engine, fault in ((0, Fault.P_RESTART), (1, Fault.D_RESTART)):
            if left[fault]:
                yield ("restart", engine)

    def _of_operation(self, i: int, flags: int, left: tuple[int, ...]) -> Iterator[Move]:
        if flags & FLYING and not flags & (ENDED_ERR | TOLD):
            if not self.split:
                yield ("land", i)
            else:
                read, landed = flags >> PIECE & 7, flags >> (PIECE + 3)
                if read < self.scope.chunks:
                    yield ("read", i)
                if landed < read:
                    yield ("land", i)
            if left[Fault.ERR] and flags & READING and not flags & (ORPHAN | ENDED_OK):
                yield ("error", i)
        if flags & NOTICE:
            yield ("notice", i)
            if left[Fault.DROP]:
                yield ("lose notice", i)
        if flags & (ENDED_OK | ENDED_ERR):
            yield ("ended", i)

    def _of_chans(self, state: State) -> Iterator[Move]:
        left = self.left(state)
        for link in range(len(self.cluster.links)):
            if state[self.first_link + link]:
                yield ("deliver", link)
                if link < self.cluster.between_engines:
                    if left[Fault.DROP]:
                        yield ("drop", link)
                    if left[Fault.DELAY]:
                        yield ("delay", link)
                    if left[Fault.DUP]:
                        yield ("duplicate", link)

    def _of_timers(self, node: int, end: int, budget: int) -> Iterator[Move]:
        left = self.budgets.values[budget]
        for i, timer in enumerate(self.armed[end]):
            fault = BUDGETED_TIMERS.get(timer.kind)
            if fault is None or left[fault]:
                yield ("timer", node, i)

    def _fair_by_clocks(self, state: State, node: int, index: int) -> bool:
        """What vllm-compat rests on clocks for (PROTOCOL 7.2): that they agree is assumed here, and nowhere in strict.

        D frees a quarantine once a correctly running P cannot write any more; a D that is not silent keeps P's lease.
        """
        return self.by_clocks(state, self.armed[state[node]][index])

    def by_clocks(self, state: State, timer: Timer) -> bool:
        """Whether this timer may fire, if clocks agree (vllm-compat)."""
        ghost = self.ghost_of(state)
        if timer.kind is TimerKind.RECLAIM:
            under_way = any(state[self.first_link : self.bag]) or self.bags.values[state[self.bag]]
            held = any(product in (Product.QUEUED, Product.HELD) for product in ghost.products)
            return not under_way and not held and not self.ops_of(state)
        wanted = any(stage not in (Stage.COMMITTED, Stage.FREED) for stage in ghost.stages)
        return timer.kind is not TimerKind.LEASE or not self.scope.pulls or not (wanted or self.ops_of(state))

    def _flushed(self, state: State, node: int, peer: int) -> bool:
        """Whether everything that this node has posted to that peer has landed."""
        nodes = self.cluster.nodes
        for op, flags in self.ops_of(state):
            owner, _, effect = self.operations(op)
            if flags & FLYING and owner == nodes[node] and _other(effect) == nodes[peer]:
                return False
        return True

    # Changes of single slots.

    def operations(self, op: int) -> tuple[Address, int, Any]:
        """(node, its life, effect)"""
        found: tuple[Address, int, Any] = self.judge.operations.values[op]
        return found

    def spend(self, state: State, fault: Fault) -> State:
        left = list(self.left(state))
        left[fault] -= 1
        return self.put(state, self.budget, self.budgets.of(tuple(left)))

    @staticmethod
    def put(state: State, slot: int, value: int) -> State:
        return (*state[:slot], value, *state[slot + 1 :])

    def put_ghost(self, state: State, **changed: Any) -> State:
        return self.put(state, self.ghost, self.ghosts.of(self.ghost_of(state)._replace(**changed)))

    def put_product(self, state: State, i: int, product: Product) -> State:
        return self.put_ghost(state, products=_with(self.ghost_of(state).products, i, product))

    def put_stage(self, state: State, i: int, stage: Stage) -> State:
        return self.put_ghost(state, stages=_with(self.ghost_of(state).stages, i, stage))

    def put_ops(self, state: State, ops: list[tuple[int, int]]) -> State:
        alive = tuple(sorted((op, flags) for op, flags in ops if flags & FLAGS & ~ORPHAN))
        return self.put(state, self.op, self.ops.of(alive))

    def put_flags(self, state: State, i: int, flags: int) -> State:
        ops = list(self.ops_of(state))
        ops[i] = (ops[i][0], flags)
        return self.put_ops(state, ops)

    def without_task(self, state: State, i: int) -> State:
        tasks = self.tasks_of(state)
        return self.put(state, self.task, self.tasks.of(tasks[:i] + tasks[i + 1 :]))

    # Engines and clients.

    def finish(self, state: State, i: int) -> State:
        """P has computed a prompt."""
        state = self.put_product(state, i, Product.HELD)
        finished = PrefillFinished(self.cluster.xids[i], self.cluster.sources[i], TOKENS, DIGEST + i, WEIGHTS)
        return self.report(self.feed(state, "P", finished), i, True)

    def report(self, state: State, product: int, ok: bool) -> State:
        """The router tells D how a prefill leg ended, which vllm-compat rests on."""
        if not self.scope.dialect.control_frames:
            for i, request_id in enumerate(self.cluster.requests):
                if self.cluster.product_of[i] == product and self.ghost_of(state).stages[i] != Stage.UNBORN:
                    state = self.feed(state, "D", PrefillLegEnded(request_id, ok))
        return state

    def abort_prefill(self, state: State, i: int) -> State:
        state = self.put_product(self.spend(state, Fault.PREFILL_ABORT), i, Product.DEAD)
        return self.feed(state, "P", PrefillAborted(self.cluster.xids[i], Code.PREFILL_ABORTED))

    def decode(self, state: State, i: int) -> State:
        """The decode leg reaches D."""
        cluster = self.cluster
        product = cluster.product_of[i]
        xid = cluster.xids[product]
        params = self.judge.params.get(xid) if self.scope.pulls else None
        if params is None:
            params = KvParams(cluster.p, xid, cluster.prefill_ids[product], TOKENS)
        request_id = cluster.requests[i]
        state = self.feed(self.put_stage(state, i, Stage.KNOWN), "D", DecodeQueued(request_id, params, BLOCKS, 0))
        now = self.ghost_of(state).products[product]
        if not self.scope.dialect.control_frames and now != Product.QUEUED:
            state = self.feed(state, "D", PrefillLegEnded(request_id, now != Product.DEAD))
        return state

    def admit(self, state: State, i: int) -> State:
        """D's engine has a seat and blocks for it."""
        cluster = self.cluster
        digest = DIGEST + cluster.product_of[i]
        here = self.scope.hit_tokens
        event = DecodeAdmitted(cluster.requests[i], cluster.targets[i], here, TOKENS - here, digest, WEIGHTS)
        return self.feed(self.put_stage(state, i, Stage.ADMITTED), "D", event)

    def _taken(self, ghost: Ghost, i: int) -> bool:
        """Whether another request still holds the blocks that this one would get. Decoding takes no time here."""
        pool = self.scope.pool
        return any(
            stage in (Stage.ADMITTED, Stage.RESOLVED) and j % pool == i % pool for j, stage in enumerate(ghost.stages)
        )

    def hit(self, state: State, i: int) -> State:
        """The whole prompt is in D's prefix cache: nothing has to land."""
        landed = _with(self.ghost_of(state).landed, i, self.cluster.everything)
        state = self.put_ghost(self.put_stage(state, i, Stage.ADMITTED), landed=landed)
        return self.feed(state, "D", DecodeHit(self.cluster.requests[i]))

    def abort(self, state: State, i: int) -> State:
        """The client gives up."""
        event = DecodeAborted(self.cluster.requests[i], Code.CANCELLED)
        return self.feed(self.spend(state, Fault.ABORT), "D", event)

    # Frames.

    def deliver(self, state: State, link: int) -> State:
        draft = list(state)
        frame = self._take(draft, link)
        self.arrive(draft, link, frame)
        return tuple(draft)

    def _take(self, draft: list[int], link: int) -> int:
        """The oldest frame of a link, taken from it."""
        slot = self.first_link + link
        frames: tuple[int, ...] = self.chans.values[draft[slot]]
        draft[slot] = self.chans.of(frames[1:])
        return frames[0]

    def drop(self, state: State, link: int) -> State:
        draft = list(self.spend(state, Fault.DROP))
        self._take(draft, link)
        return tuple(draft)

    def delay(self, state: State, link: int) -> State:
        """Later frames overtake this one."""
        draft = list(self.spend(state, Fault.DELAY))
        late = (link, self._take(draft, link))
        draft[self.bag] = self.bags.of(tuple(sorted((*self.bags.values[draft[self.bag]], late))))
        return tuple(draft)

    def duplicate(self, state: State, link: int) -> State:
        bag = self.bags.values[state[self.bag]]
        frame = self.chans.values[state[self.first_link + link]][0]
        state = self.spend(state, Fault.DUP)
        return self.put(state, self.bag, self.bags.of(tuple(sorted((*bag, (link, frame))))))

    def late(self, state: State, i: int) -> State:
        """A duplicate arrives."""
        bag = self.bags.values[state[self.bag]]
        link, frame = bag[i]
        draft = list(state)
        draft[self.bag] = self.bags.of(bag[:i] + bag[i + 1 :])
        self.arrive(draft, link, frame)
        return tuple(draft)

    def lose(self, state: State, link: int) -> State:
        """A connection breaks at one end: what it had under way towards the other is gone."""
        name, peer = self.cluster.links[link]
        state = self.put(self.spend(state, Fault.LOSE), self.first_link + link, 0)
        return self.feed(state, name, PeerLost(peer))

    # What an endpoint has asked for.

    def task_done(self, state: State, i: int) -> State:
        kind, node, about = self.tasks_of(state)[i]
        state = self.without_task(state, i)
        nodes = self.cluster.nodes
        name = nodes[node]
        if kind == "handshake":
            life = self.life(self.ghost_of(state), nodes[about])
            return self.feed(state, name, HandshakeEnded(nodes[about], True, life))
        if kind == "fence":
            return self.fence(state, name, nodes[about])
        if kind == "flush":
            return self.feed(state, name, FlushEnded(nodes[about], True))
        effect = self.operations(about)[2]
        return self.feed(state, name, WordRead(effect.op, self.word(state, effect)))

    def word(self, state: State, effect: ReadWord) -> int:
        """P bumps its word when it lets go; which it has done by the time its product is released, at the latest."""
        xid = self.cluster.xids[self.cluster.product_of[self.judge.request_of(effect)]]
        cells = self.body(state, effect.source).cells.values()
        held = any(cell.source is not None and cell.xid == xid for cell in cells)
        return self.judge.words[effect.source, effect.index] + (0 if held else 1)

    def fence(self, state: State, name: Address, peer: Address) -> State:
        """Either end's fence: nothing of that link lands any more; its handles end badly."""
        ops = []
        for op, flags in self.ops_of(state):
            node, _, effect = self.operations(op)
            if {node, _other(effect)} == {name, peer} and flags & FLYING:
                told = flags & (ENDED_ERR | TOLD | ORPHAN)
                flags = flags & ~FLYING if told else flags & ~FLYING | ENDED_ERR
                if flags & TOLD and node == name:
                    flags = 0
            ops.append((op, flags))
        return self.feed(self.put_ops(state, ops), name, FenceEnded(peer))

    def unreachable(self, state: State, i: int) -> State:
        """A handshake fails."""
        _, node, about = self.tasks_of(state)[i]
        state = self.without_task(self.spend(state, Fault.UNREACHABLE), i)
        return self.feed(state, self.cluster.nodes[node], HandshakeEnded(self.cluster.nodes[about], False, 0))

    def flush_fails(self, state: State, i: int) -> State:
        """What was posted may have landed, or not."""
        _, node, about = self.tasks_of(state)[i]
        state = self.without_task(self.spend(state, Fault.ERR), i)
        return self.feed(state, self.cluster.nodes[node], FlushEnded(self.cluster.nodes[about], False))

    # One-sided operations.

    def read(self, state: State, i: int) -> State:
        """The next piece of the source is read."""
        op, flags = self.ops_of(state)[i]
        flags += READ_PIECE
        if flags >> PIECE & 7 == self.scope.chunks and not self.scope.done_is_remote:
            flags |= 0 if flags & ORPHAN else ENDED_OK
        return self._note_stale(self.put_flags(state, i, flags), self.operations(op)[2])

    def _note_stale(self, state: State, effect: PostWrite | PostRead) -> State:
        request = self.judge.request_of(effect)
        ghost = self.ghost_of(state)
        product = self.cluster.product_of[request]
        if isinstance(effect, PostWrite):
            product = effect.source.generation - SOURCE
        if ghost.products[product] == Product.HELD:
            return state
        return self.put_ghost(state, content=_with(ghost.content, request, Content.STALE))

    def land(self, state: State, i: int) -> State:
        """The next piece lands at D, or the whole at once."""
        op, flags = self.ops_of(state)[i]
        effect = self.operations(op)[2]
        if self.split:
            flags += LANDED_PIECE
            if flags >> (PIECE + 3) < self.scope.chunks:
                return self.put_flags(state, i, flags)
            ended = ENDED_OK if self.scope.done_is_remote else 0
        else:
            state = self._note_stale(state, effect) if type(effect) is PostRead else state
            ended = ENDED_OK
        request = self.judge.request_of(effect)
        landed = self.ghost_of(state).landed
        bit = self.cluster.bit[effect.op.p_rank, effect.op.d_rank]
        state = self.put_ghost(state, landed=_with(landed, request, landed[request] | bit))
        notice = 0 if effect.notice is None else NOTICE
        return self.put_flags(state, i, flags & ~FLYING | notice | (0 if flags & ORPHAN else ended))

    def error(self, state: State, i: int) -> State:
        """A handle ends badly, which says nothing of its bytes."""
        return self.put_flags(self.spend(state, Fault.ERR), i, self.ops_of(state)[i][1] | ENDED_ERR)

    def notice(self, state: State, i: int) -> State:
        op, flags = self.ops_of(state)[i]
        node, life, effect = self.operations(op)
        event = Received(node, FIRST_LIFE[engine_of(node)] + life, effect.notice)
        return self.feed(self.put_flags(state, i, flags & ~NOTICE), _other(effect), event)

    def lose_notice(self, state: State, i: int) -> State:
        return self.put_flags(self.spend(state, Fault.DROP), i, self.ops_of(state)[i][1] & ~NOTICE)

    def ended(self, state: State, i: int) -> State:
        """Who posted it hears how its handle ended."""
        op, flags = self.ops_of(state)[i]
        node, _, effect = self.operations(op)
        ok = bool(flags & ENDED_OK)
        left = flags & ~(ENDED_OK | ENDED_ERR)
        if type(effect) is PostRead:
            left &= ~(FLYING | READING)
        if left & FLYING and not ok:
            left |= TOLD
        else:
            left &= ~READING
        event: Any = (WriteEnded if type(effect) is PostWrite else ReadEnded)(effect.op, ok)
        return self.feed(self.put_flags(state, i, left), node, event)

    # Time, and death.

    def timer(self, state: State, node: int, i: int) -> State:
        timer = self.armed[state[node]][i]
        fault = BUDGETED_TIMERS.get(timer.kind)
        state = state if fault is None else self.spend(state, fault)
        return self.feed(state, self.cluster.nodes[node], TimerFired(timer))

    def restart(self, state: State, engine: int) -> State:
        """An engine's processes die, and others start under the same name. Nobody is left to be told of the old life's
        operations; what its NIC has begun may land all the same, but not in the memory of a process that is gone."""
        cluster = self.cluster
        name = "PD"[engine]
        ops = []
        for op, flags in self.ops_of(state):
            node, _, effect = self.operations(op)
            if engine_of(node) == name:
                flags = flags & ~(ENDED_OK | ENDED_ERR | TOLD | READING) | ORPHAN if flags & (FLYING | NOTICE) else 0
                if type(effect) is PostRead:
                    flags = 0
            elif type(effect) is PostWrite:
                flags = flags & ~NOTICE
                flags = flags & ~FLYING | (0 if flags & (ENDED_ERR | TOLD) else ENDED_ERR) if flags & FLYING else flags
            ops.append((op, flags))
        state = self.put_ops(self.spend(state, (Fault.P_RESTART, Fault.D_RESTART)[engine]), ops)
        ghost = self.ghost_of(state)
        lives = _with(ghost.lives, engine, ghost.lives[engine] + 1)
        if name == "P":
            for product, now in enumerate(ghost.products):
                if now == Product.QUEUED:
                    state = self.report(state, product, False)
            products = tuple(_AFTER_P.get(product, product) for product in self.ghost_of(state).products)
            state = self.put_ghost(state, products=products, lives=lives)
        else:
            stages = tuple(stage if stage == Stage.UNBORN else Stage.FREED for stage in ghost.stages)
            state = self.put_ghost(state, stages=stages, lives=lives)
        life = FIRST_LIFE[name] + lives[engine]
        bodies = cluster.prefill_engine(life) if name == "P" else cluster.decode_engine(life)
        draft = list(state)
        first = 0 if name == "P" else self.span[-1][0]
        for slot, body in enumerate(bodies, first):
            draft[slot] = self.endpoint(cluster.nodes[slot], body)
        for link, ends in enumerate(cluster.links):
            if name in map(engine_of, ends):
                draft[self.first_link + link] = 0
        draft[self.bag] = self.bags.of(())
        kept = tuple(task for task in self.tasks_of(state) if engine_of(cluster.nodes[task[1]]) != name)
        draft[self.task] = self.tasks.of(kept)
        return tuple(draft)


_AFTER_P: dict[int, int] = {Product.HELD: Product.RELEASED, Product.QUEUED: Product.DEAD}


def _with(values: tuple[Any, ...], i: int, value: Any) -> Any:
    return (*values[:i], value, *values[i + 1 :])


def _other(effect: PostWrite | PostRead) -> Address:
    """Whom the one that posts it does not name as itself."""
    return effect.to if isinstance(effect, PostWrite) else effect.source
