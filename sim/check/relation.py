"""The one relation: what may happen in a state, and what it leads to.

`moves(state)` and `apply(state, move)` serve the exhaustive search, random walks, Hypothesis, replay and shrinking. A
move is a word and small numbers, in one fixed order; `names.py` says it in words that survive a change of the numbers.
Which moves there are stands here; what each does, with those of its kind: orders, frames, tasks, operations, timers,
deaths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from sim.check.alarms import Alarms
from sim.check.deaths import Deaths
from sim.check.frames import Frames
from sim.check.ghost import DECODING, ENDED_ERR, ENDED_OK, FLYING, NOTICE, ORPHAN, PIECE, READING, TOLD, Product, Stage
from sim.check.onesided import OneSided
from sim.check.scope import BUDGETED_TIMERS, TOKENS, Fault, Scope
from sim.check.tasks import Tasks
from sim.check.world import State

Move: TypeAlias = tuple[Any, ...]
ANSWERED = (Product.HELD, Product.RELEASED, Product.DEAD)
"""P has said what became of the prompt."""


class Relation(Frames, Tasks, OneSided, Alarms, Deaths):
    """`moves` and `apply` over a World."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.abortable = (Stage.KNOWN, Stage.ENQUEUED, Stage.GIVEN, Stage.ADMITTED, *DECODING * self.cluster.decodes)
        self._tail_moves: dict[State, tuple[Move, ...]] = {}
        self._chan_moves: dict[State, tuple[Move, ...]] = {}
        self._timer_moves: dict[tuple[int, int, int], tuple[Move, ...]] = {}
        self.do: dict[str, Callable[..., None]] = {
            "finish": self.finish,
            "abort prefill": self.abort_prefill,
            "cancel prefill": self.cancel_prefill,
            "report": self.tell_admitted,
            "preempt": self.preempt,
            "end": self.end,
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
            "outlive": self.outlive,
            "read": self.read,
            "land": self.land,
            "error": self.error,
            "notice": self.notice,
            "lose notice": self.lose_notice,
            "ended": self.ended,
            "timer": self.timer,
        }

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

    def _of_tail(self, state: State) -> Iterator[Move]:
        """Everything that endpoints, links and timers do not decide."""
        left, ghost, cluster = self.left(state), self.ghost_of(state), self.cluster
        for i, product in enumerate(ghost.products):
            if product == Product.QUEUED:
                yield ("finish", i)
                if left[Fault.PREFILL_ABORT]:
                    yield ("abort prefill", i)
            elif product == Product.COMPUTED:
                yield ("finish", i)
            if self.scope.late and left[Fault.ABORT] and product in (Product.QUEUED, Product.COMPUTED):
                yield ("cancel prefill", i)
        early = self.scope.concurrent and not self.scope.pulls
        for i, stage in enumerate(ghost.stages):
            if stage == Stage.UNBORN and (ghost.products[cluster.product_of[i]] in ANSWERED or early):
                yield ("decode", i)
            elif stage == Stage.ENQUEUED:
                if self.scope.hit_tokens == TOKENS:
                    yield ("hit", i)
                elif not self.scope.pool or not self.taken(ghost, i):
                    yield ("admit", i)
            elif stage == Stage.GIVEN:
                yield ("report", i)
            elif self.scope.decodes and stage in DECODING:
                yield ("end", i)
                if left[Fault.PREEMPT] and stage == Stage.COMMITTED:
                    yield ("preempt", i)
            if left[Fault.ABORT] and stage in self.abortable:
                yield ("abort", i)
        for i in range(len(self.bags.values[state[self.bag]])):
            yield ("late", i)
        for i, (kind, node, about) in enumerate(self.tasks_of(state)):
            if kind != "flush" or self.flushed(state, node, about):
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
        for engine in range(len(cluster.engines)):
            if left[self.death_of(engine)]:
                yield ("restart", engine)
                if self.scope.orphan and engine < self.scope.p_engines and not ghost.lives[engine]:
                    yield ("outlive", engine)

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
