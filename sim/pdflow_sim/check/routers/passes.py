"""Which attempts are passed over by the engines that they wait for (`pdflow.routing.passes`), counted without the
router."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeAlias

from pdflow.protocol.values import RequestId
from pdflow.routing.heartbeats import Seat

Queue: TypeAlias = tuple[Seat, bool] | None
"""The engine that an attempt waits for, and whether it waits for further tokens there, or for its first answer. None if
it waits for a whole answer."""


class PassAccount:
    """The waits of open attempts, in the order in which they began, and how often each was passed over."""

    def __init__(self) -> None:
        self.order: tuple[RequestId, ...] = ()
        self.overtaken: frozenset[RequestId] = frozenset()
        """Those behind which one of the same kind has begun, at the same engine, that has ended since the last
        check."""
        self.passed: dict[RequestId, int] = {}

    def fork(self) -> PassAccount:
        other = PassAccount()
        other.order, other.overtaken, other.passed = self.order, self.overtaken, self.passed.copy()
        return other

    def fingerprint(self) -> Hashable:
        return self.order, self.overtaken, frozenset(self.passed.items())

    def begins(self, name: RequestId) -> None:
        """Record that an attempt waits for something new from now on."""
        self._drop(name)
        self.order += (name,)

    def ended(self, name: RequestId, queue_of: Callable[[RequestId], Queue]) -> None:
        """Record that an attempt has got what it waited for."""
        if name in self.order:
            queue, before = queue_of(name), self.order[: self.order.index(name)]
            self.overtaken |= {each for each in before if queue is not None and queue_of(each) == queue}

    def checked(self, queues: dict[RequestId, Queue], serving: set[Seat], quiet: tuple[RequestId, ...]) -> None:
        """Count a check for each attempt. Args: `serving`: the engines that have sent something; `quiet`: the attempts
        of which nothing has come, although their answers have begun."""
        for name, queue in queues.items():
            before = self.passed.get(name, 0)
            if queue is None or not queue[1]:
                self.passed[name] = before + (name in self.overtaken)
            else:
                self.passed[name] = before + (queue[0] in serving) if name in quiet else 0
        self.overtaken = frozenset()

    def keep(self, open_names: dict[RequestId, None]) -> None:
        """Forget attempts that are over."""
        for name in self.order:
            if name not in open_names:
                self._drop(name)

    def _drop(self, name: RequestId) -> None:
        self.order = tuple(each for each in self.order if each != name)
        self.overtaken -= {name}
        self.passed.pop(name, None)
