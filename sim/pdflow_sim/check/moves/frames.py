"""Frames on their links: delivered, lost, overtaken, doubled, undecodable; and connections that break."""

from __future__ import annotations

from collections.abc import Iterator

from pdflow.protocol.events import PeerLost
from pdflow_sim.check.moves.acts import Acts, Move
from pdflow_sim.check.scopes.scope import FaultKind
from pdflow_sim.check.state.space import Draft, State, StateSpace
from pdflow_sim.check.state.turns import TurnRunner

DURING_TRANSFER = "a frame is corrupted during a transfer"
"""The goal that a frame arrives undecodable while a one-sided operation is under way."""


class Frames:
    """The moves of links."""

    def __init__(self, space: StateSpace, turns: TurnRunner) -> None:
        self.space = space
        self.turns = turns
        self.cluster = space.cluster
        self._splits: dict[int, tuple[int, int]] = {}
        self._moves: dict[State, tuple[Move, ...]] = {}

    def acts(self) -> Acts:
        return {
            "deliver": self.deliver,
            "drop": self.drop,
            "delay": self.delay,
            "duplicate": self.duplicate,
            "late": self.late,
            "corrupt": self.corrupt,
            "lose": self.lose,
        }

    # What may happen.

    def moves(self, state: State) -> tuple[Move, ...]:
        """Return the moves of the frames that wait on links."""
        space = self.space
        key = (*state[space.first_link : space.bag], state[space.budget])
        found = self._moves.get(key)
        if found is None:
            found = self._moves[key] = tuple(self.possible(state))
        return found

    def possible(self, state: State) -> Iterator[Move]:
        """Yield the moves of the frames that wait on links, uncached."""
        left, first = self.space.left(state), self.space.first_link
        for link in range(len(self.cluster.links)):
            if state[first + link]:
                yield ("deliver", link)
                if link < self.cluster.between_engines:
                    if left[FaultKind.DROP]:
                        yield ("drop", link)
                    if left[FaultKind.DELAY]:
                        yield ("delay", link)
                    if left[FaultKind.DUP]:
                        yield ("duplicate", link)
                    if left[FaultKind.CORRUPT]:
                        yield ("corrupt", link)

    def late_moves(self, state: State) -> Iterator[Move]:
        """Yield the moves of frames that have left their links: duplicates, and those that were overtaken."""
        for i in range(len(self.space.bags.values[state[self.space.bag]])):
            yield ("late", i)

    def losses(self, state: State) -> Iterator[Move]:
        """Yield the moves of connections that break."""
        if self.space.left(state)[FaultKind.LOSE]:
            for link in range(self.cluster.between_engines):
                yield ("lose", link)

    def lost_by(self, state: State, move: Move) -> list[int]:
        """Return the links on which everything is lost with a connection."""
        return [move[1]]

    def lost_by_corruption(self, state: State, move: Move) -> list[int]:
        """Return both links of a connection that its receiver closes."""
        sender, to = self.cluster.links[move[1]]
        return [move[1], self.cluster.link_of[to, sender]]

    # What it does.

    def deliver(self, draft: Draft, move: Move) -> None:
        link = move[1]
        self.turns.arrive(draft, link, self.take(draft, link))

    def take(self, draft: Draft, link: int) -> int:
        """Take the oldest frame from a link."""
        slot = self.space.first_link + link
        first, draft[slot] = self._split(draft[slot])
        return first

    def _split(self, chan: int) -> tuple[int, int]:
        """Return the first frame of a link, and the others."""
        found = self._splits.get(chan)
        if found is None:
            frames = self.space.chans.values[chan]
            found = self._splits[chan] = (frames[0], self.space.chans.of(frames[1:]))
        return found

    def drop(self, draft: Draft, move: Move) -> None:
        self.space.spend(draft, FaultKind.DROP)
        self.take(draft, move[1])

    def delay(self, draft: Draft, move: Move) -> None:
        """Delay a frame, so that later ones may overtake it."""
        self.space.spend(draft, FaultKind.DELAY)
        self._keep(draft, move[1], self.take(draft, move[1]))

    def duplicate(self, draft: Draft, move: Move) -> None:
        self.space.spend(draft, FaultKind.DUP)
        self._keep(draft, move[1], self._split(draft[self.space.first_link + move[1]])[0])

    def _keep(self, draft: Draft, link: int, frame: int) -> None:
        bags, slot = self.space.bags, self.space.bag
        draft[slot] = bags.of(tuple(sorted((*bags.values[draft[slot]], (link, frame)))))

    def late(self, draft: Draft, move: Move) -> None:
        """Deliver a duplicate, or a frame that was overtaken."""
        i, bags, slot = move[1], self.space.bags, self.space.bag
        bag = bags.values[draft[slot]]
        link, frame = bag[i]
        draft[slot] = bags.of(bag[:i] + bag[i + 1 :])
        self.turns.arrive(draft, link, frame)

    def corrupt(self, draft: Draft, move: Move) -> None:
        """Deliver bytes that the receiver cannot decode. It closes the connection, as a live rank does (spec 3.1): what
        is under way on it is lost, either way, and the sender finds it closed at some later moment.

        An undecodable notification is dropped, which is `lose notice`."""
        space, (sender, to) = self.space, self.cluster.links[move[1]]
        space.spend(draft, FaultKind.CORRUPT)
        if space.ops_of(draft):
            space.checker.goal(DURING_TRANSFER)
        for link in self.lost_by_corruption(tuple(draft), move):
            draft[space.first_link + link] = 0
        closed = ("closed", self.cluster.at[sender], self.cluster.at[to])
        draft[space.task] = space.tasks.of(tuple(sorted((*space.tasks_of(draft), closed))))
        self.turns.event(draft, to, PeerLost(sender))

    def lose(self, draft: Draft, move: Move) -> None:
        """Break a connection at one end: the frames under way towards the other are lost."""
        name, peer = self.cluster.links[move[1]]
        self.space.spend(draft, FaultKind.LOSE)
        draft[self.space.first_link + move[1]] = 0
        self.turns.event(draft, name, PeerLost(self.cluster.seconds.get(peer, peer)))
