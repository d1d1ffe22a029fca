"""Streams that have not said who they are yet: a place for each, and never more than so many.

One more, and the oldest gives way: a peer says at once who it is, so whoever holds places and says nothing keeps none
out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")


class PendingConnections(Generic[T]):
    """Args: most, the places; give_way, which ends a stream that must leave its own."""

    def __init__(self, most: int, evict: Callable[[T], None]) -> None:
        self.most: Final = most
        self._evict: Final = evict
        self._slots: Final[dict[T, None]] = {}
        """In the order of their coming."""

    def add(self, connection: T) -> None:
        if len(self._slots) >= self.most:
            oldest = next(iter(self._slots))
            del self._slots[oldest]
            self._evict(oldest)
        self._slots[connection] = None

    def leave(self, connection: T) -> None:
        """It has said who it is, or is over; nothing happens if it has no place any more."""
        self._slots.pop(connection, None)
