"""The order in which a rank posts the pieces of its open operations, and so the pieces that a stop still removes.

A rank has at most as many WRITEs and READs in flight as its method has lanes for them. A piece counts as posted when it
has a lane: until then a stop removes it. `shipment.py` decides which pieces of one operation may be posted, and how it
ends. The oldest operation goes first. Where the original queues piece by piece (`Turns.PIECE`), pieces go in the order
in which they could be posted.

A lane is free when its piece has ended, or when its sender has died (`release_lane`): the receiver then still waits for
the piece, which has no lane. Each piece that has been posted ends once; another end of it changes nothing.

The driver knows what else a posted piece waits for: its receiver, a group, room at D.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeAlias, TypeVar

from pdflow.methods.method import Method, PipelinePolicy, Turns
from pdflow.methods.shipment import Piece, Shipment, ShipmentEnd, whole
from pdflow.protocol.values import Value, Xid

K = TypeVar("K", bound=Hashable)


class LaneRules(Value, frozen=True, kw_only=True):
    """The rules by which the ranks of a method post. The defaults are those of a method whose operations go whole, all
    at once."""

    in_layers: bool = False
    """An operation is posted layer by layer. Otherwise all layers go in one piece."""
    as_offered: bool = False
    """Pieces of a WRITE are there when P offers them. Otherwise, and of a READ, all are there from the beginning."""
    writes: int | None = None
    """The most pieces of WRITEs that a P rank has in flight; None for any number."""
    reads: int | None = None
    """The most pieces of READs that a D rank has in flight."""
    turns: Turns = Turns.OPERATION


def lane_rules(method: Method, pipeline_policy: PipelinePolicy) -> LaneRules:
    """Return the rules by which all ranks post, P's as D's."""
    return LaneRules(
        in_layers=method.in_pieces,
        as_offered=pipeline_policy.early or (method.staged_at_p and not method.pulls),
        writes=pipeline_policy.sending_lanes,
        reads=pipeline_policy.receiving_lanes,
        turns=pipeline_policy.turns,
    )


class Operation(Generic[K]):
    """The state of one open WRITE or READ."""

    __slots__ = ("begun", "key", "number", "posted", "reads", "shipment", "turns", "xid")

    def __init__(self, key: K, number: int, xid: Xid, reads: bool, shipment: Shipment) -> None:
        self.key = key
        self.number = number
        """The place of the operation in the order of coming."""
        self.xid = xid
        self.reads = reads
        self.shipment = shipment
        self.begun = False
        self.turns = 0
        """How often it stands in line."""
        self.posted: dict[Piece, bool] = {}
        """Pieces that have not ended, and whether each has a lane."""


Line: TypeAlias = list[tuple[int, Operation[K]]]
"""A heap: operations that may have something to post, by their own number or by that of a turn."""


class Lanes(Generic[K]):
    """The lanes of one rank and its open operations. Operations go by keys that the driver chooses, each for one
    operation. A call costs O(log n)."""

    __slots__ = ("_by_piece", "_free", "_lines", "_number", "_of_prompt", "_open", "_ready", "rules")

    def __init__(self, rules: LaneRules) -> None:
        self.rules = rules
        self._by_piece = rules.turns is Turns.PIECE
        self._open: dict[K, Operation[K]] = {}
        self._of_prompt: dict[Xid, list[Operation[K]]] = {}
        """Open operations to which pieces are offered."""
        self._ready: dict[Xid, list[Piece]] = {}
        """Pieces that have been offered of each prompt, for operations that come later."""
        self._lines: tuple[Line[K], Line[K]] = ([], [])
        """The lines of WRITEs, and of READs."""
        self._free: list[int | None] = [rules.writes, rules.reads]
        self._number = 0

    def __len__(self) -> int:
        """Return the number of open operations."""
        return len(self._open)

    # Operations.

    def add(self, key: K, xid: Xid, layers: int, start: int, stop: int, *, reads: bool = False) -> None:
        """Open an operation: tokens `start` to `stop` of so many layers. It posts nothing before `begin`."""
        assert key not in self._open
        rules = self.rules
        layers = layers if rules.in_layers else 1
        self._number += 1
        operation = Operation(key, self._number, xid, reads, Shipment(layers, start, stop))
        self._open[key] = operation
        if rules.as_offered and not reads:
            self._of_prompt.setdefault(xid, []).append(operation)
            pieces = self._ready.get(xid, [])
        else:
            pieces = whole(layers, stop)
        for piece in pieces:
            operation.shipment.offer(piece)

    def begin(self, key: K) -> None:
        """Let an operation post its pieces. Does nothing if it has ended meanwhile."""
        operation = self._open.get(key)
        if operation is not None:
            operation.begun = True
            self._line_up(operation)

    def halt(self, key: K) -> None:
        """Post nothing more of an operation, if it is open."""
        operation = self._open.get(key)
        if operation is not None:
            operation.shipment.halt()

    def ending(self, key: K) -> ShipmentEnd | None:
        """Close an operation that has ended, and return how. None if it has not ended, or is not open."""
        operation = self._open.get(key)
        if operation is None:
            return None
        ending = operation.shipment.ending()
        if ending is not None:
            del self._open[key]
            others = self._of_prompt.get(operation.xid)
            if others is not None and operation in others:
                others.remove(operation)
                if not others:
                    del self._of_prompt[operation.xid]
        return ending

    def all_posted(self, key: K) -> bool:
        """True if the piece that was posted last is the operation's last one: the notification goes with it."""
        return self._open[key].shipment.all_posted

    # Prompts.

    def offer(self, xid: Xid, piece: Piece) -> None:
        """Let open and later WRITEs of a prompt send this piece from now on."""
        self._ready.setdefault(xid, []).append(piece)
        for operation in self._of_prompt.get(xid, ()):
            operation.shipment.offer(piece)
            self._line_up(operation)

    def withdraw(self, xid: Xid) -> None:
        """Forget a prompt that the rank has no more. Operations open for it keep what they were offered."""
        self._ready.pop(xid, None)
        self._of_prompt.pop(xid, None)

    # Pieces.

    def next(self) -> tuple[K, Piece] | None:
        """Return the piece to be posted next, with its operation's key; it has a lane and counts as posted from here
        on. None if no piece can be posted."""
        writes, reads = self._lines
        found = self._next(writes, self._free[0]) if writes else None
        if found is None and reads:
            found = self._next(reads, self._free[1])
        return found

    def _next(self, line: Line[K], free: int | None) -> tuple[K, Piece] | None:
        """Return the piece to be posted next of the operations in one line."""
        while line and free != 0:
            operation = line[0][1]
            piece = operation.shipment.next()
            if piece is None or self._by_piece:
                heappop(line)
                operation.turns -= 1
            if piece is not None:
                operation.posted[piece] = True
                if free is not None:
                    self._count(operation, -1)
                return operation.key, piece
        return None

    def landed(self, key: K, piece: Piece) -> None:
        """End a posted piece that has ended well, or is skipped: then it counts as if it had."""
        operation = self._ended(key, piece)
        if operation is not None:
            operation.shipment.landed(piece)
            self._line_up(operation)

    def lost(self, key: K, piece: Piece) -> None:
        """End a posted piece that has failed."""
        operation = self._ended(key, piece)
        if operation is not None:
            operation.shipment.lost()

    def recall(self, key: K, piece: Piece) -> None:
        """Take back a posted piece that has not begun to move, and will not: it is as if it had not been posted."""
        operation = self._ended(key, piece)
        if operation is not None:
            operation.shipment.recall(piece)
            self._line_up(operation)

    def release_lane(self, key: K, piece: Piece) -> None:
        """Free the lane of a posted piece that has not ended."""
        operation = self._open.get(key)
        if operation is not None and operation.posted.get(piece):
            operation.posted[piece] = False
            self._count(operation, 1)

    def _ended(self, key: K, piece: Piece) -> Operation[K] | None:
        """Take a piece from the posted ones and return its operation; None if it has ended before."""
        operation = self._open.get(key)
        has_lane = None if operation is None else operation.posted.pop(piece, None)
        if has_lane is None or operation is None:
            return None
        if has_lane:
            self._count(operation, 1)
        return operation

    def _count(self, operation: Operation[K], lanes: int) -> None:
        free = self._free[operation.reads]
        if free is not None:
            self._free[operation.reads] = free + lanes

    def _line_up(self, operation: Operation[K]) -> None:
        """Put an operation in line: once, or once for each piece that could be posted."""
        if not operation.begun or (operation.turns and not self._by_piece):
            return
        writes, reads = self._lines
        line, ready = reads if operation.reads else writes, operation.shipment.ready
        if self._by_piece:
            for _ in range(ready - operation.turns):
                self._number += 1
                operation.turns += 1
                heappush(line, (self._number, operation))
        elif ready:
            operation.turns = 1
            heappush(line, (operation.number, operation))

    # For explorers.

    def open_operations(self) -> tuple[K, ...]:
        """Return the operations that have not ended, in the order of their coming."""
        return tuple(self._open)

    def posted(self, key: K) -> tuple[Piece, ...]:
        """Return the pieces of an open operation that are posted and have not ended."""
        return tuple(self._open[key].posted)

    def leftovers(self) -> dict[str, int]:
        """Return the size of everything that must be empty at rest and is not (L8), by name: operations, prompts that
        pieces are offered to, pieces of prompts, and lanes that are taken."""
        lanes = zip((self.rules.writes, self.rules.reads), self._free, strict=True)
        taken = sum(abs((limit or 0) - (free or 0)) for limit, free in lanes)
        sizes = {
            "open operations": len(self._open),
            "prompts with operations": len(self._of_prompt),
            "prompts with pieces": len(self._ready),
            "taken lanes": taken,
        }
        return {name: size for name, size in sizes.items() if size}

    def fork(self) -> Lanes[K]:
        other: Lanes[K] = Lanes(self.rules)
        other._open = {key: _forked(operation) for key, operation in self._open.items()}
        other._of_prompt = {xid: [other._open[one.key] for one in them] for xid, them in self._of_prompt.items()}
        other._ready = {xid: pieces.copy() for xid, pieces in self._ready.items()}
        for ours, theirs in zip(self._lines, other._lines, strict=True):
            theirs += [(turn, other._open[one.key]) for turn, one in ours if one.key in self._open]
            heapify(theirs)
        other._free, other._number = self._free.copy(), self._number
        return other

    def fingerprint(self) -> Hashable:
        """Return the state as a value in which operations' numbers count by their order alone."""
        operations = [
            (one.key, one.xid, one.reads, one.begun, one.shipment.fingerprint(), frozenset(one.posted.items()))
            for one in self._open.values()
        ]
        ready = [(xid, tuple(pieces)) for xid, pieces in self._ready.items()]
        offered = [(xid, tuple([one.key for one in them])) for xid, them in self._of_prompt.items()]
        turns = self._turns() if self._by_piece else ()
        return tuple(operations), frozenset(ready), frozenset(offered), turns

    def _turns(self) -> tuple[tuple[K, ...], ...]:
        """Return the operations in line that could post, in the order of their turns: of WRITEs, and of READs."""
        return tuple(
            [tuple([one.key for _, one in sorted(line, key=_turn) if one.shipment.ready]) for line in self._lines]
        )


def _turn(stands: tuple[int, Operation[K]]) -> int:
    return stands[0]


def _forked(operation: Operation[K]) -> Operation[K]:
    other = Operation(operation.key, operation.number, operation.xid, operation.reads, operation.shipment.fork())
    other.begun, other.turns, other.posted = operation.begun, operation.turns, operation.posted.copy()
    return other
