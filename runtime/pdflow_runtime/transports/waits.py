"""Flushes and fences: the operations, links and copies that each waits for, and its event once all of these have
ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from pdflow.protocol.values import Address
from pdflow_runtime.transports.base import EventSink, Fenced, Flushed


class Wait:
    __slots__ = ("of", "ok", "peer")

    def __init__(self, peer: Address, of: Iterable[object]) -> None:
        self.peer: Final = peer
        self.of: Final = set(of)
        self.ok = True


class Waits:
    """The open flushes and fences of an agent. Operations are named by their numbers, links and copies by
    themselves."""

    def __init__(self, on_event: EventSink) -> None:
        self._on_event: Final = on_event
        self._fences: list[Wait] = []
        self._flushes: dict[Address, deque[Wait]] = {}

    def fence(self, peer: Address, of: Iterable[object]) -> None:
        """Report Fenced once all of these have ended."""
        self._fences.append(Wait(peer, of))
        self._look()

    def flush(self, peer: Address, ops: Iterable[int]) -> None:
        """Report Flushed once all of these have ended, and the flush before it."""
        self._flushes.setdefault(peer, deque()).append(Wait(peer, ops))
        self._look()

    def ended(self, what: object) -> None:
        for wait in (*self._fences, *(wait for flushes in self._flushes.values() for wait in flushes)):
            wait.of.discard(what)
        self._look()

    def broke(self, peer: Address, ops: Iterable[int]) -> None:
        """Fail the flushes that wait for one of these operations, whose connection is gone. Flushes are told apart by
        their order, so a flush that has failed waits for those before it."""
        gone = set(ops)
        for flush in self._flushes.get(peer, ()):
            if not flush.of.isdisjoint(gone):
                flush.ok = False
                flush.of.difference_update(gone)
        self._look()

    def _look(self) -> None:
        for peer in tuple(self._flushes):
            flushes = self._flushes.get(peer, deque())
            while flushes and not flushes[0].of:
                self._on_event(Flushed(peer, flushes.popleft().ok))
            if not flushes and self._flushes.get(peer) is flushes:  # whoever is told may flush again at once
                del self._flushes[peer]
        over = [fence for fence in self._fences if not fence.of]
        if over:
            self._fences = [fence for fence in self._fences if fence.of]
            for fence in over:
                self._on_event(Fenced(fence.peer))
