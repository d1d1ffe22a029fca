"""A one-sided operation as its own actor: its source is read, it lands, its handle ends, its notice arrives."""

from __future__ import annotations

from typing import Any

from pdflow.protocol.effects import PostRead, PostWrite
from pdflow.protocol.events import ReadEnded, Received, WriteEnded
from pdflow.protocol.ids import engine_of
from pdflow.protocol.values import Address
from sim.check.changes import Changes
from sim.check.cluster import FIRST_LIFE, SOURCE
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
    Product,
)
from sim.check.scope import Fault, Scope
from sim.check.world import Draft, State

READ_PIECE, LANDED_PIECE = 1 << PIECE, 1 << (PIECE + 3)


class OneSided(Changes):
    """The moves of operations."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self._notices: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._ends: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.split = scope.chunks > 1 or not scope.done_is_remote
        """Whether operations read and land piece by piece."""

    def piece(self, state: State, flags: int, move: tuple[Any, ...]) -> str:
        """Which piece a move reads or lands, in words; nothing where an operation has only one."""
        if not self.split:
            return ""
        return f" piece {(flags >> PIECE & 7 if move[0] == 'read' else flags >> (PIECE + 3) & 7) + 1}"

    def read(self, draft: Draft, i: int) -> None:
        """The next piece of the source is read."""
        op, flags = self.ops_of(draft)[i]
        node, _, effect = self.operations(op)
        flags += READ_PIECE
        if flags >> PIECE & 7 == self.scope.chunks and not self._ends_landed(effect):
            flags |= 0 if flags & ORPHAN else ENDED_OK
        self.put_flags(draft, i, flags)
        if not flags & ORPHAN and node not in self.cluster.orphans:  # Nobody reuses the memory of a life that is over.
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
        key = (draft[self.op], i)
        found = self._notices.get(key)
        if found is None:
            op, flags = self.ops_of(draft)[i]
            node, life, effect = self.operations(op)
            self.put_flags(draft, i, flags & ~NOTICE)
            sender, at = self.cluster.orphans.get(node, node), self.cluster.at[other_end(effect)]
            frame = Received(sender, FIRST_LIFE[engine_of(sender)] + life, effect.notice)
            found = self._notices[key] = (draft[self.op], at, self.events.of((at, frame)))
        draft[self.op], at, event = found
        self.turn(draft, at, event)

    def lose_notice(self, draft: Draft, i: int) -> None:
        self.spend(draft, Fault.DROP)
        self.put_flags(draft, i, self.ops_of(draft)[i][1] & ~NOTICE)

    def ended(self, draft: Draft, i: int) -> None:
        """Who posted it hears how its handle ended."""
        key = (draft[self.op], i)
        found = self._ends.get(key)
        if found is None:
            found = self._ends[key] = self._end(draft, i)
        draft[self.op], at, event = found
        self.turn(draft, at, event)

    def _end(self, draft: Draft, i: int) -> tuple[int, int, int]:
        """The operations afterwards, and who hears of it, and what: an event by its number."""
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
        at = self.cluster.at[node]
        event = (WriteEnded if type(effect) is PostWrite else ReadEnded)(effect.op, ok)
        return draft[self.op], at, self.events.of((at, event))


def cut(flags: int) -> int:
    """What is still to be said of an operation that can land no more: a handle ends once."""
    return ENDED_ERR if flags & READING and not flags & (ENDED_OK | ENDED_ERR | TOLD | ORPHAN) else 0


def other_end(effect: PostWrite | PostRead) -> Address:
    """Whom the one that posts it does not name as itself."""
    return effect.to if isinstance(effect, PostWrite) else effect.source
