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
    SourceReady,
    TimerFired,
    WordRead,
    WriteEnded,
)
from pdflow.protocol.ids import KvParams, engine_of
from pdflow.protocol.messages import Code
from pdflow.protocol.timers import Timer, TimerKind
from pdflow.protocol.values import Address, Xid
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
from sim.check.world import Draft, State, World

Move: TypeAlias = tuple[Any, ...]
READ_PIECE, LANDED_PIECE = 1 << PIECE, 1 << (PIECE + 3)
FLAGS = READ_PIECE - 1


class Relation(World):
    """`moves` and `apply` over a World."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.split = scope.chunks > 1 or not scope.done_is_remote
        """Whether operations read and land piece by piece."""
        self.fair = None if scope.dialect.control_frames or scope.horizon else self._fair_by_clocks
        self._tail_moves: dict[State, tuple[Move, ...]] = {}
        self._chan_moves: dict[State, tuple[Move, ...]] = {}
        self._timer_moves: dict[tuple[int, int, int], tuple[Move, ...]] = {}
        self._spent: dict[tuple[int, Fault], int] = {}
        self._put: dict[tuple[int, str, int, int], int] = {}
        self._flagged: dict[tuple[int, int, int], int] = {}
        self._splits: dict[int, tuple[int, int]] = {}
        self._fired: dict[tuple[int, int, int], tuple[Fault | None, int]] = {}
        self._born: dict[tuple[int, int], list[int]] = {}
        cluster, here = self.cluster, scope.hit_tokens
        self._finished = [
            PrefillFinished(xid, source, TOKENS, DIGEST + i, WEIGHTS)
            for i, (xid, source) in enumerate(zip(cluster.xids, cluster.sources, strict=True))
        ]
        self._admitted = [
            DecodeAdmitted(request_id, target, here, TOKENS - here, DIGEST + product, WEIGHTS)
            for request_id, target, product in zip(cluster.requests, cluster.targets, cluster.product_of, strict=True)
        ]
        self.do: dict[str, Callable[..., None]] = {
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
        draft = list(state)
        self.do[move[0]](draft, *move[1:])
        return tuple(draft)

    def left(self, state: State | Draft) -> tuple[int, ...]:
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
                read, landed = flags >> PIECE & 7, flags >> (PIECE + 3) & 7
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
        for i, timer in enumerate(self.armed[end] if self.scope.clocks else ()):
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

    # Changes of single slots. A move changes a draft: the state as a list.

    def operations(self, op: int) -> tuple[Address, int, Any]:
        """(node, its life, effect)"""
        found: tuple[Address, int, Any] = self.judge.operations.values[op]
        return found

    def spend(self, draft: Draft, fault: Fault) -> None:
        key = (draft[self.budget], fault)
        found = self._spent.get(key)
        if found is None:
            left = list(self.left(draft))
            left[fault] -= 1
            found = self._spent[key] = self.budgets.of(tuple(left))
        draft[self.budget] = found

    def put_ghost(self, draft: Draft, field: str, i: int, value: int) -> None:
        """Change one entry of one of the ghosts' tuples."""
        key = (draft[self.ghost], field, i, value)
        found = self._put.get(key)
        if found is None:
            ghost = self.ghost_of(draft)
            found = self._put[key] = self.ghosts.of(ghost._replace(**{field: _with(getattr(ghost, field), i, value)}))
        draft[self.ghost] = found

    def put_ops(self, draft: Draft, ops: list[tuple[int, int]]) -> None:
        draft[self.op] = self.ops.of(tuple(sorted((op, flags) for op, flags in ops if flags & FLAGS & ~ORPHAN)))

    def put_flags(self, draft: Draft, i: int, flags: int) -> None:
        key = (draft[self.op], i, flags)
        found = self._flagged.get(key)
        if found is None:
            ops = list(self.ops_of(draft))
            ops[i] = (ops[i][0], flags)
            self.put_ops(draft, ops)
            found = self._flagged[key] = draft[self.op]
        draft[self.op] = found

    def take_task(self, draft: Draft, i: int) -> tuple[str, int, int]:
        """A task, taken from those that wait."""
        tasks = self.tasks_of(draft)
        draft[self.task] = self.tasks.of(tasks[:i] + tasks[i + 1 :])
        return tasks[i]

    # Engines and clients.

    def finish(self, draft: Draft, i: int) -> None:
        """P has computed a prompt."""
        self.put_ghost(draft, "products", i, Product.HELD)
        self.event(draft, "P", self._finished[i])
        self.report(draft, i, True)

    def report(self, draft: Draft, product: int, ok: bool) -> None:
        """The router tells D how a prefill leg ended, which vllm-compat rests on."""
        if not self.scope.dialect.control_frames:
            for i, request_id in enumerate(self.cluster.requests):
                if self.cluster.product_of[i] == product and self.ghost_of(draft).stages[i] != Stage.UNBORN:
                    self.event(draft, "D", PrefillLegEnded(request_id, ok))

    def abort_prefill(self, draft: Draft, i: int) -> None:
        self.spend(draft, Fault.PREFILL_ABORT)
        self.put_ghost(draft, "products", i, Product.DEAD)
        self.event(draft, "P", PrefillAborted(self.cluster.xids[i], Code.PREFILL_ABORTED))
        self.report(draft, i, False)

    def decode(self, draft: Draft, i: int) -> None:
        """The decode leg reaches D."""
        cluster = self.cluster
        product = cluster.product_of[i]
        xid = cluster.xids[product]
        answered = self.ghost_of(draft).products[product] in (Product.HELD, Product.RELEASED)
        if self.scope.pulls and answered:
            params = self.judge.params[xid]
        else:
            params = KvParams(cluster.p, xid, cluster.prefill_ids[product], TOKENS)
        request_id = cluster.requests[i]
        self.put_ghost(draft, "stages", i, Stage.KNOWN)
        self.event(draft, "D", DecodeQueued(request_id, params, BLOCKS, 0))
        now = self.ghost_of(draft).products[product]
        if not self.scope.dialect.control_frames and now != Product.QUEUED:
            self.event(draft, "D", PrefillLegEnded(request_id, now != Product.DEAD))

    def admit(self, draft: Draft, i: int) -> None:
        """D's engine has a seat and blocks for it."""
        self.put_ghost(draft, "stages", i, Stage.ADMITTED)
        self.event(draft, "D", self._admitted[i])

    def _taken(self, ghost: Ghost, i: int) -> bool:
        """Whether another request still holds the blocks that this one would get. Decoding takes no time here."""
        pool = self.scope.pool
        return any(
            stage in (Stage.ADMITTED, Stage.RESOLVED) and j % pool == i % pool for j, stage in enumerate(ghost.stages)
        )

    def hit(self, draft: Draft, i: int) -> None:
        """The whole prompt is in D's prefix cache: nothing has to land."""
        self.put_ghost(draft, "landed", i, self.cluster.everything)
        self.put_ghost(draft, "stages", i, Stage.ADMITTED)
        self.event(draft, "D", DecodeHit(self.cluster.requests[i]))

    def abort(self, draft: Draft, i: int) -> None:
        """The client gives up."""
        self.spend(draft, Fault.ABORT)
        self.event(draft, "D", DecodeAborted(self.cluster.requests[i], Code.CANCELLED))

    # Frames.

    def deliver(self, draft: Draft, link: int) -> None:
        self.arrive(draft, link, self._take(draft, link))

    def _take(self, draft: Draft, link: int) -> int:
        """The oldest frame of a link, taken from it."""
        slot = self.first_link + link
        first, rest = self._split(draft[slot])
        draft[slot] = rest
        return first

    def _split(self, chan: int) -> tuple[int, int]:
        found = self._splits.get(chan)
        if found is None:
            frames = self.chans.values[chan]
            found = self._splits[chan] = (frames[0], self.chans.of(frames[1:]))
        return found

    def drop(self, draft: Draft, link: int) -> None:
        self.spend(draft, Fault.DROP)
        self._take(draft, link)

    def delay(self, draft: Draft, link: int) -> None:
        """Later frames overtake this one."""
        self.spend(draft, Fault.DELAY)
        self._keep(draft, link, self._take(draft, link))

    def duplicate(self, draft: Draft, link: int) -> None:
        self.spend(draft, Fault.DUP)
        self._keep(draft, link, self._split(draft[self.first_link + link])[0])

    def _keep(self, draft: Draft, link: int, frame: int) -> None:
        bag = self.bags.values[draft[self.bag]]
        draft[self.bag] = self.bags.of(tuple(sorted((*bag, (link, frame)))))

    def late(self, draft: Draft, i: int) -> None:
        """A duplicate arrives, or a frame that was overtaken."""
        bag = self.bags.values[draft[self.bag]]
        link, frame = bag[i]
        draft[self.bag] = self.bags.of(bag[:i] + bag[i + 1 :])
        self.arrive(draft, link, frame)

    def lose(self, draft: Draft, link: int) -> None:
        """A connection breaks at one end: what it had under way towards the other is gone."""
        name, peer = self.cluster.links[link]
        self.spend(draft, Fault.LOSE)
        draft[self.first_link + link] = 0
        self.event(draft, name, PeerLost(peer))

    # What an endpoint has asked for.

    def task_done(self, draft: Draft, i: int) -> None:
        kind, node, about = self.take_task(draft, i)
        nodes = self.cluster.nodes
        name = nodes[node]
        if kind == "handshake":
            life = self.life(self.ghost_of(draft), nodes[about])
            self.event(draft, name, HandshakeEnded(nodes[about], True, life))
        elif kind == "fence":
            self.fence(draft, name, nodes[about])
        elif kind == "flush":
            self.event(draft, name, FlushEnded(nodes[about], True))
        else:
            effect = self.operations(about)[2]
            self.event(draft, name, WordRead(effect.op, self.word(draft, effect)))

    def word(self, draft: Draft, effect: ReadWord) -> int:
        """P bumps its word when it lets go; which it has done by the time its product is released, at the latest."""
        xid = self.cluster.xids[self.cluster.product_of[self.judge.request_of(effect)]]
        cells = self.body(draft, effect.source).cells.values()
        held = any(cell.source is not None and cell.xid == xid for cell in cells)
        held = held or self._source_is_coming(draft, effect.source, xid)
        return self.judge.words[effect.source, effect.index] + (0 if held else 1)

    def _source_is_coming(self, draft: Draft, rank: Address, xid: Xid) -> bool:
        """Whether P's rank has yet to hear that it has something to let go of."""
        link = self.cluster.link_of.get(("P", rank))
        if link is None:
            return False
        frames = [self.frames.values[frame] for frame in self.chans.values[draft[self.first_link + link]]]
        return any(isinstance(frame, SourceReady) and frame.xid == xid for frame in frames)

    def fence(self, draft: Draft, name: Address, peer: Address) -> None:
        """Either end's fence: nothing of that link lands any more; its handles end badly."""
        ops = []
        for op, flags in self.ops_of(draft):
            node, _, effect = self.operations(op)
            if {node, _other(effect)} == {name, peer}:
                if flags & FLYING:
                    # One that was done before it had landed, and is cut off now, has not been done.
                    flags &= ~ENDED_OK
                    flags = flags & ~FLYING | _cut(flags)
                if flags & TOLD and node == name:
                    flags = 0
            ops.append((op, flags))
        self.put_ops(draft, ops)
        if name in self.cluster.d_ranks:
            pair = self.cluster.bit.get((self.cluster.p_ranks.index(peer), self.cluster.d_ranks.index(name)), 0)
            ghost = self.ghost_of(draft)
            for i, stage in enumerate(ghost.stages):
                if stage >= Stage.ADMITTED:
                    self.put_ghost(draft, "barred", i, ghost.barred[i] | pair)
        self.event(draft, name, FenceEnded(peer))

    def unreachable(self, draft: Draft, i: int) -> None:
        """A handshake fails."""
        self.spend(draft, Fault.UNREACHABLE)
        _, node, about = self.take_task(draft, i)
        self.event(draft, self.cluster.nodes[node], HandshakeEnded(self.cluster.nodes[about], False, 0))

    def flush_fails(self, draft: Draft, i: int) -> None:
        """What was posted may have landed, or not."""
        self.spend(draft, Fault.ERR)
        _, node, about = self.take_task(draft, i)
        self.event(draft, self.cluster.nodes[node], FlushEnded(self.cluster.nodes[about], False))

    # One-sided operations.

    def read(self, draft: Draft, i: int) -> None:
        """The next piece of the source is read."""
        op, flags = self.ops_of(draft)[i]
        effect = self.operations(op)[2]
        flags += READ_PIECE
        if flags >> PIECE & 7 == self.scope.chunks and not self._ends_landed(effect):
            flags |= 0 if flags & ORPHAN else ENDED_OK
        self.put_flags(draft, i, flags)
        if not flags & ORPHAN:  # Nobody has reused the memory of a process that is dead.
            self._note_stale(draft, effect)

    def _ends_landed(self, effect: PostWrite | PostRead) -> bool:
        """Whether a good end means that the bytes have landed. Of a READ it does: they land where its end is seen."""
        return self.scope.done_is_remote or type(effect) is PostRead

    def _note_stale(self, draft: Draft, effect: PostWrite | PostRead) -> None:
        request = self.judge.request_of(effect)
        product = self.cluster.product_of[request]
        if isinstance(effect, PostWrite):
            product = effect.source.generation - SOURCE
        if self.ghost_of(draft).products[product] != Product.HELD:
            self.put_ghost(draft, "content", request, Content.STALE)

    def land(self, draft: Draft, i: int) -> None:
        """The next piece lands at D, or the whole at once."""
        op, flags = self.ops_of(draft)[i]
        effect = self.operations(op)[2]
        ended = ENDED_OK
        if self.split:
            flags += LANDED_PIECE
            if flags >> (PIECE + 3) & 7 < self.scope.chunks:
                self.put_flags(draft, i, flags)
                return
            ended = ENDED_OK if self._ends_landed(effect) else 0
        elif type(effect) is PostRead:
            self._note_stale(draft, effect)
        request = self.judge.request_of(effect)
        bit = self.cluster.bit[effect.op.p_rank, effect.op.d_rank]
        self.put_ghost(draft, "landed", request, self.ghost_of(draft).landed[request] | bit)
        notice = 0 if effect.notice is None else NOTICE
        self.put_flags(draft, i, flags & ~FLYING | notice | (0 if flags & ORPHAN else ended))

    def error(self, draft: Draft, i: int) -> None:
        """A handle ends badly, which says nothing of its bytes."""
        self.spend(draft, Fault.ERR)
        self.put_flags(draft, i, self.ops_of(draft)[i][1] | ENDED_ERR)

    def notice(self, draft: Draft, i: int) -> None:
        op, flags = self.ops_of(draft)[i]
        node, life, effect = self.operations(op)
        self.put_flags(draft, i, flags & ~NOTICE)
        self.event(draft, _other(effect), Received(node, FIRST_LIFE[engine_of(node)] + life, effect.notice))

    def lose_notice(self, draft: Draft, i: int) -> None:
        self.spend(draft, Fault.DROP)
        self.put_flags(draft, i, self.ops_of(draft)[i][1] & ~NOTICE)

    def ended(self, draft: Draft, i: int) -> None:
        """Who posted it hears how its handle ended."""
        op, flags = self.ops_of(draft)[i]
        node, _, effect = self.operations(op)
        ok = bool(flags & ENDED_OK)
        left = flags & ~(ENDED_OK | ENDED_ERR)
        if type(effect) is PostRead:
            left &= ~(FLYING | READING)
        if left & FLYING and not ok:
            left |= TOLD
        else:
            left &= ~READING
        self.put_flags(draft, i, left)
        self.event(draft, node, (WriteEnded if type(effect) is PostWrite else ReadEnded)(effect.op, ok))

    # Time, and death.

    def timer(self, draft: Draft, node: int, i: int) -> None:
        key = (node, draft[node], i)
        found = self._fired.get(key)
        if found is None:
            timer = self.armed[draft[node]][i]
            found = self._fired[key] = (BUDGETED_TIMERS.get(timer.kind), self.events.of((node, TimerFired(timer))))
        fault, event = found
        if fault is not None:
            self.spend(draft, fault)
        self.turn(draft, node, event)

    def restart(self, draft: Draft, engine: int) -> None:
        """An engine's processes die, and others start under the same name. Nobody is left to be told of the old life's
        operations; what its NIC has begun may land all the same, but not in the memory of a process that is gone."""
        cluster = self.cluster
        name = "PD"[engine]
        self.spend(draft, (Fault.P_RESTART, Fault.D_RESTART)[engine])
        self.put_ops(draft, [(op, self._outliving(name, op, flags)) for op, flags in self.ops_of(draft)])
        if name == "P":
            for product, now in enumerate(self.ghost_of(draft).products):
                if now == Product.QUEUED:
                    self.report(draft, product, False)
                self.put_ghost(draft, "products", product, _AFTER_P.get(now, now))
        else:
            for i, stage in enumerate(self.ghost_of(draft).stages):
                if stage != Stage.UNBORN:
                    self.put_ghost(draft, "stages", i, Stage.FREED)
                    self.put_ghost(draft, "barred", i, self.cluster.everything)
        lives = self.ghost_of(draft).lives[engine] + 1
        self.put_ghost(draft, "lives", engine, lives)
        first = 0 if name == "P" else self.span[-1][0]
        born = self._born.get((engine, lives))
        if born is None:
            life = FIRST_LIFE[name] + lives
            bodies = cluster.prefill_engine(life) if name == "P" else cluster.decode_engine(life)
            born = [self.endpoint(cluster.nodes[slot], body) for slot, body in enumerate(bodies, first)]
            self._born[engine, lives] = born
        draft[first : first + len(born)] = born
        for link, ends in enumerate(cluster.links):
            if name in map(engine_of, ends):
                draft[self.first_link + link] = 0
        draft[self.bag] = self.bags.of(())
        kept = tuple(task for task in self.tasks_of(draft) if engine_of(cluster.nodes[task[1]]) != name)
        draft[self.task] = self.tasks.of(kept)

    def _outliving(self, name: str, op: int, flags: int) -> int:
        """What is left of an operation when this engine dies."""
        node, _, effect = self.operations(op)
        if engine_of(node) == name:
            if type(effect) is PostRead or not flags & (FLYING | NOTICE):
                return 0
            return flags & ~(ENDED_OK | ENDED_ERR | TOLD | READING) | ORPHAN
        if type(effect) is PostWrite:
            flags &= ~NOTICE
            if flags & FLYING:
                return flags & ~FLYING | _cut(flags)
        return flags


_AFTER_P: dict[int, int] = {Product.HELD: Product.RELEASED, Product.QUEUED: Product.DEAD}


def _with(values: tuple[Any, ...], i: int, value: Any) -> Any:
    return (*values[:i], value, *values[i + 1 :])


def _cut(flags: int) -> int:
    """What is still to be said of an operation that can land no more: a handle ends once."""
    return ENDED_ERR if flags & READING and not flags & (ENDED_OK | ENDED_ERR | TOLD | ORPHAN) else 0


def _other(effect: PostWrite | PostRead) -> Address:
    """Whom the one that posts it does not name as itself."""
    return effect.to if isinstance(effect, PostWrite) else effect.source
