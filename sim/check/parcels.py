"""Operations of a method that goes in pieces: each is posted by a real Shipment (pdflow/methods/shipment.py), read and
landed by itself, and the last brings the notice. A WRITE that is to stop does so between two.

What is where it can be sent from says the one who computes it (shipped.py); here it is carried.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from pdflow.methods.method import Grain, Method
from pdflow.methods.shipment import Ending, Piece, Shipment
from pdflow.protocol.effects import PostRead, PostWrite
from pdflow.protocol.events import WriteStopped
from sim.check.changes import FLAGS
from sim.check.cluster import SOURCE
from sim.check.ghost import ENDED_ERR, ENDED_OK, FLYING, NOTICE, ORPHAN, PIECE, READING, TOLD, Interned
from sim.check.relation import Move, Relation
from sim.check.scope import BLOCK_TOKENS, TOKENS, Fault, Scope
from sim.check.world import Draft, State

Air: TypeAlias = tuple[tuple[Piece, bool], ...]
"""Pieces that are read and have not landed; whether the notice is behind that one."""


class Load(NamedTuple):
    """What there is of an operation beside its flags."""

    shipment: Shipment
    air: Air = ()
    posted: int = 0


def pieces_of(method: Method) -> tuple[int, tuple[Piece, ...]]:
    """Layers, and what is there when a prompt begins and when it is computed: two pieces, or one."""
    if method.grain is Grain.LAYER:
        return 2, (Piece(0, 0, TOKENS), Piece(1, 0, TOKENS))
    if method.grain is Grain.LAYER_CHUNK:
        return 1, (Piece(0, 0, BLOCK_TOKENS), Piece(0, BLOCK_TOKENS, TOKENS))
    return 1, (Piece(0, 0, TOKENS),)


class Parcels(Relation):
    """The moves of pieces. Above an operation's flags stands the number of its load: its Shipment, and what of it is in
    the air."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        assert self.cluster.method is not None
        self.method = self.cluster.method
        self.layers, self.pieces = pieces_of(self.method)
        self.split = True
        self.loads = Interned()
        self.loads.of(None)
        self.known: list[Load] = [Load(Shipment(0, 0, 0))]
        """By the number of each load. That of 0 is an operation's that has just been asked for, or never began."""

    def load_of(self, flags: int) -> Load:
        return self.known[flags >> PIECE]

    def with_load(self, flags: int, load: Load) -> int:
        number = self.loads.of((load.shipment.fingerprint(), load.air, load.posted))
        if number == len(self.known):
            self.known.append(load)
        return flags & FLAGS | number << PIECE

    def first_load(self, flags: int, effect: PostWrite | PostRead, there: tuple[Piece, ...]) -> int:
        """An operation begins."""
        start = effect.grant.token_start
        shipment = Shipment(self.layers, start, start + effect.grant.num_tokens)
        for piece in there:
            shipment.offer(piece)
        return self.with_load(flags, Load(shipment))

    def carried(self, flags: int) -> Any:
        load = self.load_of(flags)
        return [flags & FLAGS, load.shipment.fingerprint(), load.air, load.posted]

    def piece(self, flags: int, move: Move) -> str:
        load = self.load_of(flags)
        piece = load.shipment.fork().next() if move[0] == "read" else load.air[move[2]][0]
        assert piece is not None
        return f" layer {piece.layer} from {piece.start}"

    def product_of(self, effect: PostWrite | PostRead) -> int:
        if isinstance(effect, PostWrite):
            return effect.source.generation - SOURCE
        return self.cluster.product_of[self.judge.request_of(effect)]

    # What may happen.

    def _of_operation(self, i: int, flags: int, left: tuple[int, ...]) -> Iterator[Move]:
        shipment, air, _ = self.load_of(flags)
        if flags & FLYING and not flags & (ENDED_ERR | TOLD):
            if not flags & ORPHAN and shipment.fork().next() is not None:
                yield ("read", i)
            for k in range(len(air)):
                yield ("land", i, k)
            if left[Fault.ERR] and flags & READING and not flags & (ORPHAN | ENDED_OK):
                yield ("error", i)
        if flags & NOTICE:
            yield ("notice", i)
            if left[Fault.DROP]:
                yield ("lose notice", i)
        if flags & (ENDED_OK | ENDED_ERR) or self._has_stopped(flags):
            yield ("ended", i)

    def _has_stopped(self, flags: int) -> bool:
        """It has ended before its end, and its owner has not been told."""
        open_here = flags & FLYING and flags & READING and not flags & (ENDED_OK | ENDED_ERR | TOLD | ORPHAN)
        return bool(open_here) and self.load_of(flags).shipment.ending() is Ending.STOPPED

    def read(self, draft: Draft, i: int) -> None:
        """The next piece is posted, and its source read. Where DONE is local, that is the last one's end for P; any
        other has ended when it has landed, or the notice could be there before it (Shipment)."""
        op, flags = self.ops_of(draft)[i]
        node, _, effect = self.operations(op)
        load = self.load_of(flags)
        shipment = load.shipment.fork()
        piece = shipment.next()
        assert piece is not None
        air = (*load.air, (piece, shipment.all_posted))
        if shipment.all_posted and not self._ends_landed(effect):
            flags |= ENDED_OK
        self.put_flags(draft, i, self.with_load(flags, Load(shipment, air, load.posted + 1)))
        if node not in self.cluster.orphans:
            self._note_stale(draft, effect)

    def land(self, draft: Draft, i: int, k: int = 0) -> None:
        """A piece lands at D, in whatever order."""
        op, flags = self.ops_of(draft)[i]
        effect = self.operations(op)[2]
        shipment, air, posted = self.load_of(flags)
        (piece, last), air = air[k], air[:k] + air[k + 1 :]
        shipment = shipment.fork()
        shipment.landed(piece)
        if last and effect.notice is not None:
            flags |= NOTICE
        if not air:
            if shipment.ending() is Ending.SENT:
                request = self.judge.request_of(effect)
                bit = self.cluster.bit[effect.op.p_rank, effect.op.d_rank]
                self.put_ghost(draft, "landed", request, self.ghost_of(draft).landed[request] | bit)
                if self._ends_landed(effect) and not flags & ORPHAN:
                    flags |= ENDED_OK
                flags &= ~FLYING
            elif flags & ORPHAN:
                flags &= ~FLYING
        self.put_flags(draft, i, self.with_load(flags, Load(shipment, air, posted)))

    def ended(self, draft: Draft, i: int) -> None:
        op, flags = self.ops_of(draft)[i]
        if not self._has_stopped(flags):
            super().ended(draft, i)
            return
        node, _, effect = self.operations(op)
        load = self.load_of(flags)
        self.judge.goal("stopped between two pieces" if load.posted else "stopped before the first piece")
        # What is in the air may land, whatever the handle says: nothing is, unless the Shipment is wrong.
        self.put_flags(draft, i, flags & ~(READING if load.air else READING | FLYING))
        self.event(draft, node, WriteStopped(effect.op))

    # What else changes operations.

    def task_done(self, draft: Draft, i: int) -> None:
        kind, _, about = self.tasks_of(draft)[i]
        if kind != "stop":
            super().task_done(draft, i)
            return
        self.take_task(draft, i)
        for at, (op, flags) in enumerate(self.ops_of(draft)):
            if op == about and flags & FLYING:
                load = self.load_of(flags)
                shipment = load.shipment.fork()
                shipment.halt()
                self.put_flags(draft, at, self.with_load(flags, load._replace(shipment=shipment)))

    def flushed(self, state: State, node: int, peer: int) -> bool:
        """A flush is about what was posted: not about pieces that are still to come."""
        nodes = self.cluster.nodes
        for op, flags in self.ops_of(state):
            owner, _, effect = self.operations(op)
            if flags & FLYING and self.load_of(flags).air and (owner, effect.to) == (nodes[node], nodes[peer]):
                return False
        return True

    def _outliving(self, name: str, op: int, flags: int) -> int:
        left = super()._outliving(name, op, flags)
        if left & ORPHAN and not self.load_of(left).air:
            left &= ~FLYING
        return left
