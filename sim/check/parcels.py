"""Operations of a method: each rank posts pieces as the real Lanes (pdflow/methods/lanes.py) say; a piece is read and
lands by itself, and the last brings the notice. A WRITE that is to stop does so between two.

When a piece is posted is open: from when the Lanes would give it on, so that a driver may be as slow as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

from pdflow.methods.lanes import Lanes, lane_rules
from pdflow.methods.method import Grain, Method
from pdflow.methods.shipment import Ending, Piece
from pdflow.protocol.effects import PostRead, PostWrite
from pdflow.protocol.events import WriteStopped
from pdflow.protocol.ids import Op, engine_of
from pdflow.protocol.values import Address
from pdflow.serving.effects import OfferPiece, WithdrawPieces
from sim.check.changes import FLAGS
from sim.check.cluster import SOURCE
from sim.check.ghost import (
    ENDED_ERR,
    ENDED_OK,
    FLYING,
    NOTICE,
    ORPHAN,
    PIECE,
    READING,
    TOLD,
    Broken,
    Interned,
)
from sim.check.relation import Move, Relation
from sim.check.scope import BLOCK_TOKENS, TOKENS, Fault, Scope
from sim.check.world import Draft, State

Air: TypeAlias = tuple[tuple[Piece, bool], ...]
"""Pieces that are read and have not landed; whether the notice is behind that one."""
POSTS = (PostWrite, PostRead, OfferPiece, WithdrawPieces)
"""Effects that mean something to a rank's lanes."""


class Load(NamedTuple):
    """What there is of an operation beside its flags."""

    air: Air = ()
    posted: int = 0


def chunks_of(method: Method) -> tuple[int, ...]:
    """Up to which tokens steps compute a prompt: in one, or in two where each is sent by itself."""
    return (BLOCK_TOKENS, TOKENS) if method.grain is Grain.LAYER_CHUNK else (TOKENS,)


class Parcels(Relation):
    """The moves of pieces. Above an operation's flags stands the number of its load, what of it is in the air; one more
    slot has the lanes of every rank."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        cluster = self.cluster
        assert cluster.plan is not None
        self.plan = cluster.plan
        self.rules = lane_rules(self.plan.method, self.plan.conduct)
        self.split = True
        self.loads = Interned()
        self.loads.of(None)
        self.known: list[Load] = [Load()]
        """By the number of each load. That of 0 is an operation's that never began."""
        self.ranks = [rank for engine in cluster.engines for rank in cluster.ranks[engine]]
        self.rank_at = {rank: i for i, rank in enumerate(self.ranks)}
        self.lane_values = Interned()
        self.lane_bodies: list[Lanes[Op]] = []
        """By number. Not to be changed."""
        self.of_ranks = Interned()
        """By rank, the number of its lanes."""
        self.slot = self.budget + 1
        self.do = {verb: self._then_tidy(act) for verb, act in self.do.items()}
        self._posting: dict[int, bool] = {}
        self._tidied: dict[tuple[int, int, int], int] = {}

    def beginning(self) -> State:
        lanes = tuple(self.lanes_number(Lanes(self.rules)) for _ in self.ranks)
        return (*super().beginning(), self.of_ranks.of(lanes))

    # Values.

    def load_of(self, flags: int) -> Load:
        return self.known[flags >> PIECE]

    def with_load(self, flags: int, load: Load) -> int:
        number = self.loads.of(load)
        if number == len(self.known):
            self.known.append(load)
        return flags & FLAGS | number << PIECE

    def lanes_number(self, lanes: Lanes[Op]) -> int:
        number = self.lane_values.of(lanes.fingerprint())
        if number == len(self.lane_bodies):
            self.lane_bodies.append(lanes)
        return number

    def lanes(self, state: State | Draft, rank: Address) -> Lanes[Op]:
        """A rank's as they are, to be changed and put back."""
        number: int = self.of_ranks.values[state[self.slot]][self.rank_at[rank]]
        return self.lane_bodies[number].fork()

    def put_lanes(self, draft: Draft, rank: Address, lanes: Lanes[Op]) -> None:
        numbers, at = self.of_ranks.values[draft[self.slot]], self.rank_at[rank]
        draft[self.slot] = self.of_ranks.of((*numbers[:at], self.lanes_number(lanes), *numbers[at + 1 :]))

    def carried(self, flags: int) -> Any:
        load = self.load_of(flags)
        return [flags & FLAGS, load.air, load.posted]

    def further(self, state: State) -> dict[str, Any]:
        return {"lanes": [self.lane_values.values[number] for number in self.of_ranks.values[state[self.slot]]]}

    def piece(self, state: State, flags: int, move: Move) -> str:
        if move[0] == "land":
            piece = self.load_of(flags).air[move[2]][0]
        else:
            found = self.lanes(state, self.operations(self.ops_of(state)[move[1]][0])[0]).next()
            assert found is not None
            piece = found[1]
        return f" layer {piece.layer} from {piece.start}"

    def product_of(self, effect: PostWrite | PostRead) -> int:
        if isinstance(effect, PostWrite):
            return effect.source.generation - SOURCE
        return self.cluster.product_of[self.judge.request_of(effect)]

    # What endpoints and cores have asked of the ranks.

    def turn(self, draft: Draft, node: int, event: int) -> int:
        batch = super().turn(draft, node, event)
        if batch >= 0:
            self.post(draft, batch)
        return batch

    def post(self, draft: Draft, batch: int) -> None:
        """In the order in which they did."""
        asked = self._posting.get(batch)
        if asked is None:
            effects = self.batches.values[batch]
            asked = self._posting[batch] = any(isinstance(effect, POSTS) for _, effect, _ in effects)
        if asked:
            self.tidy(draft)
            for node, effect, _ in self.batches.values[batch]:
                if isinstance(effect, (PostWrite, PostRead)):
                    self._begin(draft, node, effect)
                elif isinstance(effect, (OfferPiece, WithdrawPieces)):
                    self._of_prompt(draft, node, effect)

    def _begin(self, draft: Draft, node: Address, effect: PostWrite | PostRead) -> None:
        """One that was barred, or can lead nowhere, is not begun."""
        life = self.judge.life(self.ghost_of(draft), node)
        wanted = self.judge.operations.of((node, life, effect))
        for i, (op, flags) in enumerate(self.ops_of(draft)):
            if op == wanted and flags & FLYING and not flags >> PIECE:
                start, stop = effect.grant.token_start, effect.grant.token_start + effect.grant.num_tokens
                lanes, reads = self.lanes(draft, node), type(effect) is PostRead
                lanes.add(effect.op, effect.grant.xid, self.plan.layers, start, stop, reads=reads)
                lanes.begin(effect.op)
                self.put_lanes(draft, node, lanes)
                self.put_flags(draft, i, self.with_load(flags, Load()))
                if self.is_computed_on(draft, self.product_of(effect)):
                    self.judge.goal("posted while being computed")
                return

    def is_computed_on(self, draft: Draft, product: int) -> bool:
        """Whether P's engine has a part of a prompt still to compute."""
        raise NotImplementedError

    def _of_prompt(self, draft: Draft, node: Address, effect: OfferPiece | WithdrawPieces) -> None:
        """More of it can be sent, or nothing any more."""
        ranks = self.cluster.ranks[engine_of(node)]
        if isinstance(effect, OfferPiece) and effect.rank is not None:
            ranks = ranks[effect.rank : effect.rank + 1]
        for rank in ranks:
            lanes = self.lanes(draft, rank)
            if isinstance(effect, OfferPiece):
                lanes.offer(effect.handle, effect.piece)
            else:
                lanes.withdraw(effect.handle)
            self.put_lanes(draft, rank, lanes)

    def _then_tidy(self, act: Callable[..., None]) -> Callable[..., None]:
        def done(draft: Draft, *about: Any) -> None:
            act(draft, *about)
            self.tidy(draft)

        return done

    def tidy(self, draft: Draft) -> None:
        """What of an operation can land no more, since it was cut off or has failed, has no lane any more."""
        key = (draft[self.op], draft[self.ghost], draft[self.slot])
        found = self._tidied.get(key)
        if found is None:
            ghost = self.ghost_of(draft)
            under_way = {
                (node, effect.op)
                for op, flags in self.ops_of(draft)
                for node, life, effect in (self.operations(op),)
                if flags & FLYING and not flags & (ENDED_ERR | TOLD) and life == self.judge.life(ghost, node)
            }
            for rank in self.ranks:
                lanes = self.lanes(draft, rank)
                gone = [one for one in lanes.open_operations() if (rank, one) not in under_way]
                for one in gone:
                    lanes.halt(one)
                    for piece in lanes.posted(one):
                        lanes.lost(one, piece)
                    lanes.ending(one)
                if gone:
                    self.put_lanes(draft, rank, lanes)
            found = self._tidied[key] = draft[self.slot]
        draft[self.slot] = found

    # What may happen.

    def _of_tail(self, state: State) -> Iterator[Move]:
        yield from super()._of_tail(state)
        places = {
            (node, effect.op): i
            for i, (op, flags) in enumerate(self.ops_of(state))
            for node, _, effect in (self.operations(op),)
            if flags & FLYING and not flags & (ENDED_ERR | TOLD | ORPHAN)
        }
        for rank in self.ranks:
            lanes = self.lanes(state, rank)
            found = lanes.next()
            if found is not None:
                yield ("read", places[rank, found[0]])
            lanes = self.lanes(state, rank)
            for one in lanes.open_operations():
                if lanes.ending(one) is Ending.STOPPED:
                    yield ("ended", places[rank, one])

    def _of_operation(self, i: int, flags: int, left: tuple[int, ...]) -> Iterator[Move]:
        if flags & FLYING and not flags & (ENDED_ERR | TOLD):
            for k in range(len(self.load_of(flags).air)):
                yield ("land", i, k)
            if left[Fault.ERR] and flags & READING and not flags & (ORPHAN | ENDED_OK):
                yield ("error", i)
        if flags & NOTICE:
            yield ("notice", i)
            if left[Fault.DROP]:
                yield ("lose notice", i)
        if flags & (ENDED_OK | ENDED_ERR):
            yield ("ended", i)

    def read(self, draft: Draft, i: int) -> None:
        """The next piece is posted, and its source read. Where DONE is local, that is the last one's end for P; any
        other has ended when it has landed, or the notice could be there before it (Shipment)."""
        op, flags = self.ops_of(draft)[i]
        node, _, effect = self.operations(op)
        load, lanes = self.load_of(flags), self.lanes(draft, node)
        found = lanes.next()
        assert found is not None
        assert found[0] == effect.op
        last = lanes.all_posted(effect.op)
        if last and not self._ends_landed(effect):
            flags |= ENDED_OK
        self.put_lanes(draft, node, lanes)
        self.put_flags(draft, i, self.with_load(flags, Load((*load.air, (found[1], last)), load.posted + 1)))
        self._count_lanes(draft, node, type(effect))
        self._note_stale(draft, effect)

    def _count_lanes(self, draft: Draft, rank: Address, kind: type) -> None:
        """Of a rank's memory for what is under way there is as much as it has lanes."""
        limit = self.rules.writes if kind is PostWrite else self.rules.reads
        under_way = sum(
            len(self.load_of(flags).air)
            for op, flags in self.ops_of(draft)
            for node, _, effect in (self.operations(op),)
            if node == rank and type(effect) is kind and flags & FLYING and not flags & (ENDED_ERR | TOLD | ORPHAN)
        )
        if limit is not None and under_way > limit:
            raise Broken("S9", f"{rank} has {under_way} pieces under way, and {limit} lane(s)")

    def land(self, draft: Draft, i: int, k: int = 0) -> None:
        """A piece lands at D, in whatever order."""
        op, flags = self.ops_of(draft)[i]
        node, _, effect = self.operations(op)
        air, posted = self.load_of(flags)
        (piece, last), air = air[k], air[:k] + air[k + 1 :]
        if last and effect.notice is not None:
            flags |= NOTICE
        if flags & ORPHAN:
            sent = last and not air
        else:
            lanes = self.lanes(draft, node)
            lanes.landed(effect.op, piece)
            sent = not air and self._was_sent(lanes, effect.op)
            self.put_lanes(draft, node, lanes)
        if sent:
            request = self.judge.request_of(effect)
            bit = self.cluster.bit[effect.op.p_rank, effect.op.d_rank]
            self.put_ghost(draft, "landed", request, self.ghost_of(draft).landed[request] | bit)
            if self._ends_landed(effect) and not flags & ORPHAN:
                flags |= ENDED_OK
        if sent or (flags & ORPHAN and not air):
            flags &= ~FLYING
        self.put_flags(draft, i, self.with_load(flags, Load(air, posted)))

    @staticmethod
    def _was_sent(lanes: Lanes[Op], op: Op) -> bool:
        """Told once. One that has stopped stays open until its owner is told."""
        return lanes.fork().ending(op) is Ending.SENT and lanes.ending(op) is Ending.SENT

    def ended(self, draft: Draft, i: int) -> None:
        op, flags = self.ops_of(draft)[i]
        node, _, effect = self.operations(op)
        if flags & (ENDED_OK | ENDED_ERR):
            super().ended(draft, i)
            return
        lanes, load = self.lanes(draft, node), self.load_of(flags)
        assert lanes.ending(effect.op) is Ending.STOPPED
        self.put_lanes(draft, node, lanes)
        self.judge.goal("stopped between two pieces" if load.posted else "stopped before the first piece")
        # What is in the air may land, whatever the handle says: nothing is, unless the Shipment is wrong.
        self.put_flags(draft, i, flags & ~(READING if load.air else READING | FLYING))
        self.event(draft, node, WriteStopped(effect.op))

    # What else changes operations.

    def task_done(self, draft: Draft, i: int) -> None:
        kind, node, about = self.tasks_of(draft)[i]
        if kind != "stop":
            super().task_done(draft, i)
            return
        self.take_task(draft, i)
        if any(op == about and flags & FLYING for op, flags in self.ops_of(draft)):
            rank = self.cluster.nodes[node]
            lanes = self.lanes(draft, rank)
            lanes.halt(self.operations(about)[2].op)
            self.put_lanes(draft, rank, lanes)

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

    def restart(self, draft: Draft, engine: int) -> None:
        super().restart(draft, engine)
        for rank in self.cluster.ranks[self.cluster.engines[engine]]:
            self.put_lanes(draft, rank, Lanes(self.rules))
