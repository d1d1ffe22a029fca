"""Frames on their links: delivered, lost, overtaken, doubled; and connections that break."""

from __future__ import annotations

from pdflow.protocol.events import PeerLost
from sim.check.changes import Changes
from sim.check.scope import Fault, Scope
from sim.check.world import Draft


class Frames(Changes):
    """The moves of links."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self._splits: dict[int, tuple[int, int]] = {}

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
