"""Moves of one-sided operations: the source is read, it lands, its handle ends, its notification arrives."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Protocol

from pdflow.protocol.effects import PostRead, PostWrite
from pdflow.protocol.events import ReadEnded, Received, WriteEnded
from pdflow.protocol.ids import engine_of
from pdflow.protocol.values import Address
from pdflow_sim.check.moves.acts import Acts, Move
from pdflow_sim.check.scopes.scope import FaultKind
from pdflow_sim.check.state.cluster import FIRST_INCARNATION, SOURCE
from pdflow_sim.check.state.shadow_state import (
    DISCARDED,
    ENDED_ERR,
    ENDED_OK,
    ERROR_REPORTED,
    IN_FLIGHT,
    NOTIFICATION,
    ORPHAN,
    PIECE,
    READING,
    Content,
    PromptStage,
)
from pdflow_sim.check.state.space import Draft, State, StateSpace
from pdflow_sim.check.state.turns import TurnRunner

READ_PIECE, LANDED_PIECE = 1 << PIECE, 1 << (PIECE + 3)


class Operations(Protocol):
    """Interface of the component that owns the one-sided operations."""

    split: bool
    """Whether operations read and land piece by piece."""

    def acts(self) -> Acts: ...

    def moves(self, state: State) -> Iterator[Move]: ...

    def piece(self, state: State, flags: int, move: Move) -> str:
        """Return which piece a move reads or lands, in words; "" where an operation has only one."""

    def by_value(self, flags: int) -> Any:
        """Return an operation's flags by value, for a state's digest."""

    def flushed(self, state: State, node: int, peer: int) -> bool:
        """True if nothing that this node has posted to that peer is still in flight."""

    def discarded(self, state: State, node: int, peer: int) -> bool:
        """True if that peer has discarded something whose handle had ended well, and this node has not fenced it
        since."""

    def stop(self, draft: Draft, node: int, op: int) -> None:
        """Let a node's transport stop one of its operations between two pieces."""

    def ranks_die(self, draft: Draft, ranks: Collection[Address]) -> None:
        """Reduce every operation to what is left of it when these ranks' processes die."""


class OneSided:
    """The moves of operations that read and land whole, or in pieces of their own, as the scope says."""

    def __init__(self, space: StateSpace, turns: TurnRunner) -> None:
        self.space = space
        self.turns = turns
        self.cluster = space.cluster
        self.checker = space.checker
        self.scope = space.scope
        self._notifications: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._ends: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.split = self.scope.chunks > 1 or not self.scope.done_is_remote

    def acts(self) -> Acts:
        return {
            "read": self.read,
            "land": self.land,
            "error": self.error,
            "notice": self.deliver_notification,
            "lose notice": self.lose_notification,
            "ended": self.ended,
        }

    # What may happen.

    def moves(self, state: State) -> Iterator[Move]:
        left = self.space.left(state)
        for i, (_, flags) in enumerate(self.space.ops_of(state)):
            if flags & IN_FLIGHT and not flags & (ENDED_ERR | ERROR_REPORTED):
                if not self.split:
                    yield ("land", i)
                else:
                    read, landed = flags >> PIECE & 7, flags >> (PIECE + 3) & 7
                    if read < self.scope.chunks:
                        yield ("read", i)
                    if landed < read:
                        yield ("land", i)
                if can_fail(flags) and left[FaultKind.ERR]:
                    yield ("error", i)
            yield from self.handle_moves(i, flags, left)

    @staticmethod
    def handle_moves(i: int, flags: int, left: tuple[int, ...]) -> Iterator[Move]:
        """Yield the moves that do not depend on an operation's pieces: its notification arrives, its handle ends."""
        if flags & NOTIFICATION:
            yield ("notice", i)
            if left[FaultKind.DROP]:
                yield ("lose notice", i)
        if flags & (ENDED_OK | ENDED_ERR):
            yield ("ended", i)

    # What it does.

    def piece(self, state: State, flags: int, move: Move) -> str:
        if not self.split:
            return ""
        return f" piece {(flags >> PIECE & 7 if move[0] == 'read' else flags >> (PIECE + 3) & 7) + 1}"

    def by_value(self, flags: int) -> Any:
        return flags

    def read(self, draft: Draft, move: Move) -> None:
        """Read the next piece of the source."""
        i = move[1]
        op, flags = self.space.ops_of(draft)[i]
        node, _, effect = self.space.operations(op)
        flags += READ_PIECE
        if flags >> PIECE & 7 == self.scope.chunks and not self.ends_landed(effect):
            flags |= 0 if flags & ORPHAN else ENDED_OK
        self.space.put_flags(draft, i, flags)
        if not flags & ORPHAN and node not in self.cluster.orphans:  # Nobody reuses the memory of a life that is over.
            self.note_stale(draft, effect)

    def ends_landed(self, effect: PostWrite | PostRead) -> bool:
        """True if a good end means that the bytes have landed. For a READ it does: they land where its end is seen."""
        return self.scope.done_is_remote or type(effect) is PostRead

    def note_stale(self, draft: Draft, effect: PostWrite | PostRead) -> None:
        """Mark the content as stale if P no longer holds the source that is read."""
        request = self.checker.request_of(effect)
        product = self.cluster.product_of[request]
        if isinstance(effect, PostWrite):
            product = effect.source.generation - SOURCE
        if self.space.shadow_of(draft).products[product] != PromptStage.HELD:
            self.space.put_shadow(draft, "content", request, Content.STALE)

    def land(self, draft: Draft, move: Move) -> None:
        """Land the next piece at D, or the whole at once."""
        i = move[1]
        op, flags = self.space.ops_of(draft)[i]
        effect = self.space.operations(op)[2]
        ended = ENDED_OK
        if self.split:
            flags += LANDED_PIECE
            if flags >> (PIECE + 3) & 7 < self.scope.chunks:
                self.space.put_flags(draft, i, flags)
                return
            ended = ENDED_OK if self.ends_landed(effect) else 0
        elif type(effect) is PostRead:
            self.note_stale(draft, effect)
        self.note_landed(draft, effect)
        notification = 0 if effect.notification is None else NOTIFICATION
        self.space.put_flags(draft, i, flags & ~IN_FLIGHT | notification | (0 if flags & ORPHAN else ended))

    def note_landed(self, draft: Draft, effect: PostWrite | PostRead) -> None:
        """Record that all of an operation's bytes are at D."""
        request = self.checker.request_of(effect)
        bit = self.cluster.bit[effect.op.p_rank, effect.op.d_rank]
        self.space.put_shadow(draft, "landed", request, self.space.shadow_of(draft).landed[request] | bit)

    def error(self, draft: Draft, move: Move) -> None:
        """End a handle with an error, which says nothing about its bytes."""
        self.space.spend(draft, FaultKind.ERR)
        self.space.put_flags(draft, move[1], self.space.ops_of(draft)[move[1]][1] | ENDED_ERR)

    def deliver_notification(self, draft: Draft, move: Move) -> None:
        space, i = self.space, move[1]
        key = (draft[space.op], i)
        found = self._notifications.get(key)
        if found is None:
            op, flags = space.ops_of(draft)[i]
            node, restarts, effect = space.operations(op)
            space.put_flags(draft, i, flags & ~NOTIFICATION)
            sender, at = self.cluster.orphans.get(node, node), self.cluster.at[other_end(effect)]
            frame = Received(sender, FIRST_INCARNATION[engine_of(sender)] + restarts, effect.notification)
            found = self._notifications[key] = (draft[space.op], at, self.turns.events.of((at, frame)))
        draft[space.op], at, event = found
        self.turns.turn(draft, at, event)

    def lose_notification(self, draft: Draft, move: Move) -> None:
        self.space.spend(draft, FaultKind.DROP)
        self.space.put_flags(draft, move[1], self.space.ops_of(draft)[move[1]][1] & ~NOTIFICATION)

    def ended(self, draft: Draft, move: Move) -> None:
        """Report the end of a handle to the rank that posted the operation."""
        key = (draft[self.space.op], move[1])
        found = self._ends.get(key)
        if found is None:
            found = self._ends[key] = self._end(draft, move[1])
        draft[self.space.op], at, event = found
        self.turns.turn(draft, at, event)

    def _end(self, draft: Draft, i: int) -> tuple[int, int, int]:
        """Return the operations afterwards, the node that the end is reported to, and the number of its event."""
        op, flags = self.space.ops_of(draft)[i]
        node, _, effect = self.space.operations(op)
        ok = bool(flags & ENDED_OK)
        left = flags & ~(ENDED_OK | ENDED_ERR)
        if type(effect) is PostRead:
            left &= ~(IN_FLIGHT | READING)
        if left & IN_FLIGHT and not ok:
            left |= ERROR_REPORTED
        else:
            left &= ~READING
        self.space.put_flags(draft, i, left)
        at = self.cluster.at[node]
        event = (WriteEnded if type(effect) is PostWrite else ReadEnded)(effect.op, ok)
        return draft[self.space.op], at, self.turns.events.of((at, event))

    # What else changes operations.

    def flushed(self, state: State, node: int, peer: int) -> bool:
        return not self._has(state, node, peer, IN_FLIGHT)

    def discarded(self, state: State, node: int, peer: int) -> bool:
        return self._has(state, node, peer, DISCARDED)

    def _has(self, state: State, node: int, peer: int, flag: int) -> bool:
        """True if an operation that this node has posted to that peer has this flag."""
        nodes = self.cluster.nodes
        for op, flags in self.space.ops_of(state):
            owner, _, effect = self.space.operations(op)
            if flags & flag and owner == nodes[node] and other_end(effect) == nodes[peer]:
                return True
        return False

    def stop(self, draft: Draft, node: int, op: int) -> None:
        raise AssertionError("only a method's operations stop between two pieces")

    def ranks_die(self, draft: Draft, ranks: Collection[Address]) -> None:
        self.space.put_ops(draft, [(op, self.outliving(ranks, op, flags)) for op, flags in self.space.ops_of(draft)])

    def outliving(self, ranks: Collection[Address], op: int, flags: int) -> int:
        """Return the flags of an operation after these ranks have died. Operations that their NICs have begun may still
        land, but not in the memory of a process that is gone."""
        node, _, effect = self.space.operations(op)
        if node in ranks:
            if type(effect) is PostRead or not flags & (IN_FLIGHT | NOTIFICATION):
                return 0
            return flags & ~(ENDED_OK | ENDED_ERR | ERROR_REPORTED | READING) | ORPHAN
        if other_end(effect) in ranks and type(effect) is PostWrite:
            flags &= ~NOTIFICATION
            if flags & IN_FLIGHT:
                return after_discarding(flags)
        return flags


def can_fail(flags: int) -> bool:
    """True if the handle of an operation under way may still end with an error."""
    return bool(flags & READING and not flags & (ORPHAN | ENDED_OK))


def pending_error(flags: int) -> int:
    """Return the flag of the error still to be reported of an operation that can land no more: a handle ends once."""
    return ENDED_ERR if flags & READING and not flags & (ENDED_OK | ENDED_ERR | ERROR_REPORTED | ORPHAN) else 0


def after_discarding(flags: int) -> int:
    """Return the flags of a WRITE in flight that its target discards. If its handle has ended well already, which is so
    only where DONE is local, the flush that has to follow fails."""
    ended_well = not flags & (READING | ENDED_OK | ENDED_ERR | ERROR_REPORTED | ORPHAN)
    return flags & ~IN_FLIGHT | pending_error(flags) | (DISCARDED if ended_well else 0)


def other_end(effect: PostWrite | PostRead) -> Address:
    """Return the peer of the rank that posts an operation."""
    return effect.to if isinstance(effect, PostWrite) else effect.source
