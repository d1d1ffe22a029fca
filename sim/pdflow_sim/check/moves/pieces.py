"""Operations of a transfer method in pieces: each rank posts pieces as the real Lanes (pdflow/methods/lanes.py) decide;
a piece is read and lands by itself, and the last brings the notification. A WRITE that is to stop does so between two.

When a piece is posted is open: from when the Lanes would give it on, so that a driver may be as slow as it likes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sized
from typing import Any, NamedTuple, TypeAlias

from pdflow.methods.lanes import Lanes, lane_rules
from pdflow.methods.shipment import Piece, ShipmentEnd
from pdflow.protocol.effects import PostRead, PostWrite
from pdflow.protocol.events import WriteStopped
from pdflow.protocol.ids import Op, engine_of
from pdflow.protocol.values import Address
from pdflow.serving.effects import OfferPiece, WithdrawPieces
from pdflow_sim.check.engines.plan import EnginePlan
from pdflow_sim.check.moves.acts import Act, Acts, Move
from pdflow_sim.check.moves.method_engines import MethodEngines
from pdflow_sim.check.moves.onesided import OneSided, can_fail
from pdflow_sim.check.scopes.scope import FaultKind
from pdflow_sim.check.state.cluster import SOURCE
from pdflow_sim.check.state.shadow_state import (
    ENDED_ERR,
    ENDED_OK,
    ERROR_REPORTED,
    IN_FLIGHT,
    NOTIFICATION,
    ORPHAN,
    PIECE,
    READING,
    Broken,
    Interned,
)
from pdflow_sim.check.state.space import FLAGS, Draft, State, StateSpace
from pdflow_sim.check.state.turns import TurnRunner

Air: TypeAlias = tuple[tuple[Piece, bool], ...]
"""Pieces that are read and have not landed, each with whether the notification is behind it."""
POSTS = (PostWrite, PostRead, OfferPiece, WithdrawPieces)
"""Effects that a rank's lanes handle."""


class PieceProgress(NamedTuple):
    """The progress of an operation, kept beside its flags."""

    air: Air = ()
    posted: int = 0


class PieceOperations:
    """The moves of operations in pieces. The bits above an operation's flags are the number of its progress; one more
    slot has the lanes of every rank. The handle and the notification of an operation are as in `whole`."""

    split = True

    def __init__(self, space: StateSpace, turns: TurnRunner, engines: MethodEngines, plan: EnginePlan) -> None:
        cluster = space.cluster
        self.space = space
        self.turns = turns
        self.cluster = cluster
        self.checker = space.checker
        self.engines = engines
        self.whole = OneSided(space, turns)
        self.plan = plan
        self.rules = lane_rules(plan.method, plan.pipeline_policy)
        self.progress = Interned()
        self.progress.of(None)
        self.known: list[PieceProgress] = [PieceProgress()]
        """Progress by its number. Number 0 is that of an operation that never began."""
        self.ranks = [rank for engine in cluster.engines for rank in cluster.ranks[engine]]
        self.rank_at = {rank: i for i, rank in enumerate(self.ranks)}
        self.lane_values = Interned()
        self.lane_bodies: list[Lanes[Op]] = []
        """Lanes by their number. Not to be changed."""
        self.of_ranks = Interned()
        """The numbers of the lanes of all ranks."""
        lanes = tuple(self.lanes_number(Lanes(self.rules)) for _ in self.ranks)
        self.slot = space.claim((self.of_ranks.of(lanes),), self._lanes_by_value)
        self._posting: dict[int, bool] = {}
        self._tidied: dict[tuple[int, int, int], int] = {}
        self._offered: dict[tuple[int, OfferPiece | WithdrawPieces], int] = {}
        """The number of lanes after an effect, by their number before it."""
        self._possible: dict[int, tuple[tuple[str, Op], ...]] = {}
        """What lanes would do next, by their number."""
        space.at_rest.append(self._left)

    def acts(self) -> Acts:
        return {**self.whole.acts(), "read": self.read, "land": self.land, "ended": self.ended}

    def remembered(self) -> tuple[Sized, ...]:
        """Return the caches that grow with what is explored."""
        return (self._tidied, self._offered, self._possible, self.of_ranks.ids, self.lane_values.ids, self.progress.ids)

    # Values.

    def progress_of(self, flags: int) -> PieceProgress:
        return self.known[flags >> PIECE]

    def with_progress(self, flags: int, progress: PieceProgress) -> int:
        number = self.progress.of(progress)
        if number == len(self.known):
            self.known.append(progress)
        return flags & FLAGS | number << PIECE

    def lanes_number(self, lanes: Lanes[Op]) -> int:
        number = self.lane_values.of(lanes.fingerprint())
        if number == len(self.lane_bodies):
            self.lane_bodies.append(lanes)
        return number

    def _left(self, state: State) -> list[str]:
        """Return, in words, what the lanes of ranks have left in a state at rest."""
        found: list[str] = []
        for rank, number in zip(self.ranks, self.of_ranks.values[state[self.slot]], strict=True):
            left = self.lane_bodies[number].leftovers()
            found += [f"{rank} has {size} {name}" for name, size in left.items()]
        return found

    def lanes(self, state: State | Draft, rank: Address) -> Lanes[Op]:
        """Return a copy of a rank's lanes, to be changed and put back."""
        number: int = self.of_ranks.values[state[self.slot]][self.rank_at[rank]]
        return self.lane_bodies[number].fork()

    def put_lanes(self, draft: Draft, rank: Address, lanes: Lanes[Op]) -> None:
        numbers, at = self.of_ranks.values[draft[self.slot]], self.rank_at[rank]
        draft[self.slot] = self.of_ranks.of((*numbers[:at], self.lanes_number(lanes), *numbers[at + 1 :]))

    def by_value(self, flags: int) -> Any:
        progress = self.progress_of(flags)
        return [flags & FLAGS, progress.air, progress.posted]

    def _lanes_by_value(self, state: State) -> dict[str, Any]:
        return {"lanes": [self.lane_values.values[number] for number in self.of_ranks.values[state[self.slot]]]}

    def piece(self, state: State, flags: int, move: Move) -> str:
        if move[0] == "land":
            piece = self.progress_of(flags).air[move[2]][0]
        else:
            found = self.lanes(state, self.space.operations(self.space.ops_of(state)[move[1]][0])[0]).next()
            assert found is not None
            piece = found[1]
        return f" layer {piece.layer} from {piece.start}"

    def product_of(self, effect: PostWrite | PostRead) -> int:
        if isinstance(effect, PostWrite):
            return effect.source.generation - SOURCE
        return self.cluster.product_of[self.checker.request_of(effect)]

    # What endpoints and cores have asked of the ranks.

    def post(self, draft: Draft, batch: int) -> None:
        """Begin the operations and offer the pieces of a batch of effects, in their order."""
        asked = self._posting.get(batch)
        effects = self.turns.batches.values[batch]
        if asked is None:
            asked = self._posting[batch] = any(isinstance(effect, POSTS) for _, effect, _ in effects)
        if asked:
            self.tidy(draft)
            for node, effect, _ in effects:
                if isinstance(effect, (PostWrite, PostRead)):
                    self._begin(draft, node, effect)
                elif isinstance(effect, (OfferPiece, WithdrawPieces)):
                    self._of_prompt(draft, node, effect)

    def _begin(self, draft: Draft, node: Address, effect: PostWrite | PostRead) -> None:
        """Begin an operation in its lanes, unless it was barred or can lead nowhere."""
        restarts = self.checker.restarts(self.space.shadow_of(draft), node)
        target_op = self.checker.operations.of((node, restarts, effect))
        for i, (op, flags) in enumerate(self.space.ops_of(draft)):
            if op == target_op and flags & IN_FLIGHT and not flags >> PIECE:
                start, stop = (
                    effect.registration.token_start,
                    effect.registration.token_start + effect.registration.num_tokens,
                )
                lanes, reads = self.lanes(draft, node), type(effect) is PostRead
                lanes.add(effect.op, effect.registration.xid, self.plan.layers, start, stop, reads=reads)
                lanes.begin(effect.op)
                self.put_lanes(draft, node, lanes)
                self.space.put_flags(draft, i, self.with_progress(flags, PieceProgress()))
                if self.engines.is_computed_on(draft, self.product_of(effect)):
                    self.checker.goal("posted while being computed")
                return

    def _of_prompt(self, draft: Draft, node: Address, effect: OfferPiece | WithdrawPieces) -> None:
        """Offer a piece of a prompt to the ranks' lanes, or withdraw the prompt."""
        ranks = self.cluster.ranks[engine_of(node)]
        if isinstance(effect, OfferPiece) and effect.rank is not None:
            ranks = ranks[effect.rank : effect.rank + 1]
        numbers = list(self.of_ranks.values[draft[self.slot]])
        for rank in ranks:
            at = self.rank_at[rank]
            step = numbers[at], effect
            after = self._offered.get(step)
            if after is None:
                after = self._offered[step] = self._offer(numbers[at], effect)
            numbers[at] = after
        draft[self.slot] = self.of_ranks.of(tuple(numbers))

    def _offer(self, number: int, effect: OfferPiece | WithdrawPieces) -> int:
        lanes = self.lane_bodies[number].fork()
        if isinstance(effect, OfferPiece):
            lanes.offer(effect.handle, effect.piece)
        else:
            lanes.withdraw(effect.handle)
        return self.lanes_number(lanes)

    def tidied(self, acts: Acts) -> Acts:
        """Return the same acts, each followed by `tidy`."""
        return {verb: self._then_tidy(act) for verb, act in acts.items()}

    def _then_tidy(self, act: Act) -> Act:
        def done(draft: Draft, move: Move) -> None:
            act(draft, move)
            self.tidy(draft)

        return done

    def tidy(self, draft: Draft) -> None:
        """Free the lanes of operations that can land no more, since they were cut off or have failed."""
        space = self.space
        key = (draft[space.op], draft[space.shadow], draft[self.slot])
        found = self._tidied.get(key)
        if found is None:
            shadow = space.shadow_of(draft)
            under_way = {
                (node, effect.op)
                for op, flags in space.ops_of(draft)
                for node, restarts, effect in (space.operations(op),)
                if flags & IN_FLIGHT
                and not flags & (ENDED_ERR | ERROR_REPORTED)
                and restarts == self.checker.restarts(shadow, node)
            }
            for rank, number in zip(self.ranks, self.of_ranks.values[draft[self.slot]], strict=True):
                known = self.lane_bodies[number].open_operations()
                gone = [one for one in known if (rank, one) not in under_way]
                if not gone:
                    continue
                lanes = self.lanes(draft, rank)
                for one in gone:
                    lanes.halt(one)
                    for piece in lanes.posted(one):
                        lanes.lost(one, piece)
                    lanes.ending(one)
                self.put_lanes(draft, rank, lanes)
            found = self._tidied[key] = draft[self.slot]
        draft[self.slot] = found

    # What may happen.

    def moves(self, state: State) -> Iterator[Move]:
        left = self.space.left(state)
        for i, (_, flags) in enumerate(self.space.ops_of(state)):
            if flags & IN_FLIGHT and not flags & (ENDED_ERR | ERROR_REPORTED):
                for k in range(len(self.progress_of(flags).air)):
                    yield ("land", i, k)
                if can_fail(flags) and left[FaultKind.ERR]:
                    yield ("error", i)
            yield from self.whole.handle_moves(i, flags, left)

    def lane_moves(self, state: State) -> Iterator[Move]:
        """Yield the moves that the ranks' lanes would make next."""
        numbers = {
            (node, effect.op): i
            for i, (op, flags) in enumerate(self.space.ops_of(state))
            for node, _, effect in (self.space.operations(op),)
            if flags & IN_FLIGHT and not flags & (ENDED_ERR | ERROR_REPORTED | ORPHAN)
        }
        for rank, number in zip(self.ranks, self.of_ranks.values[state[self.slot]], strict=True):
            possible = self._possible.get(number)
            if possible is None:
                possible = self._possible[number] = self._possible_with(self.lane_bodies[number])
            for verb, one in possible:
                yield (verb, numbers[rank, one])

    def _possible_with(self, lanes: Lanes[Op]) -> tuple[tuple[str, Op], ...]:
        """Return the moves that lanes would make, with their operations."""
        found = lanes.fork().next()
        ended = lanes.fork()
        stopped = [one for one in lanes.open_operations() if ended.ending(one) is ShipmentEnd.STOPPED]
        return (*((("read", found[0]),) if found else ()), *(("ended", one) for one in stopped))

    # What it does.

    def read(self, draft: Draft, move: Move) -> None:
        """Post the next piece and read its source. Where DONE is local, the last piece ends with that for P; any other
        ends when it has landed, or the notification could be there before it (Shipment)."""
        i = move[1]
        op, flags = self.space.ops_of(draft)[i]
        node, _, effect = self.space.operations(op)
        progress, lanes = self.progress_of(flags), self.lanes(draft, node)
        found = lanes.next()
        assert found is not None
        assert found[0] == effect.op
        last = lanes.all_posted(effect.op)
        if last and not self.whole.ends_landed(effect):
            flags |= ENDED_OK
        self.put_lanes(draft, node, lanes)
        more = PieceProgress((*progress.air, (found[1], last)), progress.posted + 1)
        self.space.put_flags(draft, i, self.with_progress(flags, more))
        self._count_lanes(draft, node, type(effect))
        self.whole.note_stale(draft, effect)

    def _count_lanes(self, draft: Draft, rank: Address, kind: type) -> None:
        """Check that a rank has no more pieces under way than lanes, which bound its memory for them. Raises Broken."""
        limit = self.rules.writes if kind is PostWrite else self.rules.reads
        under_way = sum(
            len(self.progress_of(flags).air)
            for op, flags in self.space.ops_of(draft)
            for node, _, effect in (self.space.operations(op),)
            if node == rank
            and type(effect) is kind
            and flags & IN_FLIGHT
            and not flags & (ENDED_ERR | ERROR_REPORTED | ORPHAN)
        )
        if limit is not None and under_way > limit:
            raise Broken("S9", f"{rank} has {under_way} pieces in flight, but {limit} lane(s)")

    def land(self, draft: Draft, move: Move) -> None:
        """Land a piece at D, in whatever order."""
        _, i, k = move
        op, flags = self.space.ops_of(draft)[i]
        node, _, effect = self.space.operations(op)
        air, posted = self.progress_of(flags)
        (piece, last), air = air[k], air[:k] + air[k + 1 :]
        if last and effect.notification is not None:
            flags |= NOTIFICATION
        if flags & ORPHAN:
            sent = last and not air
        else:
            lanes = self.lanes(draft, node)
            lanes.landed(effect.op, piece)
            sent = not air and _was_sent(lanes, effect.op)
            self.put_lanes(draft, node, lanes)
        if sent:
            self.whole.note_landed(draft, effect)
            if self.whole.ends_landed(effect) and not flags & ORPHAN:
                flags |= ENDED_OK
        if sent or (flags & ORPHAN and not air):
            flags &= ~IN_FLIGHT
        self.space.put_flags(draft, i, self.with_progress(flags, PieceProgress(air, posted)))

    def ended(self, draft: Draft, move: Move) -> None:
        """End a handle, or report that a WRITE has stopped."""
        i = move[1]
        op, flags = self.space.ops_of(draft)[i]
        if flags & (ENDED_OK | ENDED_ERR):
            self.whole.ended(draft, move)
            return
        node, _, effect = self.space.operations(op)
        lanes, progress = self.lanes(draft, node), self.progress_of(flags)
        assert lanes.ending(effect.op) is ShipmentEnd.STOPPED
        self.put_lanes(draft, node, lanes)
        self.checker.goal("stopped between two pieces" if progress.posted else "stopped before the first piece")
        # What is in the air may land, whatever the handle says: nothing is, unless the Shipment is wrong.
        self.space.put_flags(draft, i, flags & ~(READING if progress.air else READING | IN_FLIGHT))
        self.turns.event(draft, node, WriteStopped(effect.op))

    # What else changes operations.

    def stop(self, draft: Draft, node: int, op: int) -> None:
        if any(known == op and flags & IN_FLIGHT for known, flags in self.space.ops_of(draft)):
            rank = self.cluster.nodes[node]
            lanes = self.lanes(draft, rank)
            lanes.halt(self.space.operations(op)[2].op)
            self.put_lanes(draft, rank, lanes)

    def flushed(self, state: State, node: int, peer: int) -> bool:
        """True if all posted pieces have landed: a flush does not cover pieces that are still to come."""
        nodes = self.cluster.nodes
        for op, flags in self.space.ops_of(state):
            owner, _, effect = self.space.operations(op)
            if flags & IN_FLIGHT and self.progress_of(flags).air and (owner, effect.to) == (nodes[node], nodes[peer]):
                return False
        return True

    def discarded(self, state: State, node: int, peer: int) -> bool:
        return self.whole.discarded(state, node, peer)

    def ranks_die(self, draft: Draft, ranks: Collection[Address]) -> None:
        """Reduce every operation to what is left of it, and reset the lanes of these ranks."""
        self.space.put_ops(draft, [(op, self._outliving(ranks, op, flags)) for op, flags in self.space.ops_of(draft)])
        for rank in ranks:
            self.put_lanes(draft, rank, Lanes(self.rules))

    def _outliving(self, ranks: Collection[Address], op: int, flags: int) -> int:
        """Return the flags of an operation after these ranks have died: pieces not posted by then never will be."""
        left = self.whole.outliving(ranks, op, flags)
        if left & ORPHAN and not self.progress_of(left).air:
            left &= ~IN_FLIGHT
        return left


def _was_sent(lanes: Lanes[Op], op: Op) -> bool:
    """True, once, if an operation is sent. One that has stopped stays open until that is reported to its owner."""
    return lanes.fork().ending(op) is ShipmentEnd.SENT and lanes.ending(op) is ShipmentEnd.SENT
